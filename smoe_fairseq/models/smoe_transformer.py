"""``--arch smoe_transformer``: fairseq's transformer with stratified MoE layers (paper, section 3)."""

from argparse import Namespace

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from omegaconf import OmegaConf
from torch import Tensor

from smoe_fairseq.models.config import FIELDS, FORMER_NAMES, SMoETransformerConfig
from smoe_fairseq.models.hash_tables import hash_table
from smoe_fairseq.models.moe_layers import experts_of, placement_of
from smoe_fairseq.models.preflight import check_checkpoint, check_config, check_model
from smoe_fairseq.models.transformer_layer import (
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from smoe_fairseq.models.translator import Translator
from smoe_fairseq.modules import RoutingStats
from smoe_fairseq.system.errors import UsageErrorOfAll


@register_model("smoe_transformer", dataclass=SMoETransformerConfig)
class SMoETransformerModel(TransformerModelBase):
    """Encoder-decoder whose every ``--moe-freq``-th layer is a stratified mixture of experts.

    The decoder's extra output has, under "moe_stats", the `RoutingStats` of all MoE layers, encoder first,
    and their names under "moe_layers"; LayerDrop leaves some out.
    """

    @classmethod
    def add_args(cls, parser):
        SMoETransformerConfig.add_args(parser)

    @classmethod
    def build_model(cls, cfg, task):
        values = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else vars(cfg)
        values = {FORMER_NAMES.get(name, name): value for name, value in values.items()}
        config = SMoETransformerConfig(**{k: values[k] for k in FIELDS if k in values})
        transformer = config.transformer()
        dictionaries = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
        try:
            check_config(config, task)
            for name, dictionary in dictionaries.items():
                side = getattr(transformer, name)
                side.moe_freq = config.moe_freq_of(name)
                side.moe_options = config.moe_options(name)
                if config.moe_gate == "hash":
                    for options, strata in zip(
                        side.moe_options, config.strata_of(name), strict=True
                    ):
                        table = hash_table(config, dictionary, strata.num_experts)
                        options["hash_table"] = table
        except ValueError as error:
            raise UsageErrorOfAll(str(error)) from None
        model = super().build_model(transformer, task)
        if placement_of(model) is not None:
            check_model(config, task)
        return model

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
        """A trained model that translates text, with the dictionaries and subwords of its training.

        Args:
            run: the folder of a run, whose best checkpoint is taken, or else its last; or a checkpoint.
            checkpoint_file: another one of the folder.
            data_name_or_path: folder of the dictionaries and of ``spm.model``; by default the run's, if they
                are there, and else where the training has had them.
            source_lang, target_lang: where several directions are possible; ``translate`` takes them too.
            overrides: settings of the checkpoint to change, such as ``moe_eval_capacity_factor=1.0``.

        Returns:
            A `Translator`, in evaluation mode, on the CPU: ``.translate(["..."])``.

        Raises:
            UsageError: a file is missing, damaged, or does not go with the others.
        """
        return Translator.of_run(
            run, checkpoint_file, data_name_or_path, source_lang, target_lang, **overrides
        )

    def set_num_updates(self, num_updates):
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq does; one sentence where the checkpoint is of another architecture."""
        self.upgrade_state_dict(state_dict)
        self._take_own_experts(state_dict)
        if strict:
            check_checkpoint(self, state_dict)
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def _take_own_experts(self, state_dict):
        """Of a checkpoint with all experts (``--finetune-from-model``), a process takes its own."""
        for layer, experts in experts_of(self).items():
            place = experts.placement
            for own, parameter in experts.named_parameters():
                loaded = state_dict.get(name := f"{layer}.experts.{own}")
                if loaded is not None and len(loaded) == place.num_experts != len(parameter):
                    state_dict[name] = loaded[place.local.start : place.local.stop]


class _Layers:
    """How encoder and decoder build their layers; every ``moe_freq``-th one is a MoE layer."""

    def build_layer(self, layer_class, cfg, side):
        self.layers_built = getattr(self, "layers_built", 0) + 1
        is_moe = side.moe_freq > 0 and self.layers_built % side.moe_freq == 0
        options = side.moe_options[self.layers_built // side.moe_freq - 1] if is_moe else None
        layer = layer_class(cfg, side, moe_options=options)
        layer.name = f"{self.side}.layer.{self.layers_built - 1}"  # as `moe_blocks` has it
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=min_params)


class SMoETransformerEncoder(_Layers, TransformerEncoderBase):
    side = "encoder"

    def build_encoder_layer(self, cfg):
        return self.build_layer(TransformerEncoderLayer, cfg, cfg.encoder)

    def forward(
        self, src_tokens, src_lengths=None, return_all_hiddens=False, token_embeddings=None
    ):
        """fairseq's encoder output for ``src_tokens (B, S)``, with "moe_stats" beside it."""
        padding_mask = src_tokens.eq(self.padding_idx)
        has_padding = may_have_padding(padding_mask)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if has_padding:
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0)
        x = x.transpose(0, 1)  # (S, B, D)

        hidden_states = [x]
        moe_stats, moe_layers = [], []
        for layer in self.layers:
            x, *stats = layer(x, padding_mask if has_padding else None, src_tokens)
            hidden_states.append(x)
            if stats:
                moe_stats.append(RoutingStats(*stats))
                moe_layers.append(layer.name)
        if self.layer_norm is not None:
            x = self.layer_norm(x)

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
        return self.build_layer(TransformerDecoderLayer, cfg, cfg.decoder)

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
        padding_mask = prev_output_tokens.eq(self.padding_idx)
        x = self.embed(prev_output_tokens, incremental_state)
        ids = prev_output_tokens
        if incremental_state is not None:
            padding_mask, ids = padding_mask[:, -1:], ids[:, -1:]
            has_padding = bool(padding_mask.any())  # the search reads its results at every step
        else:
            has_padding = may_have_padding(padding_mask)
        padding_mask = padding_mask if has_padding else None
        future_mask = None
        if incremental_state is None and not full_context_alignment:
            future_mask = self.buffered_future_mask(x)

        attention = None
        hidden_states = [x]
        moe_stats, moe_layers = (
            list(encoder_out.get(key, [])) for key in ("moe_stats", "moe_layers")
        )
        for i, layer in enumerate(self.layers):
            x, layer_attention, *stats = layer(
                x,
                encoder_out["encoder_out"][0],
                _first(encoder_out["encoder_padding_mask"]),
                incremental_state,
                self_attn_mask=future_mask,
                self_attn_padding_mask=padding_mask,
                need_attn=needs_attention and i == attention_layer,
                ids=ids,
            )
            hidden_states.append(x)
            if stats:
                moe_stats.append(RoutingStats(*stats))
                moe_layers.append(layer.name)
            if layer_attention is not None:
                attention = layer_attention.float().to(x)
        if attention is not None:
            attention = attention[:alignment_heads].mean(dim=0)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        extra = {
            "attn": [attention],
            "inner_states": hidden_states,
            "moe_stats": moe_stats,
            "moe_layers": moe_layers,
        }
        return x.transpose(0, 1), extra

    def embed(self, prev_output_tokens, incremental_state) -> Tensor:
        """Embeddings with positions, ``(S, B, D)``; of the last token alone when decoding step by step."""
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
        """True where a position may not look; a bool like the padding mask, or torch warns of the mix."""
        size = tensor.size(0)
        mask = self._future_mask
        if mask.size(0) < size or mask.device != tensor.device:
            mask = torch.ones(size, size, dtype=torch.bool, device=tensor.device).triu(1)
            self._future_mask = mask
        return mask[:size, :size]


