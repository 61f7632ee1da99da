"""Encoder and decoder of the models for Hugging Face.

The parameters have fairseq's names. Shapes: B sentences, S source and T target positions, D embedding,
H heads.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from smoe_fairseq.errors import UsageError
from smoe_fairseq.huggingface.config import ACTIVATIONS, SMoEConfig
from smoe_fairseq.modules import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.activation import hidden_width
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.layer import may_have_padding


@dataclass
class EncoderOutput(BaseModelOutput):
    """Output of the encoder.

    Args:
        router_logits: see `SMoEForConditionalGeneration.forward`.
        routing: of each MoE layer, if the loss is computed.
    """

    router_logits: tuple[tuple[Tensor, ...], ...] | None = None
    routing: tuple[RoutingStats, ...] | None = None


class ScaledEmbedding(nn.Embedding):
    """Embeddings times ``scale``; as in the library's models, ``inputs_embeds`` are scaled, too."""

    scale = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * super().forward(ids)


class SinusoidalPositions(nn.Module):
    """fairseq's positions: sines, then cosines; 0 at padding. No parameters, any length."""

    def __init__(self, embed_dim: int, padding: int):
        super().__init__()
        self.embed_dim, self.padding = embed_dim, padding

    def forward(self, position_BT: Tensor) -> Tensor:
        half = self.embed_dim // 2
        step = math.log(10000) / (half - 1)
        rate = torch.exp(torch.arange(half, dtype=torch.float, device=position_BT.device) * -step)
        angle = position_BT.unsqueeze(-1).float() * rate
        result = F.pad(torch.cat([angle.sin(), angle.cos()], -1), (0, self.embed_dim % 2))
        return result.masked_fill((position_BT == self.padding).unsqueeze(-1), 0)


