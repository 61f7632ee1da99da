"""Teacher-forced collection: first choices by direction, block and token type."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from fairseq import utils
from torch import nn
from tqdm import tqdm

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.counts import Block, Counts
from smoe_fairseq.analysis.recorder import Recorder
from smoe_fairseq.system.errors import UsageError


@dataclass(frozen=True)
class TypeCounts:
    """Counters of one direction and block by token type, of the types that occurred.

    Args:
        types: ``(N,)`` numbers in the dictionary of the block's side.
        special: ``(N,)``, whether a type is special (see `inputs.special`).
        first_choices: ``(N, L, E)``.
    """

    block: Block
    types: np.ndarray
    special: np.ndarray
    first_choices: np.ndarray

    @property
    def occurrences(self) -> np.ndarray:
        return self.first_choices[:, 0].sum(axis=1)

    @property
    def stops(self) -> np.ndarray:
        """``(N,)``: strata stopped at, summed over the occurrences."""
        return self.first_choices.sum(axis=(1, 2))

    def total(self, special: bool) -> Counts:
        """Of all special tokens or of all tokens that are text."""
        return Counts(self.block, self.first_choices[self.special == special].sum(axis=0))


@dataclass(frozen=True)
class Direction:
    """What was collected in one direction: every block's counters, in the order of the forward pass."""

    name: str
    sentences: int
    too_long: int
    blocks: tuple[TypeCounts, ...]


def collect(
    model: nn.Module,
    task,
    directions: Iterable[str],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
    progress: bool = True,
) -> Iterator[Direction]:
    """Runs a model over a subset with the references as decoder input, one direction after the other.

    Memory holds the counters of one direction at a time, so it is bounded by the vocabulary.

    Args:
        sentences: of each direction; None: all.
        max_tokens: of a batch, padding included; the numbers do not depend on it.
        progress: show a bar on standard error, where that is a terminal.
    """
    recorder = Recorder(model, task)
    with recorder.recording():
        for name in directions:
            recorder.reset()
            of_direction = task, name, subset, sentences, max_tokens
            seen, too_long = run_direction(recorder.run, model, *of_direction, progress)
            yield Direction(name, seen, too_long, _results(recorder, task))


def run_direction(
    run: Callable[[dict], None],
    model: nn.Module,
    task,
    name: str,
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
    progress: bool = True,
) -> tuple[int, int]:
    """Calls ``run`` with the model's inputs of each batch; the sentences it got, and those too long for it.

    The rest is as of `collect`.
    """
    seen = too_long = 0
    device = next(model.parameters()).device
    longest = inputs.longest(model, task)
    for dataset in inputs.datasets(task, name, subset):
        left = None if sentences is None else sentences - seen - too_long
        numbers, dropped = inputs.batches(dataset, longest, left, max_tokens)
        too_long += dropped
        for batch in tqdm(
            numbers, name, unit="batch", disable=None if progress else True, leave=False
        ):
            sample = dataset.collater([dataset[i] for i in batch])
            run(_on(device, sample["net_input"]))
            seen += len(batch)
    if not seen:
        raise UsageError(f"--gen-subset {subset}: {name} has no sentence to run on")
    return seen, too_long


def _on(device: torch.device, net_input: dict) -> dict:
    return net_input if device.type == "cpu" else utils.move_to_cuda(net_input, device)


def _results(recorder: Recorder, task) -> tuple[TypeCounts, ...]:
    results = []
    for name, block in recorder.blocks.items():
        block_of = Block(name, block.block.strata)
        dictionary = inputs.dictionary_of(task, block_of.side)
        counts = block.counts.cpu().numpy()
        types = counts[:, 0].sum(axis=1).nonzero()[0]
        special = inputs.special(dictionary, task)[types]
        results.append(TypeCounts(block_of, types, special, counts[types]))
    return tuple(results)
