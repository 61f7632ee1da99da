"""Recomputes checkpointed activations in the types that they had.

For fairseq 0.12.2 on any torch. Its activation checkpointing runs a layer again in the backward pass, but
outside the autocast context of the forward pass: in float32, where half precision was recorded. The
gradients are then of other activations, and a gate may choose other experts than it did.
"""

import functools
from contextlib import ExitStack
from types import ModuleType


def keep_autocast(checkpoint_activations: ModuleType) -> None:
    function = checkpoint_activations.CheckpointFunction
    original = function.forward

    @functools.wraps(original)
    def forward(ctx, run_function, *args):
        return original(ctx, _as_here(run_function), *args)

    function.forward = staticmethod(forward)


def _as_here(run_function):
    """The function, always under the autocast settings of this moment."""
    import torch  # this package is imported with fairseq, not before

    settings = [
        {
            "device_type": d,
            "enabled": torch.is_autocast_enabled(d),
            "dtype": torch.get_autocast_dtype(d),
        }
        for d in ("cpu", "cuda")
    ]
    if not any(s["enabled"] for s in settings):
        return run_function

    @functools.wraps(run_function)
    def run(*args, **kwargs):
        with ExitStack() as stack:
            for autocast in settings:
                if autocast["enabled"]:
                    stack.enter_context(torch.autocast(**autocast))
            return run_function(*args, **kwargs)

    return run
