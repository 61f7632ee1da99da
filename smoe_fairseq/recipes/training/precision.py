"""The precision of a run: bf16 on a GPU that supports it, else fp16; fp32 on a CPU."""

from collections.abc import Sequence

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.program_flags import Flags
from smoe_fairseq.recipes.training.launcher import Launch

PRECISIONS = ("auto", "bf16", "fp16", "fp32")
OTHERS = ("--amp", "--memory-efficient-fp16", "--memory-efficient-bf16")


def precision_flags(
    precision: str, launch: Launch, extra: Sequence[str], resumed: Flags | None = None
) -> tuple[Flags, list[str]]:
    """The flags of fairseq-train for the precision, and a comment that gives the reason.

    Args:
        precision: the data set's, one of `PRECISIONS`; ``PRECISION`` overrides it.
        extra: all other flags; if one of them sets the precision, no flag is added.
        resumed: the flags of the run to resume, whose precision ``auto`` keeps.
    """
    variable = launch.settings.precision
    requested = variable or precision
    if requested not in PRECISIONS:
        setting = f"--precision {requested}" if variable else f"precision: {requested}"
        raise UsageError(f"{setting}: choose one of {', '.join(PRECISIONS)}")
    words = {word.partition("=")[0] for word in extra}
    if own := [flag for flag in ("--fp16", "--bf16", *OTHERS) if flag in words]:
        return {}, [f"# number type: {own[0]}, as the flags request"]
    chosen, why = _choose(requested, launch, resumed)
    if requested != "auto" and chosen == requested:
        why = f"as {'--precision' if variable else 'the data set'} requests"
    flags: Flags = {} if chosen == "fp32" else {chosen: True}
    if chosen == "fp16" and "--expert-parallel" in words:
        flags["fp16-no-flatten-grads"] = True
        why += "; with sharded experts its gradients are not flattened"
    return flags, [f"# number type: {chosen}, {why}"]


def _choose(requested: str, launch: Launch, resumed: Flags | None) -> tuple[str, str]:
    if requested == "auto" and resumed and not any(flag in resumed for flag in OTHERS):
        before = next((name for name in ("bf16", "fp16") if f"--{name}" in resumed), "fp32")
        return before, "with which this run began; --precision is for new runs"
    if launch.cpu and requested in ("auto", "fp16"):
        instead = ", not fp16" * (requested == "fp16")
        return "fp32", f"the default on CPUs{instead}; --precision bf16 also works"
    if requested != "auto":
        return requested, ""
    if has_bf16():
        return "bf16", "which this GPU supports; --precision fp16 or fp32 chooses another"
    return "fp16", "since no GPU here supports bf16; --precision bf16 is for a GPU that does"


def has_bf16() -> bool:
    """Whether this machine's GPU supports bf16; `torch.cuda.is_bf16_supported` includes emulation."""
    import torch

    if not torch.cuda.is_available():
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)
