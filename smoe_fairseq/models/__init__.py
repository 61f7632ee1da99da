"""fairseq models; importing this registers them."""

from smoe_fairseq.models import variants  # noqa: F401  (first: it imports fairseq outside of a cycle)
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.models.variants import (
    SMoEMultilingualTransformerModel,
    SMoETransformerLanguageModel,
)

__all__ = [
    "SMoEMultilingualTransformerModel",
    "SMoETransformerLanguageModel",
    "SMoETransformerModel",
]
