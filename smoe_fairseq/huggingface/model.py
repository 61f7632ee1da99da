"""Translation models for Hugging Face, with `StratifiedMoE` layers and ``generate``.

Shapes: B sentences, T target positions, V entries of the target dictionary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import ModelOutput, Seq2SeqMoEOutput

from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import check
from smoe_fairseq.huggingface.config import FORM, SMoEConfig
from smoe_fairseq.huggingface.layers import Decoder, Encoder, EncoderOutput
from smoe_fairseq.modules import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.losses import gate_losses, value
from smoe_fairseq.modules.registry import missing_plugin

# The name of the cache in outputs and in `generate`, by the version of transformers.
CACHE = "cache" if hasattr(Seq2SeqMoEOutput, "cache") else "past_key_values"


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
        check(vars(config), FORM, "the config")
        if sentence := missing_plugin(config.plugins):
            raise UsageError(f"the config: {sentence}")
        check(config.moe_blocks, {str: {"gate?": set(GATES)}}, "the config: moe_blocks")
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
        self.encoder.set_embeddings(value)
        if self.config.share_all_embeddings:
            self.decoder.set_embeddings(value)
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
        config, with_stats = self.config, labels is not None
        attentions = _value_or(output_attentions, config.output_attentions)
        hidden = _value_or(output_hidden_states, config.output_hidden_states)
        router = _value_or(output_router_logits, config.output_router_logits)
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
        if with_stats and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        past_key_values = cache if past_key_values is None else past_key_values
        if isinstance(getattr(past_key_values, "self_attention_cache", None), StaticCache):
            raise UsageError("cache_implementation: expected a dynamic cache, not a static one")
        use_cache = not with_stats and _value_or(use_cache, config.use_cache)
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
        logits, losses = self.decoder.output_projection(outputs["x"]), {}
        if with_stats:
            routing = getattr(encoder_outputs, "routing", None) or (), outputs["stats"]
            losses = self._losses(logits, labels, num_items_in_batch, *routing)
        output = Seq2SeqMoEOutput(
            **losses,
            logits=logits,
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

    def _losses(self, logits: Tensor, labels: Tensor, items: Tensor | int | None, *routing) -> dict:
        """The losses that `forward` returns, by name; ``routing`` are the statistics of each side."""
        size = self.config.vocab_size
        # fairseq distributes the smoothing over the other entries, torch over all.
        smoothing = self.config.label_smoothing * size / (size - 1)
        labels = labels.flatten().to(logits.device)
        count = (labels != -100).sum()
        items = count if items is None else items
        logits = logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) / items
        encoder, decoder = (part * (count / items) for part in self._gate_losses(*routing, loss))
        loss = loss + encoder + decoder
        return {"loss": loss, "encoder_aux_loss": encoder, "decoder_aux_loss": decoder}

    def _gate_losses(
        self, encoder: tuple[RoutingStats, ...], decoder: tuple[RoutingStats, ...], like: Tensor
    ) -> list[Tensor]:
        """Each side's part of the weighted means over all MoE layers; scalars on the device of ``like``."""
        config = self.config
        weights = {
            "moe_gate_loss": config.router_aux_loss_coef,
            "moe_z_loss": config.router_z_loss_coef,
            "moe_entropy_loss": config.router_entropy_loss_coef,
        } | config.moe_losses
        # The layers of a side differ only in their strata.
        sides = [next(_blocks(side), None) for side in (self.encoder, self.decoder)]
        passes = [(block, each) for block, all in zip(sides, (encoder, decoder)) for each in all]
        parts = [like.new_zeros(()) for _ in sides]
        for name, (weight, having) in gate_losses(filter(None, sides), weights).items():
            ours = [(block, each) for block, each in passes if block in having]
            for block, each in ours if weight else ():
                term = value(name, block, each).to(like.device) * (weight / len(ours))
                parts[sides.index(block)] = parts[sides.index(block)] + term
        return parts


def _blocks(side: nn.Module) -> Iterator[StratifiedMoE]:
    return (module for module in side.modules() if isinstance(module, StratifiedMoE))


def _value_or(value: bool | None, default: bool) -> bool:
    return bool(default if value is None else value)
