"""Pre-norm or post-norm Transformer layers whose feed-forward sublayer may be a stratified MoE.

fairseq's encoder layer keeps a second copy of its weights for a fused kernel that current torch
refuses. These layers do not, and have the same parameter names, so they load its checkpoints.
"""

import logging

import torch.nn.functional as F
from fairseq.modules import LayerNorm
from torch import Tensor, nn

from smoe_fairseq.compat.patches_training import STOCK_LAYER_COPIES
from smoe_fairseq.models.attention import Attention
from smoe_fairseq.models.options import activation_of
from smoe_fairseq.modules.activation import hidden_width
from smoe_fairseq.modules.layer import StratifiedMoE

logger = logging.getLogger(__name__)


class TransformerLayer(nn.Module):
    """Base of encoder and decoder layers: self-attention and the feed-forward sublayer.

    Args:
        cfg: fairseq's ``TransformerConfig``.
        side: ``cfg.encoder`` or ``cfg.decoder``.
        moe_options: arguments of the `StratifiedMoE` that replaces the feed-forward network; None: a
            dense layer.
    """

    def __init__(self, cfg, side, moe_options: dict | None = None):
        super().__init__()
        self.dropout = cfg.dropout
        self.activation_dropout = cfg.activation_dropout
        self.normalize_before = side.normalize_before
        self.self_attn = Attention(
            side.embed_dim, side.attention_heads, dropout=cfg.attention_dropout, self_attention=True
        )
        self.self_attn_layer_norm = LayerNorm(side.embed_dim)
        self.is_moe = moe_options is not None
        if self.is_moe:
            self.moe = StratifiedMoE(side.embed_dim, side.ffn_embed_dim, **moe_options)
        else:
            self.activation_fn = activation_of(cfg.activation_fn)
            self.fc1 = nn.Linear(
                side.embed_dim, hidden_width(cfg.activation_fn, side.ffn_embed_dim)
            )
            self.fc2 = nn.Linear(side.ffn_embed_dim, side.embed_dim)
            self.final_layer_norm = LayerNorm(side.embed_dim)

    def sublayer(self, x: Tensor, layer_norm: nn.Module, function) -> Tensor:
        """``function`` with layer norm, dropout and residual around it."""
        y = function(layer_norm(x) if self.normalize_before else x)
        y = x + F.dropout(y, self.dropout, self.training)
        return y if self.normalize_before else layer_norm(y)

    def attend_to_itself(self, x: Tensor, **options) -> Tensor:
        """The self-attention sublayer on ``x (B, S, D)``; options of `Attention`."""

        def attention(h):
            h = h.transpose(0, 1)
            y, _ = self.self_attn(h, h, h, need_weights=False, **options)
            return y.transpose(0, 1)

        return self.sublayer(x, self.self_attn_layer_norm, attention)

    def feed_forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        ids: Tensor | None = None,
        gate_logits: Tensor | None = None,
        with_stats: bool = True,
    ) -> tuple[Tensor, ...]:
        """The feed-forward sublayer on ``x (B, S, D)``.

        Args:
            ids: token ids ``(B, S)``, for hash gates.
            gate_logits: of the previous MoE layer, ``(B, S, E + M)``, see `StratifiedMoE.forward`.

        Returns:
            ``(y,)``, or ``(y, *RoutingStats)`` for an MoE layer.
        """
        if self.is_moe:
            y, stats = self.moe(x, padding_mask, with_stats, ids, gate_logits)
            return y, *(stats or ())
        return (self.sublayer(x, self.final_layer_norm, self.dense),)

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> None:
        """Adapt checkpoints of fairseq's layers and of earlier versions; fairseq calls it before loading.

        Removes the second copy of weights that fairseq's encoder layer keeps. A block with one stratum and
        ``--smoe-norm released`` drops its output norm if the checkpoint has none.
        """
        for copy in STOCK_LAYER_COPIES:
            state_dict.pop(f"{name}.{copy}", None)
        if self.is_moe and self.moe.layer_norms.has_output_norm and len(self.moe.strata) == 1:
            norms = f"{name}.moe.layer_norms"
            if f"{norms}.0.weight" in state_dict and f"{norms}.1.weight" not in state_dict:
                logger.warning(
                    "%s.moe: the checkpoint has no output norm; continuing without", name
                )
                self.moe.layer_norms.drop_output_norm()

    def dense(self, x: Tensor) -> Tensor:
        h = self.activation_fn(self.fc1(x))
        return self.fc2(F.dropout(h, self.activation_dropout, self.training))


class TransformerEncoderLayer(TransformerLayer):
    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        ids: Tensor | None = None,
        gate_logits: Tensor | None = None,
        with_stats: bool = True,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """``x (S, B, D)``, padding mask and ids ``(B, S)``; returns ``(y,)`` or ``(y, *RoutingStats)``.

        ``attn_mask`` is the `attention_mask` of the padding mask.
        """
        x = x.transpose(0, 1)  # batch first, as in memory
        x = self.attend_to_itself(x, attn_mask=attn_mask)
        x, *stats = self.feed_forward(x, encoder_padding_mask, ids, gate_logits, with_stats)
        return x.transpose(0, 1), *stats


class TransformerDecoderLayer(TransformerLayer):
    """A `TransformerLayer` with attention to the encoder's output, unless ``no_encoder_attn``."""

    def __init__(self, cfg, side, moe_options: dict | None = None, no_encoder_attn: bool = False):
        super().__init__(cfg, side, moe_options)
        self.encoder_attn = None
        if no_encoder_attn:
            return
        self.encoder_attn = Attention(
            side.embed_dim,
            side.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
        )
        self.encoder_attn_layer_norm = LayerNorm(side.embed_dim)

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        ids: Tensor | None = None,
        gate_logits: Tensor | None = None,
        encoder_attn_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """``x (S, B, D)``, ``encoder_out (S', B, D)`` or None, padding masks and ids ``(B, S)``.

        ``self_attn_mask`` and ``encoder_attn_mask`` are `attention_mask`s that include padding.

        Returns:
            ``(y, attention)``, or ``(y, attention, *RoutingStats)`` for an MoE layer; with
            ``incremental_state`` only if the next MoE layer needs them. The attention over the
            source, ``(heads, B, S, S')``, is None unless ``need_attn``.
        """
        attention = None

        def encoder_attention(h):
            nonlocal attention
            y, attention = self.encoder_attn(
                h.transpose(0, 1),
                encoder_out,
                encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=need_attn,
                need_head_weights=need_attn,
                attn_mask=None if need_attn else encoder_attn_mask,
            )
            return y.transpose(0, 1)

        x = x.transpose(0, 1)  # batch first, as in memory
        x = self.attend_to_itself(
            x,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            attn_mask=self_attn_mask,
        )
        if self.encoder_attn is not None:
            x = self.sublayer(x, self.encoder_attn_layer_norm, encoder_attention)
        # Statistics of single decoding steps are not used.
        with_stats = incremental_state is None
        x, *stats = self.feed_forward(x, self_attn_padding_mask, ids, gate_logits, with_stats)
        return x.transpose(0, 1), attention, *stats
