"""What the torch at hand can do, found out once and here, by looking at it and never by its version.

Builds differ under one version number (vendors', nightly ones), and what is private today is public tomorrow.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

# The grouped product: public since torch 2.10, for all three types; private in 2.8 and 2.9, and taken only
# for what both compute in one kernel, bfloat16 on GPUs of compute capability 9; missing before.
PUBLIC = getattr(F, "grouped_mm", None)
PRIVATE = getattr(torch, "_grouped_mm", None)
grouped_mm = PUBLIC or PRIVATE

# Devices that have autocast ("meta" has none). Asked beforehand: torch 2.11 cannot trace the question.
AUTOCAST = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla"))
)


def has_grouped_mm(weight: Tensor) -> bool:
    """Whether `grouped_mm` is there for weights of this type and device."""
    if PUBLIC is not None:
        return weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if PRIVATE is None or weight.dtype != torch.bfloat16 or not weight.is_cuda:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast has products computed in; None where it is off, or not for such devices ("meta")."""
    if device.type in AUTOCAST and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Within it, products are computed in the type of their factors."""
    if device.type in AUTOCAST:
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
