"""The bias of gates (``--moe-balance bias``) goes on once per update, by the choices of all its batches."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from smoe_fairseq.models.moe_layers import ASKED, moe_blocks


def update_biases(model: nn.Module, logging_outputs: Iterable[Mapping]) -> None:
    """After an optimizer step, with what was logged of the update by all processes, on the host.

    Every process has the same numbers, so the biases stay the same in all of them.
    """
    logs = list(logging_outputs)
    for name, block in moe_blocks(model).items():
        key = f"{ASKED}{name}"
        asked = sum(log[key] for log in logs if key in log)
        if block.balance == "bias" and any(key in log for log in logs):
            block.update_bias(torch.as_tensor(asked, device=block.stratum_of_expert.device))
