"""Drops the warning that `torch.jit.script` is deprecated, five times at every command's start.

For fairseq 0.12.2 on torch 2.14 and later. fairseq's model_utils.py asks for it as it is imported, it works
all the same, and a user can do nothing about it. Other warnings are untouched.
"""

import warnings
from types import ModuleType


def quiet_jit(jit: ModuleType) -> None:
    message = r"`torch\.jit\.script` is (deprecated|not supported)"
    warnings.filterwarnings("ignore", message, FutureWarning)
