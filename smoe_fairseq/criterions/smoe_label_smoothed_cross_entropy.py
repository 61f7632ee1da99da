"""The criterion: label-smoothed cross entropy plus the losses of the gates."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoe_fairseq.criterions.metrics import has_routed, log_routing, on_host, routing_sums
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import flag_of, number_fault
from smoe_fairseq.models.options import option
from smoe_fairseq.models.transformer import SparseModel, moe_blocks
from smoe_fairseq.modules import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.losses import gate_losses, parse_weights, value
from smoe_fairseq.modules.registry import LOSSES
from smoe_fairseq.modules.statistics import balance_loss


class LabelSmoothedNLL(torch.autograd.Function):
    """``(loss, nll_loss)`` as fairseq's `label_smoothed_nll_loss`, summed over non-padding positions.

    ``loss = (1 - eps - eps_i) nll + eps_i sum_v -log p_v`` with ``eps_i = eps / (V - 1)``. Its gradient
    with respect to a logit is ``p_v - eps_i``, minus ``1 - eps - eps_i`` at the target. ``nll_loss`` is
    for the log and has no gradient. Only the probabilities ``(N, V)`` are computed: their logarithms are
    the logits minus a number per position, known from the largest logit and its probability.
    """

    @staticmethod
    def forward(ctx, logits_NV: Tensor, target_N: Tensor, epsilon: float, padding: int):
        exact = torch.promote_types(logits_NV.dtype, torch.float32)
        p_NV = logits_NV.softmax(-1, dtype=exact)
        largest_N, at_N = logits_NV.max(-1)
        log_sum_N = largest_N.to(exact) - p_NV.gather(1, at_N.unsqueeze(1)).squeeze(1).log()
        real_N, vocabulary = target_N != padding, logits_NV.shape[1]
        eps_i = epsilon / (vocabulary - 1)
        of_target_N = logits_NV.gather(1, target_N.unsqueeze(1)).squeeze(1).to(exact)
        sum_N = logits_NV.sum(1, dtype=exact)
        nll = torch.where(real_N, log_sum_N - of_target_N, 0).sum()
        smooth = torch.where(real_N, vocabulary * log_sum_N - sum_N, 0).sum()
        ctx.save_for_backward(p_NV, target_N, real_N)
        ctx.eps_i, ctx.at_target, ctx.dtype = eps_i, 1 - epsilon - eps_i, logits_NV.dtype
        ctx.mark_non_differentiable(nll)
        return ctx.at_target * nll + eps_i * smooth, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        p_NV, target_N, real_N = ctx.saved_tensors
        grad_N1, target_N1 = (real_N * grad).unsqueeze(1), target_N.unsqueeze(1)
        grad_NV = torch.empty_like(p_NV, dtype=ctx.dtype)
        torch.addcmul(-ctx.eps_i * grad_N1, p_NV, grad_N1, out=grad_NV)
        of_target_N1 = (p_NV.gather(1, target_N1) - (ctx.eps_i + ctx.at_target)) * grad_N1
        grad_NV.scatter_(1, target_N1, of_target_N1.to(ctx.dtype))
        return grad_NV, None, None, None


def capacity_budget_loss(moe_stats: list[RoutingStats], budget: float) -> Tensor:
    """``|mean requested capacity - budget|`` over the real tokens of all layers of a batch; a scalar.

    The mean is over all layers, as in the log, so layers may share the budget unevenly. It is computed for
    each batch and rank, as for CMR; its gradient is that of `expected_stops`.

    Args:
        budget: gates per token and layer.
    """
    stops_L = torch.stack([stats.stops for stats in moe_stats])
    tokens_L = torch.stack([stats.first_choices[0].sum() for stats in moe_stats])
    tokens = tokens_L.sum()
    distance = ((stops_L * tokens_L).sum() / tokens.clamp(min=1) - budget).abs()
    return torch.where(tokens > 0, distance, 0)


def cmr_budget_loss(moe_stats: list[RoutingStats], p: float) -> Tensor:
    """``|mean gate - p|`` over the real tokens of a batch, averaged over the layers; a scalar.

    It is computed for each batch and rank (NLLB team 2022, section 6.2). The forward pass needs no
    communication, so a rank may skip a batch.

    Args:
        p: the budget, the share of tokens that may use the experts.
    """
    gate_sum_L = torch.stack([stats.cmr_gate_sum for stats in moe_stats])
    tokens_L = torch.stack([stats.cmr_tokens for stats in moe_stats])
    distance_L = (gate_sum_L / tokens_L.clamp(min=1) - p).abs()
    return torch.where(tokens_L > 0, distance_L, 0).mean()


# The balance loss over all ranks and batches of an update (``--moe-balance-over update``). The criterion and
# not the block counts choices, since it sees each batch once, even with activation checkpointing.


def update_balance_losses(
    choices: Tensor | None,
    blocks: list[StratifiedMoE],
    ran: list[RoutingStats | None],
    counts: bool,
) -> tuple[list[Tensor], Tensor]:
    """The balance loss of each layer that ran, with f over all batches of the update so far, on all ranks.

    So experts may specialise in some of the batches (Qiu et al. 2025). This is a collective call, which every
    rank has to make for each batch.

    Args:
        choices: of the update's earlier batches, ``(L, E + M)`` of every layer, concatenated.
        blocks: all blocks that learn by the loss.
        ran: their statistics; None if LayerDrop skipped the layer.
        counts: False for a dummy batch that keeps ranks in step.

    Returns:
        The losses, and ``choices`` including this batch.
    """
    pairs = list(zip(blocks, ran, strict=True))
    layers = [_choices(block, stats if counts else None) for block, stats in pairs]
    new = torch.cat([choices_LE.flatten() for choices_LE in layers]).double()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(new)
    choices = new if choices is None else choices + new
    so_far = choices.split([choices_LE.numel() for choices_LE in layers])
    losses = [
        balance_loss(
            of_layer.view(len(block.strata), -1),
            stats.mean_probs,
            block.visible_of_gate + block.stats_builder.free_experts,
        ).mean()
        for of_layer, (block, stats) in zip(so_far, pairs, strict=True)
        if stats is not None
    ]
    return losses, choices


def _choices(block: StratifiedMoE, stats: RoutingStats | None) -> Tensor:
    """Choices per gate and expert ``(L, E + M)``; zeros if the layer did not run."""
    if stats is None:
        experts = block.strata.num_experts + block.stats_builder.free_experts
        return block.stratum_of_expert.new_zeros(len(block.strata), experts)
    return stats.first_choices if stats.asked is None else stats.asked


@dataclass
class SMoELabelSmoothedCrossEntropyCriterionConfig(LabelSmoothedCrossEntropyCriterionConfig):
    moe_gate_loss_wt: float = option(0.01, "alpha, the weight of the balance loss")
    moe_z_loss_wt: float = option(0.0, "weight of the gates' z-loss, which keeps logits small")
    moe_entropy_loss_wt: float = option(
        1e-4,
        "weight of the gates' entropy, which limits the experts per token (with --moe-gate "
        f"{', '.join(name for name, kind in GATES.items() if kind.has_entropy_loss)})",
    )
    moe_losses: str = option(
        "",
        "terms of plugins that are added to the loss: NAME=WEIGHT,..., by the names of @register_loss",
    )
    cmr_gate_loss_wt: float = option(0.1, "weight of the CMR budget loss (with --moe-cmr)")
    cmr_gate_loss_p: float = option(0.8, "budget: target mean of the CMR gate, 0 to 1")
    smoe_capacity_budget_wt: float = option(0.1, "weight of the loss of --smoe-capacity-budget")
    validate_sentences: int = option(
        0,
        "number of sentences of each direction that each validation translates, for valid_chrf and "
        "valid_bleu in the log and --best-checkpoint-metric; 0: none",
    )
    validate_beam: int = option(1, "beam size of these translations; 1 is the fastest")
    save_interval_minutes: float = option(
        0.0,
        "save checkpoint_last.pt at least every so many minutes; 0: only as fairseq's flags say",
    )
    subword_sampling: float = option(
        0.0,
        "split training text into other subwords in each epoch, by the data's spm.model: for BPE the "
        "probability to omit a merge, such as 0.1; for a unigram model the exponent of the probabilities, "
        "such as 0.2; 0: never",
    )


# In the logging output: the sample size times the share of layers that routed tokens, where
# --moe-gating-dropout leaves some out, whose losses are 0.
_ROUTED = "moe_routed"

# Ranges of the options, each of which is an attribute of the criterion, too.
_WEIGHTS = ("moe_gate_loss_wt", "moe_z_loss_wt", "moe_entropy_loss_wt", "cmr_gate_loss_wt")
_BOUNDS = {name: (0, math.inf) for name in (*_WEIGHTS, "smoe_capacity_budget_wt")}
_BOUNDS |= {"cmr_gate_loss_p": (0, 1), "subword_sampling": (0, 1)}
_BOUNDS |= {"validate_sentences": (0, math.inf), "validate_beam": (1, math.inf)}
_BOUNDS |= {"save_interval_minutes": (0, math.inf)}


@register_criterion(
    "smoe_label_smoothed_cross_entropy", dataclass=SMoELabelSmoothedCrossEntropyCriterionConfig
)
class SMoELabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """``L = label-smoothed cross entropy + alpha * balance loss`` (paper, eq. 8 to 11).

    Flags add the z-loss of the gates, the entropy loss of some gates, and the budget losses of CMR
    (``--moe-cmr``) and of the strata (``--smoe-capacity-budget``). A dense model has only the cross
    entropy. Each loss is multiplied by the batch's sample size, so that after fairseq's division all are
    means over the tokens of an update, for any ``--update-freq`` and number of ranks.
    """

    def __init__(self, cfg: SMoELabelSmoothedCrossEntropyCriterionConfig, task):
        smoothing, accuracy = cfg.label_smoothing, cfg.report_accuracy
        super().__init__(task, cfg.sentence_avg, smoothing, cfg.ignore_prefix_size, accuracy)
        if not 0 <= smoothing < 1:
            raise UsageError(f"--label-smoothing {smoothing}: expected 0 to below 1")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(cfg, name)
            if fault := number_fault(value, type(value), least, most):
                raise UsageError(f"{flag_of(name)} {value}: {fault}")
            setattr(self, name, value)
        try:
            self.plugin_weights = parse_weights(cfg.moe_losses)
        except ValueError as error:
            raise UsageError(f"--moe-losses {error}") from None
        self.begin_update()

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of the terms in modules/losses.py, by name."""
        weights = {"moe_gate_loss": self.moe_gate_loss_wt, "moe_z_loss": self.moe_z_loss_wt}
        weights |= {"moe_entropy_loss": self.moe_entropy_loss_wt}
        if not self.moe_z_loss_wt:
            del weights["moe_z_loss"]  # nor is it logged
        return weights | self.plugin_weights

    def begin_update(self):
        """Called by our trainer before the first batch of each update."""
        self.choices = None  # see `update_balance_losses`

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
        extra = net_output[1] if isinstance(net_output[1], dict) else {}  # of other models
        moe_stats, names = (extra.get(key, []) for key in ("moe_stats", "moe_layers"))
        if blocks := moe_blocks(model):
            ran = dict(zip(names, moe_stats, strict=True))
            for name, weight, term in self.gate_losses(blocks, ran, sample):
                loss = loss + weight * sample_size * term
                logging_output[name] = term.data * sample_size
            logging_output.update(routing_sums(blocks, ran))
            if any(block.config.gating_dropout for block in blocks.values()):
                routed = sum(has_routed(blocks[name], ran[name]) for name in ran)
                logging_output[_ROUTED] = sample_size * routed / max(len(ran), 1)
        logging_output["loss"] = loss.data
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, net_output, sample)
            logging_output.update(n_correct=n_correct.data, total=total.data)
        return loss, sample_size, logging_output

    def compute_loss(self, model, net_output, sample, reduce=True):
        """``(loss, nll_loss)`` as fairseq's; computed from the logits if the model is ours.

        The first output of another model need not be logits: with an adaptive softmax it is features.
        """
        logits = net_output[0]
        target = model.get_targets(sample, net_output)
        inner = model
        while hasattr(inner, "module"):  # fairseq wraps it twice if there are several ranks
            inner = inner.module
        ours = isinstance(inner, SparseModel) and logits.shape[:-1] == target.shape
        if not ours or not reduce or self.ignore_prefix_size > 0:
            return super().compute_loss(model, net_output, sample, reduce)
        return LabelSmoothedNLL.apply(
            logits.view(-1, logits.shape[-1]), target.view(-1), self.eps, self.padding_idx
        )

    def gate_losses(self, blocks: dict[str, StratifiedMoE], ran: dict[str, RoutingStats], sample):
        """(log name, weight, mean over the MoE layers that have it) of each loss of the gates.

        A loss is 0, not missing, if LayerDrop skipped every MoE layer: see `routing_sums`.
        """
        first = next(iter(blocks.values()))
        zero = first.experts.b2.new_zeros(())

        def mean(values):
            return sum(values) / len(values) if values else zero

        named = {block: name for name, block in blocks.items()}
        terms = gate_losses(named, self.loss_weights)
        # If no gate learns by the balance loss, it is only logged.
        alpha, learning = terms.pop("moe_gate_loss", (0.0, []))
        over_update = any(block.config.balance_over == "update" for block in learning)
        if over_update and self.training:
            stats = [ran.get(named[block]) for block in learning]
            counts = not sample.get("is_dummy", False)
            losses, self.choices = update_balance_losses(self.choices, learning, stats, counts)
        else:
            passes = [ran[n] for block in learning or named if (n := named[block]) in ran]
            losses = [stats.balance_loss for stats in passes]
        yield "moe_gate_loss", alpha, mean(losses)
        for name, (weight, having) in terms.items():
            passes = [(block, ran[n]) for block in having if (n := named[block]) in ran]
            yield name, weight, mean([_scalar(name, value(name, *each)) for each in passes])
        stats = list(ran.values())
        if first.cmr is not None:
            budget = cmr_budget_loss(stats, self.cmr_gate_loss_p) if stats else zero
            yield "cmr_gate_loss", self.cmr_gate_loss_wt, budget
        if budget := first.config.capacity_budget:
            distance = capacity_budget_loss(stats, budget) if stats else zero
            yield "smoe_budget_loss", self.smoe_capacity_budget_wt, distance

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        """Log fairseq's metrics, the gates' losses (without their weights) and the routing metrics."""
        logging_outputs = on_host(logging_outputs)
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log["sample_size"] for log in logging_outputs)
        routed = sum(log.get(_ROUTED, log["sample_size"]) for log in logging_outputs)
        own = {kind.own_loss for kind in GATES.values()}
        of_tokens = {"moe_gate_loss", "moe_z_loss", "moe_entropy_loss", *own}
        for name in dict.fromkeys((*LOSSES, "cmr_gate_loss", "smoe_budget_loss", *sorted(own))):
            if any(name in log for log in logging_outputs):
                value = sum(log.get(name, 0) for log in logging_outputs)
                size = routed if name in of_tokens else sample_size
                metrics.log_scalar(name, value / size if size else 0, size, round=3)
        log_routing(logging_outputs)


def _scalar(name: str, term) -> Tensor:
    if not torch.is_tensor(term) or term.dim():
        got = f"a tensor of shape {tuple(term.shape)}" if torch.is_tensor(term) else repr(term)
        raise UsageError(
            f"loss {name} of --moe-losses returned {got:.60}; expected a scalar tensor"
        )
    return term