class Attention(nn.Module):
    """Multi-head attention; ``key_dim`` is the width of the encoder's output in cross-attention."""

    def __init__(self, config: SMoEConfig, side: str, layer: int, key_dim: int | None = None):
        super().__init__()
        dim, self.heads = config.of(side, "embed_dim"), config.of(side, "attention_heads")
        if dim % self.heads:
            raise UsageError(f"{side}_attention_heads {self.heads}: expected a divisor of {dim}")
        self.dropout, self.layer = config.attention_dropout, layer
        self.is_cross = key_dim is not None
        self.q_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.v_proj = nn.Linear(key_dim or dim, dim), nn.Linear(key_dim or dim, dim)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``x (B, T, D)`` to ``source (B, S, ...)`` or itself, where ``mask`` is True.

        Returns:
            The output, and with ``weights`` the probabilities ``(B, H, T, S)``.
        """
        q = self._heads(self.q_proj(x))
        k, v = self._keys(x if source is None else source, cache)
        dropout = self.dropout if self.training else 0.0
        probs = None
        if weights:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            probs = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
            y = F.dropout(probs, dropout) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return self.out_proj(y.transpose(1, 2).flatten(2)), probs

    def _keys(self, source: Tensor, cache: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and self.is_cross and cache.is_updated.get(self.layer):
            kept = cache.cross_attention_cache.layers[self.layer]
            return kept.keys, kept.values
        k, v = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if cache is None:
            return k, v
        if self.is_cross:
            cache.is_updated[self.layer] = True
        part = cache.cross_attention_cache if self.is_cross else cache.self_attention_cache
        return part.update(k, v, self.layer)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(GradientCheckpointingLayer):
    """An encoder or decoder layer, pre-norm or post-norm, dense or with experts."""

    def __init__(self, config: SMoEConfig, side: str, number: int):
        super().__init__()
        dim, ffn_dim = config.of(side, "embed_dim"), config.of(side, "ffn_embed_dim")
        self.pre_norm = config.of(side, "normalize_before")
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.self_attn = Attention(config, side, number)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        if side == "decoder":
            self.encoder_attn = Attention(config, side, number, config.encoder_embed_dim)
            self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        options = config.moe_blocks.get(f"{side}.layers.{number}.moe")
        self.is_moe = options is not None
        if self.is_moe:
            entries = config.source_vocab_size if side == "encoder" else config.vocab_size
            self.moe = block_of(config, side, options, entries)
        else:
            self.activation_fn = ACTIVATIONS[config.activation_fn]
            self.fc1 = nn.Linear(dim, hidden_width(config.activation_fn, ffn_dim))
            self.fc2 = nn.Linear(ffn_dim, dim)
            self.final_layer_norm = nn.LayerNorm(dim)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        gate_logits: Tensor | None = None,
        mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        padding_BT: Tensor | None = None,
        ids_BT: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        weights: bool = False,
        with_stats: bool = False,
    ) -> tuple:
        """``(y, self-attention, cross-attention, *statistics of the routing)``; None if not requested.

        Tensors with gradients are positional arguments and returned flat, for reentrant checkpointing.
        """

        def attend(name: str, *arguments) -> tuple[Tensor, Tensor | None]:
            norm = getattr(self, f"{name}_layer_norm")
            y, probs = getattr(self, name)(norm(x) if self.pre_norm else x, *arguments)
            return self._add(x, y, norm), probs

        x, self_probs = attend("self_attn", None, mask, past_key_values, weights)
        cross_probs = None
        if source is not None:
            x, cross_probs = attend("encoder_attn", source, source_mask, past_key_values, weights)
        if self.is_moe:
            if self.moe.experts.w1.is_meta:
                raise ValueError(
                    "MoE layers cannot be offloaded: give another device_map, or max_memory"
                )
            x, stats = self.moe(x, padding_BT, with_stats, ids_BT, gate_logits)
            return x, self_probs, cross_probs, *(stats or ())
        h = self.activation_fn(self.fc1(self.final_layer_norm(x) if self.pre_norm else x))
        h = self.fc2(F.dropout(h, self.activation_dropout, self.training))
        return self._add(x, h, self.final_layer_norm), self_probs, cross_probs

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        y = x + F.dropout(y, self.dropout, self.training)
        return y if self.pre_norm else norm(y)


def block_of(config: SMoEConfig, side: str, options: dict, vocabulary: int) -> StratifiedMoE:
    """The block of these arguments; the table of a hash gate is loaded with the weights.

    Sizes and activation are by default those of the side.
    """
    sizes = {name: config.of(side, name) for name in ("embed_dim", "ffn_embed_dim")}
    options = {**sizes, "activation_fn": config.activation_fn, **options}
    options["activation_fn"] = ACTIVATIONS[options["activation_fn"]]
    if GATES[options.get("gate", MoEConfig.gate)].extra_input == "id":
        options["hash_table"] = torch.zeros(vocabulary, dtype=torch.long)
    return StratifiedMoE(**options)


class Side(nn.Module):
    """Base of encoder and decoder: embeddings and layers."""

    def __init__(self, config: SMoEConfig, side: str, vocabulary: int, positions: int):
        super().__init__()
        dim, padding = config.of(side, "embed_dim"), config.pad_token_id
        self.padding, self.dropout = padding, config.dropout
        self.layerdrop = config.of(side, "layerdrop")
        self.embed_tokens = ScaledEmbedding(vocabulary, dim, padding)
        if not config.no_scale_embedding:
            self.embed_tokens.scale = math.sqrt(dim)
        self.embed_positions = None
        if not config.no_token_positional_embeddings:
            self.embed_positions = SinusoidalPositions(dim, padding)
            if config.of(side, "learned_pos"):
                self.embed_positions = nn.Embedding(positions + padding + 1, dim, padding)
        self.layernorm_embedding = nn.LayerNorm(dim) if config.layernorm_embedding else None
        numbers = range(config.of(side, "layers"))
        self.layers = nn.ModuleList(Layer(config, side, number) for number in numbers)
        self.layer_norm = nn.LayerNorm(dim) if config.of(side, "normalize_before") else None

    def set_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the embeddings; in a hash gate's table, new ids have the experts in turn."""
        self.embed_tokens = value
        number = value.num_embeddings
        for gate in self.modules():
            if getattr(gate, "extra_input", None) == "id":
                more = torch.arange(number) % gate.num_experts
                gate.table = torch.cat([gate.table, more.to(gate.table)])[:number]

    def padding_of(self, ids_BT: Tensor | None, mask_BT: Tensor | None, x: Tensor) -> Tensor:
        """True at padding, ``(B, T)``, according to the ids and the last T columns of a mask (0: padding)."""
        padding_BT = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        if ids_BT is not None:
            padding_BT = ids_BT == self.padding
        if mask_BT is not None:
            padding_BT = padding_BT | (mask_BT[:, -x.shape[1] :] == 0)
        return padding_BT

    def embed(self, ids_BT: Tensor | None, embeds: Tensor | None) -> Tensor:
        """``(B, T, D)``, scaled, without positions."""
        if (ids_BT is None) == (embeds is None):
            prefix, labels = ("decoder_", ", labels") if isinstance(self, Decoder) else ("", "")
            raise ValueError(f"expected one of {prefix}input_ids, {prefix}inputs_embeds{labels}")
        return self.embed_tokens(ids_BT) if embeds is None else embeds

    def add_positions(self, x: Tensor, padding_BT: Tensor, past: int | Tensor) -> Tensor:
        """Adds positions except at padding, then layer norm and dropout.

        Args:
            past: number of tokens before, without padding: ``(B, 1)``, or 0.
        """
        if self.embed_positions is not None:
            real_BT = (~padding_BT).long()
            position_BT = (real_BT.cumsum(1) + past) * real_BT + self.padding
            x = x + self.embed_positions(position_BT).to(x)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return F.dropout(x, self.dropout, self.training)

    def run(
        self, x: Tensor, source: Tensor | None, router_logits: bool, weights: bool, **arguments
    ) -> dict:
        """All layers and the last norm.

        Returns:
            By name: the output ``x``; tuples over layers: ``hidden`` (from the embeddings to ``x``),
            ``self`` and ``cross`` attention, ``stats`` and ``logits`` of MoE layers.
        """
        outputs = {"hidden": [x], "self": [], "cross": [], "stats": [], "logits": []}
        gate_logits = None  # of the previous MoE layer
        for layer in self.layers:
            if self.training and self.layerdrop and torch.rand([]) < self.layerdrop:
                continue
            logits, hooks = [], []
            if router_logits and layer.is_moe:
                outputs["logits"].append(logits)
                for gate in layer.moe.gates:
                    keep = lambda _, args, routing, to=logits: to.append(routing.logits_TE)  # noqa: E731
                    hooks.append(gate.register_forward_hook(keep))
            try:
                x, own, cross, *stats = layer(x, source, gate_logits, weights=weights, **arguments)
            finally:
                for hook in hooks:
                    hook.remove()
            stats = RoutingStats(*stats) if stats else None
            if stats is not None:
                gate_logits = stats.gate_logits
            for name, value in (("hidden", x), ("self", own), ("cross", cross), ("stats", stats)):
                if value is not None:
                    outputs[name].append(value)
        if self.layer_norm is not None:
            x = outputs["hidden"][-1] = self.layer_norm(x)
        outputs["logits"] = [tuple(logits) for logits in outputs["logits"]]
        return {"x": x, **{name: tuple(values) for name, values in outputs.items()}}


