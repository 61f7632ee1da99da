"""``--arch smoe_transformer_lm``: a language model, the decoder of `SMoETransformerModel` alone."""

from fairseq.models import FairseqLanguageModel, register_model
from fairseq.models.transformer import Embedding

from smoe_fairseq.models.config import SMoETransformerLMConfig
from smoe_fairseq.models.preflight import check_language_modeling
from smoe_fairseq.models.smoe_transformer import SMoETransformerDecoder
from smoe_fairseq.models.sparse_model import SparseModel, with_experts
from smoe_fairseq.models.trained_model import TrainedModel


@register_model("smoe_transformer_lm", dataclass=SMoETransformerLMConfig)
class SMoETransformerLanguageModel(SparseModel, FairseqLanguageModel):
    """As fairseq's ``transformer_lm``, for its task ``language_modeling``, with layers of experts.

    The extra output has, under "moe_stats", the `RoutingStats` of all MoE layers, and their names under
    "moe_layers".
    """

    config_class = SMoETransformerLMConfig

    @classmethod
    def build_model(cls, cfg, task):
        return cls.built(cfg, task, cls._of_decoder, check_language_modeling)

    @classmethod
    def _of_decoder(cls, config, task):
        words = task.source_dictionary
        transformer = with_experts(config, words, words)
        embed_tokens = Embedding(len(words), transformer.decoder.embed_dim, words.pad())
        decoder = SMoETransformerDecoder(
            transformer, task.target_dictionary, embed_tokens, no_encoder_attn=True
        )
        return cls(decoder)

    @classmethod
    def from_pretrained(cls, run, checkpoint_file=None, data_name_or_path=None, **overrides):
        """A trained model that goes on with text and scores it; arguments as of a model of translation.

        Returns:
            A `TrainedModel`, in evaluation mode, on the CPU: ``.sample(["..."], sampling=True)``,
            ``.score(["..."])``.

        Raises:
            UsageError: a file is missing, damaged, or does not go with the others.
        """
        return TrainedModel.of_run(run, checkpoint_file, data_name_or_path, **overrides)
