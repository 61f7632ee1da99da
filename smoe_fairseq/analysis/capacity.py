"""What training's capacity takes away: the loss with and without it, and dropped choices by position."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.data.multilingual.sampled_multi_dataset import SampledMultiDataset
from torch import nn

from smoe_fairseq.analysis import loading
from smoe_fairseq.modules.blocks import moe_blocks
from smoe_fairseq.modules.capacity import (
    FIFTHS,
    by_position,
    is_limited_in_training,
    training_capacity,
)


@dataclass
class CapacityCheck:
    """The same batches without a limit and with training's, references as decoder input.

    Args:
        tokens: target tokens, </s> included.
        nll_loss: in bits per target token, nothing dropped.
        limited_nll_loss: the same with experts limited as in training.
        fifths: by MoE layer ``(2, FIFTHS)``, first choices by position and of these the dropped ones.
    """

    tokens: int = 0
    nll_loss: float = 0.0
    limited_nll_loss: float = 0.0
    fifths: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Well above 0: experts get tokens that they were not trained on."""
        return self.nll_loss - self.limited_nll_loss


@torch.no_grad()
def check(
    model: nn.Module,
    task,
    directions: list[str],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = loading.TOKENS_PER_BATCH,
) -> CapacityCheck | None:
    """Runs a model over a subset twice; None where training has no limit.

    What is dropped depends on what else is in a batch, so batches are made as in training: sentences of
    about one length from all directions. ``sentences`` of each direction are drawn; None: all.
    """
    if not is_limited_in_training(model):
        return None
    found = CapacityCheck(
        fifths={name: np.zeros((2, FIFTHS), dtype=np.int64) for name in moe_blocks(model)}
    )
    parts = [part for name in directions for part in loading.datasets(task, name, subset)]
    together = _together(parts, task)
    number = None if sentences is None else sentences * len(directions)
    order = np.random.default_rng(loading.SEED).permutation(len(together))
    batches, _ = loading.batches(together, task.max_positions(), number, max_tokens, order)
    device = next(model.parameters()).device
    for batch in batches:
        sample = together.collater([together[i] for i in batch])
        if device.type != "cpu":
            sample = utils.move_to_cuda(sample, device)
        found.tokens += sample["ntokens"]
        found.nll_loss += _nll(model, sample)[0]
        with training_capacity(model):
            nll, moe_stats = _nll(model, sample)
        found.limited_nll_loss += nll
        for counts, stats in zip(found.fifths.values(), moe_stats, strict=True):
            counts += by_position(stats).cpu().numpy()
    bits = max(found.tokens, 1) * math.log(2)
    found.nll_loss, found.limited_nll_loss = found.nll_loss / bits, found.limited_nll_loss / bits
    return found


def _together(parts: list, task):
    if len(parts) == 1:
        return parts[0]
    shared = loading.is_multilingual(task) and task.data_manager._shared_collater()
    return SampledMultiDataset(parts, shared_collater=shared, shuffle=False)


def _nll(model: nn.Module, sample: dict) -> tuple[float, list]:
    logits, extra = model(**sample["net_input"])
    target = sample["target"].view(-1)
    padding = model.decoder.dictionary.pad()
    nll = F.cross_entropy(
        logits.view(len(target), -1).float(), target, ignore_index=padding, reduction="sum"
    )
    return nll.item(), extra["moe_stats"]
