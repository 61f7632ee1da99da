"""Features of the installed torch, detected here once, never by its version.

Builds differ under one version number (vendors', nightly ones), and private functions become public.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

# The grouped product: public since torch 2.10, for all three types. The private one of 2.8 and 2.9 is left
# alone: its backward pass was seen to hang on an expert without rows (pytorch issue 152668).
grouped_mm = getattr(F, "grouped_mm", None)

# Devices that have autocast ("meta" has none). Asked beforehand: torch 2.11 cannot trace the question.
AUTOCAST = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla"))
)


def has_grouped_mm(weight: Tensor) -> bool:
    """Whether `grouped_mm` is there for weights of this type."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    return grouped_mm is not None and weight.dtype in types


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
