"""The SMoE transformer: its layers, and the model registered as ``smoe_transformer``."""

import heapq
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from fairseq.data import Dictionary
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.attention import attention_mask
from smoe_fairseq.models.checks import (
    check_checkpoint,
    check_model,
    config_faults,
    translation_faults,
)
from smoe_fairseq.models.layers import TransformerDecoderLayer, TransformerEncoderLayer
from smoe_fairseq.models.memory import check_size
from smoe_fairseq.models.options import DecoderOptions, MoEOptions, SMoETransformerConfig
from smoe_fairseq.modules import RoutingStats
from smoe_fairseq.modules.experts import Experts
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.layer import StratifiedMoE, may_have_padding
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.translate.load import Translator


def moe_blocks(model: nn.Module) -> dict[str, StratifiedMoE]:
    """MoE layers by name (``encoder.layer.1``), in the order of `nn.Module.named_modules`.

    A block that is not the only one of such a layer keeps its module's name.
    """
    blocks = {n: m for n, m in model.named_modules() if isinstance(m, StratifiedMoE)}
    layers = {name: _LAYER.search(name) for name in blocks}
    short = {name: f"{match[1]}.layer.{match[2]}" for name, match in layers.items() if match}
    shared = Counter(short.values())
    return {
        short[name] if shared[short.get(name)] == 1 else name: block
        for name, block in blocks.items()
    }


_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)")

# Prefix of a layer's name in the logging output, for `RoutingStats.observed`.
OBSERVED = "moe_asked "


def first_block(model: nn.Module) -> StratifiedMoE | None:
    """The first MoE layer of the model, or None. Layers may have different numbers of experts."""
    return next((m for m in model.modules() if isinstance(m, StratifiedMoE)), None)


def placement_of(model: nn.Module) -> Placement | None:
    """The placement of the first MoE layer's experts on ranks; None if each rank has all experts."""
    block = first_block(model)
    return block.experts.placement if block and block.experts.placement.is_sharded else None


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of each MoE layer by its name in the state dict, ``encoder.layers.1.moe``."""
    return {n: m.experts for n, m in model.named_modules() if isinstance(m, StratifiedMoE)}


def hash_table(config: MoEOptions, dictionary: Dictionary, experts: int) -> Tensor:
    """The expert of each dictionary entry for hash gates, ``(V,)``.

    "balanced" assigns entries in order of frequency to the expert with the fewest tokens so far (Roller
    et al. 2021), by the dictionary's counts.

    Raises:
        UsageError: all counts in the dictionary are equal.
    """
    if torch.empty(0).is_meta:  # built only for its shapes, perhaps without counts
        return torch.zeros(len(dictionary), dtype=torch.long)
    if str(config.moe_hash_table) == "random":
        generator = torch.Generator("cpu").manual_seed(config.moe_hash_seed)
        return torch.randint(experts, (len(dictionary),), generator=generator, device="cpu")
    if len(set(dictionary.count[dictionary.nspecial :])) < 2:
        raise UsageError(
            "--moe-hash-table balanced: the dictionary has no counts; expected it as fairseq-preprocess "
            "writes it without --srcdict, or --moe-hash-table random"
        )
    table = torch.zeros(len(dictionary), dtype=torch.long, device="cpu")
    loads = [(0, expert) for expert in range(experts)]
    for index in sorted(range(len(dictionary)), key=lambda i: -dictionary.count[i]):
        load, expert = heapq.heappop(loads)
        table[index] = expert
        heapq.heappush(loads, (load + dictionary.count[index], expert))
    return table


class SparseModel:
    """Mixin for models with stratified MoE layers: building, checks and loading of checkpoints.

    Put it before fairseq's model class among the bases.

    Attributes:
        config_class: the dataclass of the model's options.
        faults: what is wrong with options and task in addition to `config_faults`.
        of_config: builds the model from checked options.
    """

    config_class: type[DecoderOptions]
    faults: Callable
    of_config: Callable

    @classmethod
    def add_args(cls, parser):
        cls.config_class.add_args(parser)

    @classmethod
    def build_model(cls, cfg, task):
        """Check the options, and build the model.

        Raises:
            UsageError: the options contradict each other or the task.
        """
        try:
            config = cls.config_class.of(cfg)
            for sentence in chain(config_faults(config), cls.faults(config, task)):
                raise ValueError(sentence)
            check_size(partial(cls.of_config, config, task))
        except ValueError as error:
            raise UsageError(str(error)) from None
        model = cls.of_config(config, task)
        if placement_of(model) is not None:
            check_model(config, task)
        return model

    def set_num_updates(self, num_updates):
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def make_generation_fast_(self, **kwargs):
        """As fairseq's; raises UsageError for ``--retain-dropout``, which only fairseq's modules obey."""
        if kwargs.get("retain_dropout"):
            message = "SMoE models would retain only a part of their dropout; leave it out"
            raise UsageError(f"--retain-dropout: {message}")
        super().make_generation_fast_(**kwargs)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq's; raises UsageError if the checkpoint has another architecture."""
        self.upgrade_state_dict(state_dict)
        self._keep_local_experts(state_dict)
        if strict:
            check_checkpoint(self, state_dict)
        model_cfg = args if model_cfg is None else model_cfg  # args is its older name
        return super().load_state_dict(state_dict, strict, model_cfg)

    def _keep_local_experts(self, state_dict):
        """Select this rank's experts from a checkpoint with all experts (``--finetune-from-model``)."""
        for layer, experts in experts_of(self).items():
            place = experts.placement
            for weight, parameter in experts.named_parameters():
                loaded = state_dict.get(name := f"{layer}.experts.{weight}")
                if loaded is not None and len(loaded) == place.num_experts != len(parameter):
                    state_dict[name] = loaded[place.local.start : place.local.stop]


