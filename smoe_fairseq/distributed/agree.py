"""What one process of a run knows, told to the others: plain values, not tensors."""

import torch.distributed as dist


def several() -> bool:
    """Whether there are other processes in this run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_first(value):
    """The value of the first process, in all of them."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all(value) -> list:
    """The values of all processes, in all of them."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
