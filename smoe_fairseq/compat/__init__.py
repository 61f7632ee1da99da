"""All changes to fairseq 0.12.2, whose files stay unmodified.

`PATCHES` make it work on current Python, torch and numpy, for every fairseq command, with or without the
plugin. Each is one function, which names what it patches; the comment above it says why. `ADDITIONS` are
the modules of the plugin (``--user-dir``): models, criterion, and changes to training. They are listed by
name, since this package must not import higher layers (tests/test_layers.py).

The start-up hook loads this package without its parent. Inside it, write ``from .file import name``:
``from . import file`` would import the parent.
"""

import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from smoe_fairseq.errors import UsageError

# Each of these files adds its patches to the list.
from .option_values import check_options  # noqa: F401
from .patches import is_fairseq_command  # noqa: F401
from .patches_data import join_bytes  # noqa: F401
from .patches_training import wrap_any_model  # noqa: F401
from .replacing import PATCHES, Action, WaitingFinder, when_imported  # noqa: F401

__all__ = ["ADDITIONS", "PATCHES", "install", "register", "require_fairseq"]

FAIRSEQ_VERSION = "0.12.2"  # to which the patches apply
REMEDY = f"run `pip install --no-deps fairseq=={FAIRSEQ_VERSION}`"


class FairseqVersionError(ImportError, UsageError):
    """fairseq is missing or has another version; the message says how to install it."""


def version_error() -> str | None:
    """The message if fairseq is missing or has another version; else None."""
    try:
        version = metadata.version("fairseq")
    except metadata.PackageNotFoundError:
        return f"smoe_fairseq needs fairseq {FAIRSEQ_VERSION}, which is not installed: {REMEDY}"
    if version == FAIRSEQ_VERSION:
        return None
    return f"smoe_fairseq needs fairseq {FAIRSEQ_VERSION}, but {version} is installed: {REMEDY}"


def require_fairseq() -> None:
    """Raises FairseqVersionError unless the right fairseq is installed."""
    if message := version_error():
        raise FairseqVersionError(message)


# Modules that register something with fairseq or replace its functions (`replaces`). If several replace one
# function, the last one is called first.
ADDITIONS = (
    "smoe_fairseq.criterions",
    "smoe_fairseq.models",
    "smoe_fairseq.training.foreach",
    "smoe_fairseq.training.gradients",
    "smoe_fairseq.training.launch",
    "smoe_fairseq.training.sharded_checkpoints",
    "smoe_fairseq.checkpoints.trained_with",
    "smoe_fairseq.training.text",
    "smoe_fairseq.training.program",
    "smoe_fairseq.training.ours",
)

_installed = False


def install(patches: Sequence[tuple[str, Action]] = PATCHES) -> bool:
    """Install the patches, once, and return whether; another version of fairseq gets a warning alone."""
    global _installed
    if _installed:
        return False
    _installed = True
    if message := version_error():
        warnings.warn(message, stacklevel=2)
        return False
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # no advertisement
    for module, patch in patches:
        when_imported(module, patch)
    if "fairseq" not in sys.modules:
        when_imported("fairseq", _run_program)
    return True


def _run_program(_) -> None:
    """Run a file of fairseq that is the program, by its path or ``python -m``, as a command: patched."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if file.parent.name != "fairseq_cli":
        return
    name = f"fairseq_cli.{file.stem}"
    commands = {each.value for each in metadata.distribution("fairseq").entry_points}
    if f"{name}:cli_main" in commands and file.samefile(importlib.util.find_spec(name).origin):
        sys.exit(importlib.import_module(name).cli_main())


def register() -> None:
    """Import the additions as soon as fairseq, of the right version, has been imported."""
    if version_error() is None:
        when_imported("fairseq", lambda fairseq: list(map(importlib.import_module, ADDITIONS)))