def may_have_padding(padding_mask: Tensor) -> bool:
    """Whether to mask; on a device always, since asking would wait for it, and the result is the same."""
    return padding_mask.device.type != "cpu" or bool(padding_mask.any())


def _first(items: list):
    return items[0] if items else None


def _defaults(args: Namespace, **values) -> None:
    """Fill in what no flag gave."""
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


@register_model_architecture("smoe_transformer", "smoe_transformer_base")
def smoe_transformer_base(args):
    """512/2048/8 heads, 6 + 6 layers: the paper's M4 model."""
    _defaults(
        args,
        encoder_embed_dim=512,
        encoder_ffn_embed_dim=2048,
        encoder_attention_heads=8,
        encoder_layers=6,
        decoder_layers=6,
    )
    _defaults(
        args,
        decoder_embed_dim=args.encoder_embed_dim,
        decoder_ffn_embed_dim=args.encoder_ffn_embed_dim,
        decoder_attention_heads=args.encoder_attention_heads,
    )


# fairseq registers a model's own name as an architecture that sets nothing.
ARCH_CONFIG_REGISTRY["smoe_transformer"] = smoe_transformer_base


@register_model_architecture("smoe_transformer", "smoe_transformer_big")
def smoe_transformer_big(args):
    """1024/4096/16 heads, 6 + 6 layers: the paper's M15 and OPUS-100 model."""
    _defaults(args, encoder_embed_dim=1024, encoder_ffn_embed_dim=4096, encoder_attention_heads=16)
    smoe_transformer_base(args)


@register_model_architecture("smoe_transformer", "smoe_transformer_tiny")
def smoe_transformer_tiny(args):
    """128/256/4 heads, 2 + 2 layers: for a laptop and for tests."""
    _defaults(
        args,
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=256,
        encoder_attention_heads=4,
        encoder_layers=2,
        decoder_layers=2,
    )
    smoe_transformer_base(args)
