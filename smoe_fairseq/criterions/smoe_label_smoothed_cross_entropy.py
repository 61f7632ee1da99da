"""Label-smoothed cross entropy plus the balance loss of the gates (paper, equation 3)."""

from dataclasses import dataclass, field

from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from smoe_fairseq.criterions.routing_metrics import log_routing, routing_sums


@dataclass
class SMoELabelSmoothedCrossEntropyCriterionConfig(LabelSmoothedCrossEntropyCriterionConfig):
    moe_gate_loss_wt: float = field(
        default=0.01, metadata={"help": "alpha, the weight of the balance loss"}
    )


@register_criterion(
    "smoe_label_smoothed_cross_entropy", dataclass=SMoELabelSmoothedCrossEntropyCriterionConfig
)
class SMoELabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """``L = label-smoothed cross entropy + alpha * balance loss``; a dense model has just the first.

    The balance loss of a batch is weighted by the batch's sample size, as its cross entropy is, so
    that after fairseq's division both are means over all tokens of an update, whatever the sizes of
    its batches (``--update-freq``) and the number of ranks.
    """

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        ignore_prefix_size=0,
        report_accuracy=False,
        moe_gate_loss_wt=0.01,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.moe_gate_loss_wt = moe_gate_loss_wt

    def forward(self, model, sample, reduce=True):
        """Returns fairseq's loss (a sum over the batch), sample size and logging output."""
        net_output = model(**sample["net_input"])
        loss, nll_loss = self.compute_loss(model, net_output, sample, reduce=reduce)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "nll_loss": nll_loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if moe_stats := net_output[1].get("moe_stats"):
            balance_loss = sum(stats.balance_loss for stats in moe_stats) / len(moe_stats)
            loss = loss + self.moe_gate_loss_wt * sample_size * balance_loss
            logging_output["moe_gate_loss"] = balance_loss.data * sample_size
            logging_output.update(routing_sums(moe_stats))
        logging_output["loss"] = loss.data
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, net_output, sample)
            logging_output.update(n_correct=n_correct.data, total=total.data)
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        """Adds the balance loss (without alpha) and the routing metrics to fairseq's own."""
        super().reduce_metrics(logging_outputs)
        if any("moe_gate_loss" in log for log in logging_outputs):
            sample_size = sum(log["sample_size"] for log in logging_outputs)
            balance_loss = sum(log["moe_gate_loss"] for log in logging_outputs)
            metrics.log_scalar("moe_gate_loss", balance_loss / sample_size, sample_size, round=3)
            log_routing(logging_outputs)
