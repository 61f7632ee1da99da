"""All changes to fairseq 0.12.2, whose files stay unmodified.

`PATCHES` make it work on current Python, torch and numpy, for every fairseq command, with the plugin or
without. Each is one function; the comment above it says what it patches and why. `ADDITIONS` are
what the plugin (``--user-dir``) brings: models, criterion, and changes to training. They are listed here
by name only: nothing in this package imports what is above it (tests/test_layers.py). Both are called with
the module that they change as soon as it has been imported, so they load nothing heavy themselves.

The start-up hook loads this package without its parent. Write ``from .file import name`` in it:
``from . import file`` would import the parent.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from types import ModuleType

from smoe_fairseq.errors import UsageError

from .patches_training import PATCHES as OTHERS
from .safe_load import allow_checkpoint_types, evaluate_literals_only, name_unreadable_checkpoints

__all__ = ["ADDITIONS", "PATCHES", "install", "register", "require_fairseq", "when_imported"]

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


# Actions on a module as soon as it has been imported.

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Call ``action(module)`` once ``name`` has been imported; at once if it already has been.

    ``PACKAGE.*`` stands for a package and each module in it. It imports nothing itself.
    """
    for module in [m for other, m in sys.modules.items() if name in (other, _whole(other)) and m]:
        action(module)
    _WaitingFinder.actions.setdefault(name, []).append(action)
    if _WaitingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _WaitingFinder)


def _whole(name: str) -> str:
    return f"{name.partition('.')[0]}.*"


class _WaitingFinder:
    """Leaves finding to the other finders, and adds the actions to the end of a module's loading."""

    actions: dict[str, list[Action]] = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        actions = [*cls.actions.get(name, ()), *cls.actions.get(_whole(name), ())]
        if not actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is None or spec.loader is None:  # missing, or a folder without code
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in actions:
                action(module)

        spec.loader.exec_module = execute_then_act
        return spec


PATCHES = (
    ("torch.serialization", allow_checkpoint_types),
    ("fairseq.*", evaluate_literals_only),
    ("fairseq_cli.*", evaluate_literals_only),
    ("fairseq.checkpoint_utils", name_unreadable_checkpoints),
    *OTHERS,
)

# (module of fairseq, MODULE:FUNCTION to call with it); without a function, MODULE is imported.
ADDITIONS = (
    ("fairseq.criterions", "smoe_fairseq.criterions"),
    ("fairseq.models", "smoe_fairseq.models"),
    ("fairseq.utils", "smoe_fairseq.training.foreach:norm_together"),
    ("fairseq.utils", "smoe_fairseq.training.gradients:norm_over_all_experts"),
    ("fairseq.optim.adam", "smoe_fairseq.training.foreach:step_together"),
    ("fairseq.optim.fairseq_optimizer", "smoe_fairseq.training.foreach:multiply_together"),
    ("fairseq.optim.fp16_optimizer", "smoe_fairseq.training.foreach:copy_together"),
    ("fairseq.optim", "smoe_fairseq.training.gradients:spread_shared_state"),
    (
        "fairseq.distributed.legacy_distributed_data_parallel",
        "smoe_fairseq.training.gradients:sum_over_replicas",
    ),
    ("fairseq.distributed.utils", "smoe_fairseq.training.launch:start_together"),
    ("fairseq.distributed.utils", "smoe_fairseq.training.launch:check_before_all"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.training.sharded_checkpoints:save_sets"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.training.sharded_checkpoints:load_sets"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.checkpoints.io:compare_when_loaded"),
    ("fairseq.data.dictionary", "smoe_fairseq.checkpoints.io:remember_file"),
    ("fairseq.tasks.translation_multi_simple_epoch", "smoe_fairseq.training.text:name_files"),
    ("fairseq.data.iterators", "smoe_fairseq.training.epochs:resume_on_any_ranks"),
    ("fairseq.trainer", "smoe_fairseq.training.ours:ask_for_ours"),
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
    """Install the additions as soon as fairseq, of the right version, has been imported."""
    if problem() is None:
        when_imported("fairseq", _register)


def _register(fairseq) -> None:
    for module, place in ADDITIONS:
        when_imported(module, functools.partial(_add, place))


def _add(place: str, of_fairseq: ModuleType) -> None:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    if name:
        getattr(found, name)(of_fairseq)
