"""Features of the installed torch, detected by what it has, since builds of one version differ."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F

# The grouped product, public since torch 2.10. The private one of 2.8 and 2.9 is not used: its backward pass
# can hang on an expert without rows (pytorch issue 152668).
grouped_mm = getattr(F, "grouped_mm", None)

# Whether a transform of torch.func is active, such as `torch.func.grad` or `torch.vmap`.
has_transform = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)

# Devices that support autocast. Queried at import, since torch 2.11 cannot trace the query.
AUTOCAST = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla"))
)


def float32_is_exact() -> bool:
    """Whether float32 products on a GPU may not be rounded to TF32, by torch's newer setting or the older."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # since torch 2.9
    if precision is None:  # where both exist, reading the older one fails once the newer is set
        return torch.get_float32_matmul_precision() == "highest"
    return precision != "tf32"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Autocast's type on this device; None if it is disabled or not supported."""
    if device.type in AUTOCAST and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


@contextmanager
def without_default_device() -> Iterator[None]:
    """A context, or a decorator, in which new tensors are made on the CPU (`torch.set_default_device`)."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which autocast is disabled."""
    if device.type in AUTOCAST:
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def attend(query, key, value, mask: torch.Tensor | None, dropout: float = 0.0) -> torch.Tensor:
    """Torch's fused attention, but not cuDNN's.

    cuDNN plans every new shape, which takes the host of an H200 7 ms, and shapes of batches rarely repeat.
    """
    switch = torch.backends.cuda
    on_cpu = query.device.type == "cpu"
    planned = not on_cpu and not torch.compiler.is_compiling() and switch.cudnn_sdp_enabled()
    if planned:
        switch.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    finally:
        if planned:
            switch.enable_cudnn_sdp(True)