class Encoder(Side):
    main_input_name = "input_ids"  # read by ``generate``

    def __init__(self, config: SMoEConfig):
        super().__init__(config, "encoder", config.source_vocab_size, config.max_source_positions)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        with_stats: bool = False,
        return_dict: bool | None = None,
    ) -> EncoderOutput:
        """Encodes ids ``(B, S)`` or scaled embeddings ``(B, S, D)``; the mask is 0 at padding."""
        x = self.embed(input_ids, inputs_embeds)
        padding_BS = self.padding_of(input_ids, attention_mask, x)
        x = self.add_positions(x, padding_BS, 0).masked_fill(padding_BS.unsqueeze(-1), 0)
        padding_BS = padding_BS if may_have_padding(padding_BS) else None
        outputs = self.run(
            x,
            None,
            bool(output_router_logits),
            bool(output_attentions),
            mask=None if padding_BS is None else ~padding_BS[:, None, None],
            padding_BT=padding_BS,
            ids_BT=input_ids,
            with_stats=with_stats,
        )
        return EncoderOutput(
            last_hidden_state=outputs["x"],
            hidden_states=outputs["hidden"] if output_hidden_states else None,
            attentions=outputs["self"] if output_attentions else None,
            router_logits=outputs["logits"] if output_router_logits else None,
            routing=outputs["stats"] if with_stats else None,
        )


class Decoder(Side):
    def __init__(self, config: SMoEConfig):
        super().__init__(config, "decoder", config.vocab_size, config.max_target_positions)
        self.output_projection = nn.Linear(config.decoder_embed_dim, config.vocab_size, bias=False)

    def forward(
        self,
        source: Tensor,
        source_padding_BS: Tensor,
        ids_BT: Tensor | None,
        embeds: Tensor | None,
        mask_BT: Tensor | None,
        cache: EncoderDecoderCache | None,
        **outputs: bool,
    ) -> dict:
        """As `Side.run`, for T tokens after those in the cache; ``mask_BT`` may cover these, too."""
        past = cache.get_seq_length() if cache is not None else 0
        x = self.embed(ids_BT, embeds)
        padding_BT = self.padding_of(ids_BT, mask_BT, x)
        number = x.shape[1]
        before_BT = padding_BT.new_zeros(len(x), past)
        if mask_BT is not None and mask_BT.shape[1] == past + number:
            before_BT = mask_BT[:, :past] == 0
        x = self.add_positions(x, padding_BT, (~before_BT).sum(1, keepdim=True))
        all_BT = torch.cat([before_BT, padding_BT], 1)
        mask = None
        if number > 1 or may_have_padding(all_BT):
            ones = torch.ones(number, past + number, dtype=torch.bool, device=x.device)
            # Every position sees itself, even padding, so that no row of the attention is empty.
            itself = ones.tril(past).triu(past)
            mask = (ones.tril(past) & ~all_BT[:, None, None]) | itself
        return self.run(
            x,
            source,
            mask=mask,
            source_mask=(
                ~source_padding_BS[:, None, None] if may_have_padding(source_padding_BS) else None
            ),
            padding_BT=padding_BT if may_have_padding(padding_BT) else None,
            ids_BT=ids_BT,
            past_key_values=cache,
            **outputs,
        )
