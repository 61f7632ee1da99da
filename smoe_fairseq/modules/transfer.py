"""Values on their way from the device to the host, many at once: each transfer waits for the device."""

from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor


def read(*values: Tensor) -> list[list[int]]:
    """Vectors of integers in one transfer."""
    flat = iter(torch.cat(values).tolist())
    return [list(islice(flat, len(value))) for value in values]


def on_host(logs: list[Mapping]) -> list[dict]:
    """Dictionaries in which numbers and numpy arrays stand in the place of tensors, in one transfer.

    Integers stay exact up to 2^53; other values are as they were.
    """
    tensors = [value for log in logs for value in log.values() if torch.is_tensor(value)]
    if not tensors:
        return [dict(log) for log in logs]
    # One copy for each type there is, and one to the host.
    types = {tensor.dtype: None for tensor in tensors}
    of_type = {t: [each for each in tensors if each.dtype == t] for t in types}
    parts = [torch.cat([each.detach().flatten() for each in of_type[t]]).double() for t in types]
    flat = torch.cat(parts).cpu().numpy()
    start, values = 0, {}
    for dtype, group in of_type.items():
        for each in group:
            value = flat[start : start + each.numel()].reshape(tuple(each.shape))
            start += each.numel()
            if not dtype.is_floating_point:
                value = value.astype("int64")
            values[id(each)] = value if each.dim() else value.item()
    return [{key: values.get(id(value), value) for key, value in log.items()} for log in logs]