def with_experts(config: DecoderOptions, source: Dictionary, target: Dictionary):
    """fairseq's ``TransformerConfig``, with ``moe_freq`` and ``moe_options`` added to each side.

    Args:
        source, target: dictionaries of the encoder's and the decoder's input.

    Raises:
        UsageError: the table of a hash gate cannot be balanced by the dictionary's counts.
    """
    transformer = config.transformer()
    dictionaries = {"encoder": source, "decoder": target}
    for name in config.SIDES:
        side = getattr(transformer, name)
        side.moe_freq = config.moe_freq_of(name)
        side.moe_options = config.moe_options(name)
        if GATES[config.moe_gate].extra_input == "id":
            for options, strata in zip(side.moe_options, config.strata_of(name), strict=True):
                options["hash_table"] = hash_table(config, dictionaries[name], strata.num_experts)
    return transformer


def freeze(model: nn.Module, parts: frozenset[str]) -> nn.Module:
    """The model, whose "embeddings", "encoder" or "decoder" (``parts``) are no longer trained."""
    for name, parameter in model.named_parameters():
        tied = "embed_tokens" in name or "output_projection" in name
        if not parts.isdisjoint(["embeddings"] if tied else name.split(".")):
            parameter.requires_grad_(False)
    return model


@register_model("smoe_transformer", dataclass=SMoETransformerConfig)
class SMoETransformerModel(SparseModel, TransformerModelBase):
    """Encoder-decoder in which every ``--moe-freq``-th layer is a stratified mixture of experts.

    The decoder's extra output contains the `RoutingStats` of all MoE layers as "moe_stats", encoder first,
    and their names as "moe_layers". Layers that LayerDrop skips are missing.
    """

    config_class = SMoETransformerConfig
    faults = staticmethod(translation_faults)
    has_own_search = True  # translate/search.py supports it

    @classmethod
    def of_config(cls, config, task):
        transformer = with_experts(config, task.source_dictionary, task.target_dictionary)
        return freeze(super(SparseModel, cls).build_model(transformer, task), config.frozen)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return SMoETransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return SMoETransformerDecoder(cfg, tgt_dict, embed_tokens)

    @classmethod
    def from_pretrained(
        cls,
        run,
        checkpoint_file=None,
        data_name_or_path=None,
        source_lang=None,
        target_lang=None,
        **overrides,
    ):
        """Load a trained model that translates raw text, with its dictionaries and subword model.

        Args:
            run: the folder of a run (its best checkpoint, or else its last), or a checkpoint; a list is an
                ensemble that averages probabilities.
            checkpoint_file: another checkpoint of the folder.
            data_name_or_path: folder of the dictionaries and ``spm.model``; by default the run's folder,
                or else the folder of the training data.
            source_lang, target_lang: required if several directions are possible, here or in ``translate``.
            overrides: settings of the checkpoint to change, such as ``moe_eval_capacity_factor=1.0``.

        Returns:
            A `Translator`, in evaluation mode, on the CPU: ``.translate(["..."])``.

        Raises:
            UsageError: a file is missing, damaged, or does not fit the others.
        """
        return Translator.of_run(
            run, checkpoint_file, data_name_or_path, source_lang, target_lang, **overrides
        )


class _Layers:
    """Mixin that builds the layers of encoder and decoder; every ``moe_freq``-th is an MoE layer."""

    def build_layer(self, layer_class, cfg, side, **options):
        self.layers_built = getattr(self, "layers_built", 0) + 1
        is_moe = side.moe_freq > 0 and self.layers_built % side.moe_freq == 0
        moe = side.moe_options[self.layers_built // side.moe_freq - 1] if is_moe else None
        layer = layer_class(cfg, side, moe_options=moe, **options)
        layer.name = f"{self.side}.layer.{self.layers_built - 1}"  # as in `moe_blocks`
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=min_params)


