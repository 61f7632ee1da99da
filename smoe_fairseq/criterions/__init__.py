"""fairseq criterions; importing this registers them."""

from smoe_fairseq.criterions.smoe_label_smoothed_cross_entropy import (
    SMoELabelSmoothedCrossEntropyCriterion,
)

__all__ = ["SMoELabelSmoothedCrossEntropyCriterion"]
