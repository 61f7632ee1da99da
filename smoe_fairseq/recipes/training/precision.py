"""The number type of a run: bf16 on a GPU that has it, else fp16; fp32 on a CPU."""

import os
from collections.abc import Sequence

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Flags
from smoe_fairseq.recipes.training.launcher import Launch

PRECISIONS = ("auto", "bf16", "fp16", "fp32")
_OTHERS = ("--amp", "--memory-efficient-fp16", "--memory-efficient-bf16")
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under Windows, AMD


def precision_flags(
    precision: str, place: Launch, extra: Sequence[str], resumed: Flags | None = None
) -> tuple[Flags, list[str]]:
    """The flags of fairseq-train for a number type, and a comment that says which and why.

    Args:
        precision: the data set's, one of `PRECISIONS`; ``PRECISION`` overrides it.
        extra: all other flags; if one of them sets the number type, nothing is added to it.
        resumed: the flags that an earlier start of this run was given, whose number type ``auto`` keeps.
    """
    variable = os.environ.get("PRECISION")
    asked = variable or precision
    if asked not in PRECISIONS:
        named = f"PRECISION={asked}" if variable else f"precision: {asked}"
        raise UsageError(f"{named}: choose one of {', '.join(PRECISIONS)}")
    given = {word.partition("=")[0] for word in extra}
    if own := [flag for flag in ("--fp16", "--bf16", *_OTHERS) if flag in given]:
        return {}, [f"# number type: {own[0]}, as the flags request"]
    chosen, why = _choose(asked, place, resumed)
    if asked != "auto" and chosen == asked:
        why = f"as {'PRECISION' if variable else 'the data set'} requests"
    flags: Flags = {} if chosen == "fp32" else {chosen: True}
    if chosen == "fp16" and "--expert-parallel" in given:
        flags["fp16-no-flatten-grads"] = True
        why += "; with sharded experts its gradients are not flattened"
    return flags, [f"# number type: {chosen}, {why}"]


def _choose(asked: str, place: Launch, resumed: Flags | None) -> tuple[str, str]:
    if asked == "auto" and resumed and not any(flag in resumed for flag in _OTHERS):
        before = next((name for name in ("bf16", "fp16") if f"--{name}" in resumed), "fp32")
        return before, "as this run began; PRECISION chooses for a new run"
    if place.cpu and asked in ("auto", "fp16"):
        return "fp32", "which a CPU computes in; PRECISION=bf16 also runs on one"
    if asked != "auto":
        return asked, ""
    if has_bf16():
        return "bf16", "which this GPU supports; PRECISION=fp16 or fp32 chooses another"
    return "fp16", "since no GPU here supports bf16; PRECISION=bf16 is for a GPU that does"


def has_bf16() -> bool:
    """Whether this machine's GPU has bf16; `torch.cuda.is_bf16_supported` includes emulation."""
    if not any(os.path.exists(device) for device in _DEVICES):
        return False  # without importing torch

    import torch

    if not torch.cuda.is_available():
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)
