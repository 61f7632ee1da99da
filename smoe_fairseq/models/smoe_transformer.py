"""``--arch smoe_transformer``: fairseq's transformer with stratified MoE layers (paper, section 3)."""

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor

from smoe_fairseq.models.config import SMoETransformerConfig
from smoe_fairseq.models.preflight import check_translation
from smoe_fairseq.models.sparse_model import SparseModel, with_experts
from smoe_fairseq.models.transformer_layer import (
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from smoe_fairseq.models.translator import Translator
from smoe_fairseq.modules import RoutingStats


@register_model("smoe_transformer", dataclass=SMoETransformerConfig)
class SMoETransformerModel(SparseModel, TransformerModelBase):
    """Encoder-decoder whose every ``--moe-freq``-th layer is a stratified mixture of experts.

    The decoder's extra output has, under "moe_stats", the `RoutingStats` of all MoE layers, encoder first,
    and their names under "moe_layers"; LayerDrop leaves some out.
    """

    config_class = SMoETransformerConfig

    @classmethod
    def build_model(cls, cfg, task):
        return cls.built(cfg, task, cls._of_sides, check_translation)

    @classmethod
    def _of_sides(cls, config, task):
        transformer = with_experts(config, task.source_dictionary, task.target_dictionary)
        return super().build_model(transformer, task)

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


class _Layers:
    """How encoder and decoder build their layers; every ``moe_freq``-th one is a MoE layer."""

    def build_layer(self, layer_class, cfg, side, **options):
        self.layers_built = getattr(self, "layers_built", 0) + 1
        is_moe = side.moe_freq > 0 and self.layers_built % side.moe_freq == 0
        moe = side.moe_options[self.layers_built // side.moe_freq - 1] if is_moe else None
        layer = layer_class(cfg, side, moe_options=moe, **options)
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
        encoder_out = encoder_out or {}  # a language model has none
        moe_stats, moe_layers = (
            list(encoder_out.get(key, [])) for key in ("moe_stats", "moe_layers")
        )
        for i, layer in enumerate(self.layers):
            x, layer_attention, *stats = layer(
                x,
                _first(encoder_out.get("encoder_out")),
                _first(encoder_out.get("encoder_padding_mask")),
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


def _first(items: list | None):
    return items[0] if items else None
