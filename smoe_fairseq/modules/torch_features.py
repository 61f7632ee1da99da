"""What the torch at hand can do, found out once and here, by looking at it and never by its version.

Builds differ under one version number (vendors', nightly ones), and what is private today is public tomorrow.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The grouped product: public since torch 2.10, for all three types; private in 2.8 and 2.9, and taken only
# for what both compute in one kernel, bfloat16 on GPUs of compute capability 9; missing before.
PUBLIC = getattr(F, "grouped_mm", None)
PRIVATE = getattr(torch, "_grouped_mm", None)
grouped_mm = PUBLIC or PRIVATE


def has_grouped_mm(weight: Tensor) -> bool:
    """Whether `grouped_mm` is there for weights of this type and device."""
    if PUBLIC is not None:
        return weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if PRIVATE is None or weight.dtype != torch.bfloat16 or not weight.is_cuda:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9
