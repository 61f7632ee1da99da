"""All changes to fairseq 0.12.2, whose files stay unmodified.

`PATCHES` make it work on current Python, torch and numpy, for every fairseq command, with the plugin or
without. Each is one function, which names what it patches; the comment above it says why. `ADDITIONS` are
what the plugin (``--user-dir``) brings: models, criterion, and changes to training. They are listed here
by name only: nothing in this package imports what is above it (tests/test_layers.py).

The start-up hook loads this package without its parent. Write ``from .file import name`` in it:
``from . import file`` would import the parent.
"""

import importlib
import warnings
from collections.abc import Sequence
from importlib import metadata

from smoe_fairseq.errors import UsageError

# Each of these files adds its patches to the list.
from .option_values import check_options  # noqa: F401
from .patches import is_fairseq_command  # noqa: F401
from .patches_data import join_bytes  # noqa: F401
from .patches_training import wrap_any_model  # noqa: F401
from .replacing import PATCHES, Action, when_imported

__all__ = ["ADDITIONS", "PATCHES", "install", "register", "require_fairseq"]

# The version of fairseq that the patches are for.

FAIRSEQ_VERSION = "0.12.2"
REMEDY = f"run `pip install --no-deps fairseq=={FAIRSEQ_VERSION}`"


class FairseqVersionError(ImportError, UsageError):
    """fairseq is missing or has another version; the message is one sentence with the remedy."""


def problem() -> str | None:
    """One sentence on what is wrong with the installed fairseq, or None if nothing is."""
    try:
        found = metadata.version("fairseq")
    except metadata.PackageNotFoundError:
        return f"smoe_fairseq needs fairseq {FAIRSEQ_VERSION}, which is not installed: {REMEDY}"
    if found == FAIRSEQ_VERSION:
        return None
    return f"smoe_fairseq needs fairseq {FAIRSEQ_VERSION}, but {found} is installed: {REMEDY}"


def require_fairseq() -> None:
    """Raises FairseqVersionError unless the right fairseq is installed."""
    if sentence := problem():
        raise FairseqVersionError(sentence)


# Files that register something with fairseq, or replace its functions (`replaces`). Of several in one place
# the later one is called first.
ADDITIONS = (
    "smoe_fairseq.criterions",
    "smoe_fairseq.models",
    "smoe_fairseq.training.foreach",
    "smoe_fairseq.training.gradients",
    "smoe_fairseq.training.launch",
    "smoe_fairseq.training.sharded_checkpoints",
    "smoe_fairseq.checkpoints.io",
    "smoe_fairseq.training.text",
    "smoe_fairseq.training.program",
    "smoe_fairseq.training.ours",
)

_installed = False


def install(patches: Sequence[tuple[str, Action]] = PATCHES) -> None:
    """Install the patches, once; another version of fairseq is left alone, with a warning."""
    global _installed
    if _installed:
        return
    _installed = True
    if sentence := problem():  # of another version, since fairseq is being imported
        warnings.warn(sentence, stacklevel=2)
        return
    for module, patch in patches:
        when_imported(module, patch)


def register() -> None:
    """Import the additions as soon as fairseq, of the right version, has been imported."""
    if problem() is None:
        when_imported("fairseq", lambda fairseq: list(map(importlib.import_module, ADDITIONS)))
