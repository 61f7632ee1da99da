"""Where a model is to run, by its name at a command."""

import torch

from smoe_fairseq.system.errors import UsageError


def device_of(name: str) -> torch.device:
    """What ``--device`` names.

    Raises:
        UsageError: there is no such device here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name}: expected cpu, or a GPU's name ({reason})") from None
