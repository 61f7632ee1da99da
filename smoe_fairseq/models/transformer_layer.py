"""Pre-norm or post-norm Transformer layers whose feed-forward sublayer may be a stratified MoE.

fairseq's own encoder layer keeps a second copy of its weights and takes a fused path that current
torch refuses; these layers have neither, and load its checkpoints by the same parameter names.
"""

import torch.nn.functional as F
from fairseq import utils
from fairseq.modules import LayerNorm, MultiheadAttention
from torch import Tensor, nn

from smoe_fairseq.modules.smoe import StratifiedMoE

STOCK_LAYER_COPIES = [
    f"{module}_{parameter}"
    for module in ("in_proj", "out_proj", "fc1", "fc2")
    for parameter in ("weight", "bias")
]


class TransformerLayer(nn.Module):
    """What encoder and decoder layers share: self-attention and the feed-forward or MoE sublayer.

    Args:
        cfg: fairseq's ``TransformerConfig``.
        side: ``cfg.encoder`` or ``cfg.decoder``.
        moe_options: arguments of the `StratifiedMoE` that takes the place of the feed-forward
            network; None: a dense layer.
    """

    def __init__(self, cfg, side, moe_options: dict | None = None):
        super().__init__()
        self.embed_dim = side.embed_dim
        self.dropout = cfg.dropout
        self.activation_dropout = cfg.activation_dropout
        self.normalize_before = side.normalize_before
        self.self_attn = MultiheadAttention(
            side.embed_dim,
            side.attention_heads,
            dropout=cfg.attention_dropout,
            self_attention=True,
        )
        self.self_attn_layer_norm = LayerNorm(side.embed_dim)
        self.is_moe = moe_options is not None
        if self.is_moe:
            self.moe = StratifiedMoE(side.embed_dim, side.ffn_embed_dim, **moe_options)
        else:
            self.activation_fn = utils.get_activation_fn(cfg.activation_fn)
            self.fc1 = nn.Linear(side.embed_dim, side.ffn_embed_dim)
            self.fc2 = nn.Linear(side.ffn_embed_dim, side.embed_dim)
            self.final_layer_norm = LayerNorm(side.embed_dim)

    def sublayer(self, x: Tensor, layer_norm: nn.Module, function) -> Tensor:
        """``function`` with layer norm, dropout and residual around it."""
        y = function(layer_norm(x) if self.normalize_before else x)
        y = x + F.dropout(y, self.dropout, self.training)
        return y if self.normalize_before else layer_norm(y)

    def feed_forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        ids: Tensor | None = None,
        with_stats: bool = True,
    ) -> tuple[Tensor, ...]:
        """The last sublayer on ``x (S, B, D)``: ``(y,)``, or ``(y, *RoutingStats)`` of a MoE layer.

        ``ids (B, S)`` are of the tokens, for gates that ask for them.
        """
        if self.is_moe:
            # Sentence after sentence, not position after position: see `StratifiedMoE.forward`. No
            # copy: the embeddings lie so in memory, and sums of them keep their order.
            y_BSD, stats = self.moe(x.transpose(0, 1), padding_mask, with_stats, ids)
            return y_BSD.transpose(0, 1), *(stats or ())
        return (self.sublayer(x, self.final_layer_norm, self.dense),)

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> None:
        """Called by fairseq before loading: leaves out the copies that its own encoder layer keeps."""
        for copy in STOCK_LAYER_COPIES:
            state_dict.pop(f"{name}.{copy}", None)

    def dense(self, x: Tensor) -> Tensor:
        h = self.activation_fn(self.fc1(x))
        return self.fc2(F.dropout(h, self.activation_dropout, self.training))


class TransformerEncoderLayer(TransformerLayer):
    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``x (S, B, D)``, padding mask and ids ``(B, S)``; returns ``(y,)`` or ``(y, *RoutingStats)``."""

        def self_attention(h):
            return self.self_attn(
                h, h, h, key_padding_mask=encoder_padding_mask, need_weights=False
            )[0]

        x = self.sublayer(x, self.self_attn_layer_norm, self_attention)
        return self.feed_forward(x, encoder_padding_mask, ids)


class TransformerDecoderLayer(TransformerLayer):
    """Between the two also, unless ``no_encoder_attn``, attention to what the encoder made."""

    def __init__(self, cfg, side, moe_options: dict | None = None, no_encoder_attn: bool = False):
        super().__init__(cfg, side, moe_options)
        self.encoder_attn = None
        if no_encoder_attn:
            return
        self.encoder_attn = MultiheadAttention(
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
    ) -> tuple[Tensor | None, ...]:
        """``x (S, B, D)``, ``encoder_out (S', B, D)`` if there is one, padding masks and ids ``(B, S)``.

        Returns:
            ``(y, attention)`` or, of a MoE layer that does not decode step by step,
            ``(y, attention, *RoutingStats)``; the attention over the source, ``(heads, B, S, S')``, is
            None unless ``need_attn``.
        """
        attention = None

        def self_attention(h):
            return self.self_attn(
                h,
                h,
                h,
                key_padding_mask=self_attn_padding_mask,
                incremental_state=incremental_state,
                need_weights=False,
                attn_mask=self_attn_mask,
            )[0]

        def encoder_attention(h):
            nonlocal attention
            h, attention = self.encoder_attn(
                h,
                encoder_out,
                encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=need_attn,
                need_head_weights=need_attn,
            )
            return h

        x = self.sublayer(x, self.self_attn_layer_norm, self_attention)
        if self.encoder_attn is not None:
            x = self.sublayer(x, self.encoder_attn_layer_norm, encoder_attention)
        # Nobody asks for the statistics of single steps of a search.
        with_stats = incremental_state is None
        x, *stats = self.feed_forward(x, self_attn_padding_mask, ids, with_stats)
        return x, attention, *stats
