"""Effect of training's capacity limit: dropped choices by position, and the loss with the limit."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data.multilingual.sampled_multi_dataset import SampledMultiDataset
from torch import nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.layer import RoutingStats
from smoe_fairseq.progress import with_progress
from smoe_fairseq.translate.directions import is_multilingual

FIFTHS = 5  # of a sentence


@dataclass
class CapacityCheck:
    """The same batches without a limit and with training's limit, with references as decoder input.

    Losses are in bits per target token. `inputs.load` removes all limits.
    """

    tokens: int = 0  # target tokens, </s> included
    nll_loss: float = 0.0
    limited_nll_loss: float = 0.0  # with experts limited as in training
    # For each MoE layer ``(2, FIFTHS)``: first choices by position, and how many of them were dropped.
    fifths: dict[str, np.ndarray] = field(default_factory=dict)

    def percent_dropped(self, side: str) -> np.ndarray:
        """``(FIFTHS,)``, over all MoE layers of one side."""
        chosen, dropped = sum(t for n, t in self.fifths.items() if n.startswith(side))
        return 100 * dropped / chosen.clip(min=1)

    def sides(self) -> list[str]:
        return list(dict.fromkeys(name.split(".")[0] for name in self.fifths))

    @property
    def gap(self) -> float:
        """Well above 0: experts get tokens that they were not trained on."""
        return self.nll_loss - self.limited_nll_loss


@torch.no_grad()
def check_capacity(
    model: nn.Module, task, directions: list[str], subset: inputs.Subset
) -> CapacityCheck | None:
    """Runs a model over a subset twice; None if training does not drop more than evaluation."""
    if all(each.factor in (0, each.eval_factor) for each in inputs.capacities_of(model)):
        return None
    torch.manual_seed(inputs.SEED)  # for `--moe-drop-order random`
    zeros = {name: np.zeros((2, FIFTHS), dtype=np.int64) for name in moe_blocks(model)}
    check = CapacityCheck(fifths=zeros)
    for sample in samples(model, task, directions, subset):
        check.tokens += sample["ntokens"]
        check.nll_loss += nll(model, sample)[0]
        with training_capacity(model):
            limited, moe_stats = nll(model, sample)
        check.limited_nll_loss += limited
        for name, stats in moe_stats.items():
            check.fifths[name] += by_position(stats).cpu().numpy()
    tokens = max(check.tokens, 1)
    check.nll_loss /= tokens
    check.limited_nll_loss /= tokens
    return check


def samples(model: nn.Module, task, directions: list[str], subset: inputs.Subset) -> Iterator[dict]:
    """Batches as in training, on which dropping depends: similar lengths, sentences of all directions.

    A random sample has ``subset.sentences`` times the number of directions.
    """
    parts = [part for name in directions for part in inputs.datasets(task, name, subset.name)]
    dataset = parts[0]
    if len(parts) > 1:
        shared = is_multilingual(task) and task.data_manager._shared_collater()
        dataset = SampledMultiDataset(parts, shared_collater=shared, shuffle=False)
    number = subset.sentences and subset.sentences * len(directions)
    order = np.random.default_rng(inputs.SEED).permutation(len(dataset))
    longest = inputs.longest(model, task)
    order = order[inputs.drawn(len(order), number)]
    batches, _ = inputs.batches(dataset, longest, subset.max_tokens, order)
    for batch in with_progress("with training's capacity limit", batches):
        yield inputs.sample_of(model, task, dataset, batch)


def nll(model: nn.Module, sample: dict) -> tuple[float, dict[str, RoutingStats]]:
    """Negative log-likelihood of a batch in bits, and the statistics of its MoE layers."""
    logits, extra = model(**sample["net_input"])
    target = sample["target"].view(-1)
    padding = model.decoder.dictionary.pad()
    nats = F.cross_entropy(
        logits.view(len(target), -1).float(), target, ignore_index=padding, reduction="sum"
    )
    moe_stats = dict(zip(extra["moe_layers"], extra["moe_stats"], strict=True))
    return nats.item() / math.log(2), moe_stats


def by_position(stats: RoutingStats) -> torch.Tensor:
    """``(2, FIFTHS)``: first choices by fifth of the sentence, and how many of them were dropped.

    The statistics are of a pass over ``(B, S, D)``. Token t of n (from 0) is in fifth ``5 t // n``; a
    sentence of fewer than five tokens has no token in some fifths.
    """
    chosen_BS = stats.requested_capacity  # a token has one first choice per stop
    real_BS = (chosen_BS > 0).long()
    length_B1 = real_BS.sum(1, keepdim=True).clamp(min=1)
    fifth_BS = FIFTHS * (real_BS.cumsum(1) - 1).clamp(min=0) // length_B1
    counts_BS2 = torch.stack([chosen_BS, stats.dropped_choices[..., 0]], dim=-1)
    sums_52 = counts_BS2.new_zeros(FIFTHS, 2)
    sums_52.index_add_(0, fifth_BS.flatten(), counts_BS2.view(-1, 2))
    return sums_52.t()


@contextmanager
def training_capacity(model: nn.Module) -> Iterator[None]:
    """In this context, evaluation has training's capacity limits."""
    before = [(capacity, capacity.eval_factor) for capacity in inputs.capacities_of(model)]
    for capacity, _ in before:
        capacity.eval_factor = capacity.factor
    try:
        yield
    finally:
        for capacity, factor in before:
            capacity.eval_factor = factor
