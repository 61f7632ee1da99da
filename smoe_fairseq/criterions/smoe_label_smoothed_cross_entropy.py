"""Label-smoothed cross entropy plus the balance loss of the gates (paper, equation 3)."""

import math
from dataclasses import dataclass, field

from fairseq import metrics, utils
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from smoe_fairseq.criterions.capacity_budget import capacity_budget_loss
from smoe_fairseq.criterions.cmr_budget import cmr_budget_loss
from smoe_fairseq.criterions.label_smoothing import LabelSmoothedNLL
from smoe_fairseq.criterions.routing_metrics import (
    has_routing,
    log_fifths,
    log_routing,
    routing_sums,
)
from smoe_fairseq.criterions.update_balance import UpdateBalance
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.drops import by_position, is_limited_in_training, training_capacity
from smoe_fairseq.modules.transfer import on_host
from smoe_fairseq.system.errors import UsageError

GATE_LOSSES = ("moe_gate_loss", "moe_z_loss", "moe_entropy_loss", "cmr_gate_loss")
GATE_LOSSES += ("smoe_budget_loss",)
SAMPLED = 10  # every tenth batch of a validation is run under training's capacity too


@dataclass
class SMoELabelSmoothedCrossEntropyCriterionConfig(LabelSmoothedCrossEntropyCriterionConfig):
    moe_gate_loss_wt: float = field(
        default=0.01, metadata={"help": "alpha, the weight of the balance loss"}
    )
    moe_z_loss_wt: float = field(
        default=0.0, metadata={"help": "weight of the gates' z-loss, which keeps logits small"}
    )
    moe_entropy_loss_wt: float = field(
        default=1e-4,
        metadata={
            "help": "weight of the gates' entropy (with --moe-gate top-p), which keeps experts few"
        },
    )
    cmr_gate_loss_wt: float = field(
        default=0.1, metadata={"help": "weight of the CMR budget loss (with --moe-cmr)"}
    )
    cmr_gate_loss_p: float = field(
        default=0.8, metadata={"help": "budget: mean CMR gate that the loss pulls to, 0 to 1"}
    )
    smoe_capacity_budget_wt: float = field(
        default=0.1, metadata={"help": "weight of the loss of --smoe-capacity-budget"}
    )


