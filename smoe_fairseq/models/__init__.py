"""fairseq models; importing this registers them."""

from smoe_fairseq.models.smoe_transformer import SMoETransformerModel

__all__ = ["SMoETransformerModel"]
