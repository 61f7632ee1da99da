"""Translation models for Hugging Face, with `StratifiedMoE` layers and ``generate``.

The parameters have fairseq's names. Shapes: B sentences, S source and T target positions, D embedding,
H heads, V entries of the target dictionary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput, Seq2SeqMoEOutput

from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import Number, check
from smoe_fairseq.modules import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.gates import GATES

SIDES = ("encoder", "decoder")
# The name of the cache in outputs and in `generate`, by the version of transformers.
CACHE = "cache" if hasattr(Seq2SeqMoEOutput, "cache") else "past_key_values"
# fairseq's activations by name.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": lambda x: F.gelu(x.float()).type_as(x),
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


class SMoEConfig(PretrainedConfig):
    """Options of ``smoe_transformer`` under their own names, such as ``encoder_layers``; see docs/flags.md.

    Args:
        vocab_size: V, entries of the target dictionary.
        source_vocab_size: entries of the source dictionary; None: V.
        moe_blocks: arguments of the `StratifiedMoE` of each MoE layer by its name
            (``encoder.layers.1.moe``), such as ``{"strata": "4-4"}``; empty: a dense model.
        router_aux_loss_coef, router_z_loss_coef, router_entropy_loss_coef: weights of the gates' balance
            loss, z-loss, and (gate top-p) entropy in ``loss``.
        output_router_logits: whether outputs contain the gates' logits.
        label_smoothing: of the cross entropy in ``loss``. The Trainer's ``label_smoothing_factor`` is
            not supported with experts, since the model then gets no labels.
        options: the other options of the model.
    """

    model_type = "smoe_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "decoder_embed_dim",
        "d_model": "decoder_embed_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
    }

    def __init__(
        self,
        vocab_size: int = 1000,
        source_vocab_size: int | None = None,
        moe_blocks: dict[str, dict] | None = None,
        use_cache: bool = True,
        **options,
    ):
        self.vocab_size = vocab_size
        self.source_vocab_size = source_vocab_size or vocab_size
        self.moe_blocks = moe_blocks or {}
        for side in SIDES:
            for name, default in _SIDE_DEFAULTS.items():
                setattr(self, f"{side}_{name}", options.pop(f"{side}_{name}", default))
        for name, default in _DEFAULTS.items():
            setattr(self, name, options.pop(name, default))
        ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        flags = {"is_encoder_decoder": True, "tie_word_embeddings": True}
        super().__init__(**{**ids, **flags, **options})
        self.use_cache = use_cache

    def of(self, side: str, name: str):
        """The option of a side, such as ``encoder_layers``."""
        return getattr(self, f"{side}_{name}")


_SIDE_DEFAULTS = {
    "embed_dim": 512,
    "ffn_embed_dim": 2048,
    "layers": 6,
    "attention_heads": 8,
    "normalize_before": True,
    "learned_pos": False,
    "layerdrop": 0.0,
}
_DEFAULTS = {
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
    "share_all_embeddings": True,
    "share_decoder_input_output_embed": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "router_aux_loss_coef": 0.01,
    "router_z_loss_coef": 0.0,
    "router_entropy_loss_coef": 1e-4,
    "output_router_logits": False,
    "label_smoothing": 0.0,
}
_FORM = {
    **{name: type(default) for name, default in _DEFAULTS.items()},
    **{f"{side}_{n}": type(value) for side in SIDES for n, value in _SIDE_DEFAULTS.items()},
    **{f"{side}_attention_heads": Number(1, whole=True) for side in SIDES},
    "activation_fn": set(ACTIVATIONS),
    "moe_blocks": {str: {"gate?": set(GATES), "activation_fn?": set(ACTIVATIONS)}},
}


@dataclass
class EncoderOutput(ModelOutput):
    """Output of the encoder.

    Args:
        last_hidden_state: ``(B, S, D)``.
        hidden_states: embeddings and the output of each layer, if requested.
        attentions: of each layer ``(B, H, S, S)``, if requested.
        router_logits: see `SMoEForConditionalGeneration.forward`.
        routing: of each MoE layer, if the loss is computed.
    """

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
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
            self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
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
    output_norm = options.pop("output_norm", True)
    block = StratifiedMoE(**options)
    if not output_norm:  # an old checkpoint
        block.layer_norms.drop_output_norm()
    return block


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

    def add_positions(self, x: Tensor, padding_BT: Tensor, past: int) -> Tensor:
        """Adds positions except at padding, then layer norm and dropout; ``past`` tokens came before."""
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
            By name: the output ``x``; tuples over layers: ``hidden`` (beginning with the embeddings),
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
            x = self.layer_norm(x)
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
        x = self.add_positions(x, padding_BT, past)
        number = x.shape[1]
        before_BT = padding_BT.new_zeros(len(x), past)
        if mask_BT is not None and mask_BT.shape[1] == past + number:
            before_BT = mask_BT[:, :past] == 0
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


def may_have_padding(padding_BT: Tensor) -> bool:
    """Whether to apply the mask. Always True on a GPU, where reading the mask would wait for it."""
    return padding_BT.device.type != "cpu" or bool(padding_BT.any())


class SMoEForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """A ``smoe_transformer``, dense or with experts, that translates.

    The gates' losses are computed per batch. Only fairseq's criterion has the budget losses of CMR and
    ``--smoe-capacity-budget``.
    """

    config_class = SMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]
    _supports_sdpa = True
    _tied_weights_keys = {}  # set for each model
    accepts_loss_kwargs = True  # the Trainer passes ``num_items_in_batch``

    def __init__(self, config: SMoEConfig):
        super().__init__(config)
        check(vars(config), _FORM, "the config")
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        shared = "encoder.embed_tokens.weight"
        self._tied_weights_keys = {}
        if config.share_all_embeddings:
            for name in ("embed_tokens", "output_projection"):
                self._tied_weights_keys[f"decoder.{name}.weight"] = shared
        elif config.share_decoder_input_output_embed:
            own = "decoder.embed_tokens.weight"
            self._tied_weights_keys["decoder.output_projection.weight"] = own
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """fairseq's initial weights."""
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, StratifiedMoE):
            module.compute_tables()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_all_embeddings:
            self.decoder.embed_tokens = value
        self.config.source_vocab_size = value.num_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **options):
        """As in transformers; raises UsageError if source and target have separate vocabularies."""
        if new_num_tokens is not None and not self.config.share_all_embeddings:
            raise UsageError("resize_token_embeddings: expected a model with share_all_embeddings")
        return super().resize_token_embeddings(new_num_tokens, *args, **options)

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder.output_projection

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.decoder.output_projection = value

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """``(B, T)``: the end of sentence, then the labels without the last."""
        ids = labels.masked_fill(labels == -100, self.config.pad_token_id)
        first = torch.full_like(ids[:, :1], self.config.decoder_start_token_id)
        return torch.cat([first, ids[:, :-1]], 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: EncoderOutput | tuple | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        cache: EncoderDecoderCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unused,
    ) -> Seq2SeqMoEOutput | tuple:
        """Logits ``(B, T, V)``, and the loss if there are ``labels (B, T)``, -100 at positions to ignore.

        ``cache`` is another name of ``past_key_values``, used by transformers 5.24 and later.
        ``num_items_in_batch`` is the number of labels in all batches of an update (default: in this one),
        by which losses are divided. Embeddings are expected as `get_input_embeddings` returns them. Router
        logits contain, for each MoE layer and stratum, a tensor ``(tokens of the gate, visible experts)``.

        Returns:
            ``loss`` is the mean cross entropy over the labels, plus ``encoder_aux_loss`` and
            ``decoder_aux_loss``: each side's part of the gates' weighted losses.

        Raises:
            UsageError: the Trainer passes no labels, because of its ``label_smoothing_factor`` or a loss
                function, and router logits are not requested: the gates' losses would be missing. Or the
                cache is a static one.
        """
        config = self.config
        attentions = _value_or(output_attentions, config.output_attentions)
        hidden = _value_or(output_hidden_states, config.output_hidden_states)
        router = _value_or(output_router_logits, config.output_router_logits)
        with_stats = labels is not None
        if num_items_in_batch is not None and config.moe_blocks and not (with_stats or router):
            raise UsageError(
                "the Trainer passed no labels: set config.label_smoothing in place of "
                "label_smoothing_factor, or with your own loss function config.output_router_logits"
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask, inputs_embeds, hidden, attentions, router, with_stats
            )
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = EncoderOutput(*encoder_outputs)
        source = encoder_outputs.last_hidden_state
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        past_key_values = cache if past_key_values is None else past_key_values
        use_cache = labels is None and _value_or(use_cache, config.use_cache)
        if isinstance(getattr(past_key_values, "self_attention_cache", None), StaticCache):
            raise UsageError("cache_implementation: expected a dynamic cache, not a static one")
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        outputs = self.decoder(
            source,
            self.encoder.padding_of(input_ids, attention_mask, source),
            decoder_input_ids,
            decoder_inputs_embeds,
            decoder_attention_mask,
            past_key_values,
            router_logits=router,
            weights=attentions,
            with_stats=with_stats,
        )
        logits = self.decoder.output_projection(outputs["x"])
        loss = encoder_loss = decoder_loss = None
        if labels is not None:
            # fairseq distributes the smoothing over the other entries, torch over all.
            smoothing = config.label_smoothing * config.vocab_size / (config.vocab_size - 1)
            labels = labels.flatten().to(logits.device)
            count = (labels != -100).sum()
            items = count if num_items_in_batch is None else num_items_in_batch
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), labels, reduction="sum", label_smoothing=smoothing
            )
            loss = loss / items
            routing = getattr(encoder_outputs, "routing", None) or (), outputs["stats"]
            parts = self.gate_losses(*routing, loss)
            encoder_loss, decoder_loss = (part * (count / items) for part in parts)
            loss = loss + encoder_loss + decoder_loss
        output = Seq2SeqMoEOutput(
            loss=loss,
            logits=logits,
            encoder_aux_loss=encoder_loss,
            decoder_aux_loss=decoder_loss,
            **{CACHE: past_key_values if use_cache else None},
            decoder_hidden_states=outputs["hidden"] if hidden else None,
            decoder_attentions=outputs["self"] if attentions else None,
            cross_attentions=outputs["cross"] if attentions else None,
            decoder_router_logits=outputs["logits"] if router else None,
            encoder_last_hidden_state=source,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            encoder_router_logits=getattr(encoder_outputs, "router_logits", None),
        )
        return output if _value_or(return_dict, config.return_dict) else output.to_tuple()

    def gate_losses(
        self, encoder: tuple[RoutingStats, ...], decoder: tuple[RoutingStats, ...], like: Tensor
    ) -> list[Tensor]:
        """Each side's part of the weighted means over all MoE layers; scalars on the device of ``like``."""
        config = self.config
        learns = any(m.learns_balance for m in self.modules() if isinstance(m, StratifiedMoE))
        number = max(1, len(encoder) + len(decoder))
        parts = []
        for side in (encoder, decoder):
            part = like.new_zeros(())
            for stats in side:
                losses = config.router_z_loss_coef * stats.z_loss
                if learns:
                    losses = losses + config.router_aux_loss_coef * stats.balance_loss
                if stats.entropy is not None:
                    losses = losses + config.router_entropy_loss_coef * stats.entropy
                part = part + losses.to(like.device) / number
            parts.append(part)
        return parts


def _value_or(value: bool | None, default: bool) -> bool:
    return bool(default if value is None else value)
