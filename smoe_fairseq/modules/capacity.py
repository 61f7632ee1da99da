"""Evaluation under the capacity that training has: what it costs shows what training leaves out."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from smoe_fairseq.modules.gate import Gate


def gates_of(model: nn.Module) -> list[Gate]:
    return [module for module in model.modules() if isinstance(module, Gate)]


def is_limited_in_training(model: nn.Module) -> bool:
    """Whether training drops what evaluation does not; no for a dense model."""
    return any(g.capacity_factor not in (0, g.eval_capacity_factor) for g in gates_of(model))


@contextmanager
def training_capacity(model: nn.Module) -> Iterator[None]:
    """Within it, evaluation limits the experts as training does; nothing else changes."""
    before = [(gate, gate.eval_capacity_factor) for gate in gates_of(model)]
    for gate, _ in before:
        gate.eval_capacity_factor = gate.capacity_factor
    try:
        yield
    finally:
        for gate, factor in before:
            gate.eval_capacity_factor = factor