@register_criterion(
    "smoe_label_smoothed_cross_entropy", dataclass=SMoELabelSmoothedCrossEntropyCriterionConfig
)
class SMoELabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """``L = label-smoothed cross entropy + alpha * balance loss``; a dense model has just the first.

    On request also the z-loss of the gates, with ``--moe-cmr`` its budget loss, and with
    ``--smoe-capacity-budget`` that of the strata. Such a loss of a
    batch is weighted by the batch's sample size, as its cross entropy is, so that after fairseq's
    division both are means over all tokens of an update, whatever the sizes of its batches
    (``--update-freq``) and the number of ranks.
    """

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        ignore_prefix_size=0,
        report_accuracy=False,
        moe_gate_loss_wt=0.01,
        moe_z_loss_wt=0.0,
        moe_entropy_loss_wt=1e-4,
        cmr_gate_loss_wt=0.1,
        cmr_gate_loss_p=0.8,
        smoe_capacity_budget_wt=0.1,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        weights = {
            "--moe-gate-loss-wt": moe_gate_loss_wt,
            "--moe-z-loss-wt": moe_z_loss_wt,
            "--moe-entropy-loss-wt": moe_entropy_loss_wt,
            "--cmr-gate-loss-wt": cmr_gate_loss_wt,
            "--smoe-capacity-budget-wt": smoe_capacity_budget_wt,
        }
        for flag, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise UsageError(f"{flag} {weight}: expected 0 or a positive number")
        if not 0 <= label_smoothing < 1:
            raise UsageError(
                f"--label-smoothing {label_smoothing}: expected a number from 0 to below 1"
            )
        if not 0 <= cmr_gate_loss_p <= 1:
            raise UsageError(f"--cmr-gate-loss-p {cmr_gate_loss_p}: expected a number from 0 to 1")
        self.moe_gate_loss_wt = moe_gate_loss_wt
        self.moe_z_loss_wt = moe_z_loss_wt
        self.moe_entropy_loss_wt = moe_entropy_loss_wt
        self.cmr_gate_loss_wt = cmr_gate_loss_wt
        self.cmr_gate_loss_p = cmr_gate_loss_p
        self.smoe_capacity_budget_wt = smoe_capacity_budget_wt
        self.batches_validated = 0
        self.update_balance = UpdateBalance()

    def begin_update(self):
        """Called by our trainer before the first batch of each update."""
        self.update_balance.begin()

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
        moe_stats, names = (net_output[1].get(key, []) for key in ("moe_stats", "moe_layers"))
        if blocks := moe_blocks(model):
            ran = dict(zip(names, moe_stats, strict=True))
            for name, weight, value in self.gate_losses(blocks, ran, sample):
                loss = loss + weight * sample_size * value
                logging_output[name] = value.data * sample_size
            logging_output.update(routing_sums(model, names, moe_stats))
        logging_output["loss"] = loss.data
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, net_output, sample)
            logging_output.update(n_correct=n_correct.data, total=total.data)
        # Counted, not drawn: processes run their forward passes in step, and have to agree. The count moves
        # when all has gone well, since fairseq repeats a batch that has run out of memory.
        if model.training:
            self.batches_validated = 0
        else:
            del net_output  # a second one would be the largest thing in memory
            if moe_stats and self.batches_validated % SAMPLED == 0:
                logging_output.update(self.under_training_capacity(model, sample, nll_loss))
            self.batches_validated += 1
        return loss, sample_size, logging_output

    def compute_loss(self, model, net_output, sample, reduce=True):
        """``(loss, nll_loss)`` as fairseq's, computed from the logits where that is possible."""
        logits = net_output[0]
        target = model.get_targets(sample, net_output)
        if not reduce or self.ignore_prefix_size > 0 or logits.shape[:-1] != target.shape:
            return super().compute_loss(model, net_output, sample, reduce)
        return LabelSmoothedNLL.apply(
            logits.view(-1, logits.shape[-1]), target.view(-1), self.eps, self.padding_idx
        )

    def gate_losses(
        self, blocks: dict[str, StratifiedMoE], ran: dict[str, RoutingStats], sample: dict
    ):
        """(log name, weight, mean over the MoE layers that have it) of each loss of the gates.

        All are there, 0 if need be, also where LayerDrop has left every MoE layer out: see `routing_sums`.
        """
        first = next(iter(blocks.values()))
        zero = first.experts.b2.new_zeros(())

        def mean(values):
            return sum(values) / len(values) if values else zero

        # Where no gate learns by it, it is for the log alone: how unequally busy experts are.
        learning = {name: block for name, block in blocks.items() if block.learns_balance}
        over_update = any(block.balance_over == "update" for block in learning.values())
        if over_update and self.training:
            stats = [ran.get(name) for name in learning]
            counts = not sample.get("is_dummy", False)
            losses = self.update_balance.losses(list(learning.values()), stats, counts)
        else:
            losses = [ran[name].balance_loss for name in learning or blocks if name in ran]
        yield "moe_gate_loss", self.moe_gate_loss_wt if learning else 0.0, mean(losses)
        if self.moe_z_loss_wt:
            yield "moe_z_loss", self.moe_z_loss_wt, mean([s.z_loss for s in ran.values()])
        if first.counting.entropy:
            entropies = [stats.entropy for stats in ran.values()]
            yield "moe_entropy_loss", self.moe_entropy_loss_wt, mean(entropies)
        if first.cmr is not None:
            stats = list(ran.values())
            budget = cmr_budget_loss(stats, self.cmr_gate_loss_p) if stats else zero
            yield "cmr_gate_loss", self.cmr_gate_loss_wt, budget
        if first.capacity_budget:
            stats = list(ran.values())
            distance = capacity_budget_loss(stats, first.capacity_budget) if stats else zero
            yield "smoe_budget_loss", self.smoe_capacity_budget_wt, distance

    def under_training_capacity(self, model, sample, nll_loss) -> dict:
        """What a batch's loss would be with the experts limited as in training; ``nll_loss`` is its own.

        Tokens that are always dropped in training are new to their experts in evaluation. This shows it.
        """
        if not is_limited_in_training(model):
            return {}
        with training_capacity(model):
            net_output = model(**sample["net_input"])
        _, limited_nll_loss = self.compute_loss(model, net_output, sample)
        return {
            "sample_nll_loss": nll_loss.data,
            "capacity_nll_loss": limited_nll_loss.data,
            "capacity_gap": nll_loss.data - limited_nll_loss.data,
            "capacity_ntokens": sample["ntokens"],
            "capacity_fifths": sum(by_position(stats) for stats in net_output[1]["moe_stats"]),
        }

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        """Adds the gates' losses (without their weights) and the routing metrics to fairseq's own.

        In validation also, over a sample of the batches: ``sample_nll_loss``; ``capacity_nll_loss``, with
        experts limited as in training; ``capacity_gap``, by how much the former is above the latter (well
        above 0: the experts get tokens that they were never trained on); ``capacity_overflow_fifth1`` and
        so on, the percent of first choices that the limit drops, by position in the sentence.
        """
        logging_outputs = on_host(logging_outputs)
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log["sample_size"] for log in logging_outputs)
        for name in GATE_LOSSES:
            if any(name in log for log in logging_outputs):
                value = sum(log.get(name, 0) for log in logging_outputs)
                metrics.log_scalar(name, value / sample_size, sample_size, round=3)
        if has_routing(logging_outputs):
            log_routing(logging_outputs)
        sampled = [log for log in logging_outputs if "capacity_ntokens" in log]
        if sampled:
            tokens = sum(log["capacity_ntokens"] for log in sampled)
            for name in ("sample_nll_loss", "capacity_nll_loss", "capacity_gap"):
                bits = utils.item(sum(log[name] for log in sampled)) / tokens / math.log(2)
                metrics.log_scalar(name, bits, tokens, round=3)
            log_fifths(sum(log["capacity_fifths"] for log in sampled), "capacity_")
