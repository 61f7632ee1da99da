"""fairseq models; importing this registers them."""

from smoe_fairseq.models import architectures  # noqa: F401  (registers their sizes)
from smoe_fairseq.models.smoe_multilingual_transformer import SMoEMultilingualTransformerModel
from smoe_fairseq.models.smoe_transformer import SMoETransformerModel
from smoe_fairseq.models.smoe_transformer_lm import SMoETransformerLanguageModel

__all__ = [
    "SMoEMultilingualTransformerModel",
    "SMoETransformerLanguageModel",
    "SMoETransformerModel",
]