class SMoETransformerEncoder(_Layers, TransformerEncoderBase):
    side = "encoder"

    def build_encoder_layer(self, cfg):
        return self.build_layer(TransformerEncoderLayer, cfg, cfg.encoder)

    def forward(
        self,
        src_tokens,
        src_lengths=None,
        return_all_hiddens=False,
        token_embeddings=None,
        with_stats=True,
    ):
        """fairseq's encoder output for ``src_tokens (B, S)``, plus "moe_stats" and "moe_layers".

        Both are empty without ``with_stats``, unless gates need the logits of the layer before.
        """
        padding_mask = src_tokens.eq(self.padding_idx)
        has_padding = may_have_padding(padding_mask)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if has_padding:
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0)
        x = x.transpose(0, 1)  # (S, B, D)

        hidden_states = [x]
        moe_stats, moe_layers, gate_logits = [], [], None
        mask_or_none = padding_mask if has_padding else None
        attn_mask = attention_mask(mask_or_none, None, x.dtype)
        for layer in self.layers:
            x, *stats = layer(x, mask_or_none, src_tokens, gate_logits, with_stats, attn_mask)
            hidden_states.append(x)
            if stats:
                moe_stats.append(RoutingStats(*stats))
                gate_logits = moe_stats[-1].gate_logits
                moe_layers.append(layer.name)
        if self.layer_norm is not None:
            x = self.layer_norm(x.transpose(0, 1)).transpose(0, 1)

        lengths = src_tokens.ne(self.padding_idx).sum(dim=1, dtype=torch.int32).reshape(-1, 1)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding_mask],
            "encoder_embedding": [embedding],
            "encoder_states": hidden_states if return_all_hiddens else [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [lengths],
            "moe_stats": moe_stats,
            "moe_layers": moe_layers,
        }


class SMoETransformerDecoder(_Layers, TransformerDecoderBase):
    side = "decoder"

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return self.build_layer(
            TransformerDecoderLayer, cfg, cfg.decoder, no_encoder_attn=no_encoder_attn
        )

    def extract_features(
        self,
        prev_output_tokens,
        encoder_out=None,
        incremental_state=None,
        full_context_alignment=False,
        alignment_layer=None,
        alignment_heads=None,
    ):
        """Features ``(B, S, D)`` and fairseq's extra outputs, with "moe_stats" among them."""
        attention_layer = self.num_layers - 1 if alignment_layer is None else alignment_layer
        needs_attention = alignment_layer is not None or not self.training
        encoder_out = encoder_out or {}  # a language model has none
        source_mask = _first(encoder_out.get("encoder_padding_mask"))
        x = self.embed(prev_output_tokens, incremental_state)
        ids, self_attn_mask, encoder_attn_mask = prev_output_tokens, None, None
        if incremental_state is not None:
            ids = ids[:, -1:]
            padding_mask = ids.eq(self.padding_idx)
            has_padding = bool(padding_mask.any())  # a decoding step waits for the device anyway
            padding_mask = padding_mask if has_padding else None
        else:
            padding_mask = ids.eq(self.padding_idx)
            padding_mask = padding_mask if may_have_padding(padding_mask) else None
            future_mask = None if full_context_alignment else self.buffered_future_mask(x)
            self_attn_mask = attention_mask(padding_mask, future_mask, x.dtype)
            encoder_attn_mask = attention_mask(source_mask, None, x.dtype)

        attention = gate_logits = None
        hidden_states = [x]
        moe_stats, moe_layers = (list(encoder_out.get(k, [])) for k in ("moe_stats", "moe_layers"))
        for i, layer in enumerate(self.layers):
            x, layer_attention, *stats = layer(
                x,
                _first(encoder_out.get("encoder_out")),
                source_mask,
                incremental_state,
                self_attn_mask=self_attn_mask,
                self_attn_padding_mask=padding_mask,
                need_attn=needs_attention and i == attention_layer,
                ids=ids,
                gate_logits=gate_logits,
                encoder_attn_mask=encoder_attn_mask,
            )
            hidden_states.append(x)
            if stats:
                moe_stats.append(RoutingStats(*stats))
                gate_logits = moe_stats[-1].gate_logits
                moe_layers.append(layer.name)
            if layer_attention is not None:
                attention = layer_attention.float().to(x)
        if attention is not None:
            attention = attention[:alignment_heads].mean(dim=0)
        x = x.transpose(0, 1)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        extra = {"attn": [attention], "inner_states": hidden_states}
        return x, extra | {"moe_stats": moe_stats, "moe_layers": moe_layers}

    def embed(self, prev_output_tokens, incremental_state) -> Tensor:
        """Embeddings with positions, ``(S, B, D)``; only the last token's with ``incremental_state``."""
        positions = None
        if self.embed_positions is not None:
            positions = self.embed_positions(
                prev_output_tokens, incremental_state=incremental_state
            )
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
            positions = None if positions is None else positions[:, -1:]
        x = self.embed_scale * self.embed_tokens(prev_output_tokens.contiguous())
        if positions is not None:
            x = x + positions
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x).transpose(0, 1)

    def buffered_future_mask(self, tensor):
        """True for future positions, ``(S, S)``."""
        size = tensor.size(0)
        if self._future_mask.size(0) < size or self._future_mask.device != tensor.device:
            ones = torch.ones(size, size, dtype=torch.bool, device=tensor.device)
            self._future_mask = ones.triu(1)
        return self._future_mask[:size, :size]


def _first(items: list | None):
    return items[0] if items else None
