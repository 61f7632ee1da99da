"""Tells a checkpoint in a folder that this user may not enter from one that is not there.

For fairseq 0.12.2 on any Python. ``os.path.exists`` says False of both, so that ``--restore-file`` of a
folder of another user starts a new training without a word.
"""

import os
from types import ModuleType

from smoe_fairseq.system.errors import UsageError


def name_hidden_checkpoints(file_io: ModuleType) -> None:
    paths = file_io.PathManager
    for name in ("exists", "isfile"):
        setattr(paths, name, staticmethod(_asked(getattr(paths, name))))


def _asked(ask):
    def ask_of_system(path) -> bool:
        if str(path).endswith(".pt"):
            try:
                os.stat(path)
            except PermissionError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from None
            except (OSError, ValueError):
                pass  # not there, or not on this disk
        return ask(path)

    return ask_of_system
