"""``--arch smoe_multilingual_transformer``: a model per language pair, of shared parts or of its own."""

from argparse import Namespace
from collections import OrderedDict

from fairseq.models import register_model
from fairseq.models.multilingual_transformer import MultilingualTransformerModel

from smoe_fairseq.models.config import SMoEMultilingualTransformerConfig
from smoe_fairseq.models.preflight import check_language_pairs
from smoe_fairseq.models.smoe_transformer import SMoETransformerDecoder, SMoETransformerEncoder
from smoe_fairseq.models.sparse_model import SparseModel, with_experts


# Without a dataclass: the task reads its own options among the model's.
@register_model("smoe_multilingual_transformer")
class SMoEMultilingualTransformerModel(SparseModel, MultilingualTransformerModel):
    """As fairseq's ``multilingual_transformer``, for its task ``multilingual_translation``.

    ``models`` has, by language pair, an encoder of the source and a decoder of the target language, whose
    layers are those of `SMoETransformerModel`. ``--share-encoders`` and so on say what languages share.
    """

    config_class = SMoEMultilingualTransformerConfig

    @classmethod
    def build_model(cls, cfg, task):
        return cls.built(cfg, task, cls._of_pairs, check_language_pairs)

    @classmethod
    def _of_pairs(cls, config, task):
        """fairseq decides what is shared; it asks `_get_module_class` for the parts."""
        args = Namespace(**vars(config), config=config)
        args.encoder_embed_path = args.decoder_embed_path = None
        pairs = super().build_model(args, task).models
        encoders, decoders = (
            OrderedDict((pair, getattr(model, side)) for pair, model in pairs.items())
            for side in config.SIDES
        )
        return cls(encoders, decoders)

    @classmethod
    def _get_module_class(cls, is_encoder, args, lang_dict, embed_tokens, langs):
        transformer = with_experts(args.config, lang_dict, lang_dict)
        transformer.share_decoder_input_output_embed = args.share_decoder_input_output_embed
        part = SMoETransformerEncoder if is_encoder else SMoETransformerDecoder
        return part(transformer, lang_dict, embed_tokens)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Of a checkpoint with more pairs, those that are there: to translate, one is."""
        pairs = tuple(f"models.{pair}." for pair in self.keys)
        own = {name: value for name, value in state_dict.items() if name.startswith(pairs)}
        return super().load_state_dict(own, strict, model_cfg, args)
