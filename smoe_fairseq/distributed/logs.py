"""Sums of logs over processes whose passes went through different layers.

fairseq flattens each process's log into one tensor and adds these up: with another key, or the same keys in
another order, the sum aborts, or is of different things. With LayerDrop every process draws the layers it
leaves out, and so the layers that it has something to say of.
"""

import torch
from torch import Tensor

from smoe_fairseq.distributed.agree import from_all


def with_same_keys(logs: list[dict], device: torch.device) -> list[dict]:
    """The logs of this process's batches; the first has every key of any process, in one order.

    fairseq takes the keys from the first one. What a process has nothing to say of is 0 there.
    """
    own: dict[str, tuple[int, ...] | None] = {}
    for log in logs:
        for key, value in log.items():
            own.setdefault(key, tuple(value.shape) if isinstance(value, Tensor) else None)
    everyones: dict[str, tuple[int, ...] | None] = {}
    for shapes in from_all(own):
        for key, shape in shapes.items():
            everyones.setdefault(key, shape)
    given = logs[0] if logs else {}
    first = {
        key: given[key]
        if key in given
        else (0 if shape is None else torch.zeros(shape, device=device))
        for key, shape in everyones.items()
    }
    return [first, *logs[1:]]
