"""In which numbers a recipe trains: bf16 where the GPU has it, else as its configs say (the paper's fp16)."""

import os
from collections.abc import Sequence

from smoe_fairseq.recipes.launch import Launch
from smoe_fairseq.settings.flags import Flags
from smoe_fairseq.system.errors import UsageError

PRECISIONS = ("bf16", "fp16", "fp32")
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of these under Windows, of AMD
_FLAGS = ("--fp16", "--bf16", "--amp", "--memory-efficient-fp16", "--memory-efficient-bf16")


def precision_flags(flags: Flags, place: Launch, extra: Sequence[str]) -> tuple[Flags, list[str]]:
    """The flags that take the place of ``fp16`` among a recipe's, and what to say of them.

    Args:
        extra: the user's own; one of them that sets the precision stays the only one.

    Raises:
        UsageError: ``PRECISION`` is none of `PRECISIONS`.
    """
    asked = os.environ.get("PRECISION") or None
    if asked not in (None, *PRECISIONS):
        raise UsageError(f"PRECISION={asked}: choose one of {', '.join(PRECISIONS)}")
    if any(flag in extra for flag in _FLAGS):
        return {"fp16": False}, []
    if asked is None and not flags.get("fp16"):
        return {}, []
    if place.cpu and asked != "bf16":
        notes = [] if asked == "fp32" else ["# on the CPU there is no fp16"]
        return {"fp16": False}, notes
    chosen = asked or ("bf16" if has_bf16() else "fp16")
    notes = []
    if asked is None and chosen == "bf16":
        notes.append(
            "# bf16, which the GPU has, for the paper's fp16; PRECISION=fp16 trains in that"
        )
    result = {name: chosen == name for name in ("fp16", "bf16")}
    if chosen == "fp16" and "--expert-parallel" in extra:
        result["fp16-no-flatten-grads"] = True
        notes.append("# with sharded experts, fp16 gradients are not flattened")
    return result, notes


def has_bf16() -> bool:
    """Whether this machine's GPU computes bf16 products itself; torch also says so of those that emulate."""
    if not any(os.path.exists(device) for device in _DEVICES):
        return False  # without the second that torch takes to say so

    import torch

    if not torch.cuda.is_available():
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)
