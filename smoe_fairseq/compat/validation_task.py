"""``fairseq-validate`` without ``--task`` validates with the task that the checkpoint was trained with.

For fairseq 0.12.2 on any Python, which has no default there and ends in ``KeyError: None``. The task of the
command line decides which flags there are; what is validated is the checkpoint's task in any case.
"""

import argparse
import functools
import sys
from types import ModuleType

from smoe_fairseq.system.errors import UsageError

from .saved_names import saved_name


def take_task_of_checkpoint(options: ModuleType) -> None:
    original = options.get_validation_parser

    @functools.wraps(original)
    def get_validation_parser(default_task=None):
        task = default_task or _task_of_checkpoint(sys.argv[1:])
        parser = original(task)  # which imports --user-dir
        from fairseq.tasks import TASK_REGISTRY

        if task is not None and task not in TASK_REGISTRY:
            raise UsageError(
                f"--user-dir is missing or another: the checkpoint's task is {task}, which fairseq itself "
                "does not have; expected --user-dir with the plugin that it is from"
            )
        return parser

    options.get_validation_parser = get_validation_parser


def _task_of_checkpoint(words: list[str]) -> str | None:
    """Its name; None where ``--task`` names one, or help is asked for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--task", "--path"):
        parser.add_argument(flag)
    given, others = parser.parse_known_args(words)
    if given.task or {"-h", "--help"} & set(others):
        return None
    if not given.path:
        raise UsageError("--path is missing: expected the checkpoint to validate")
    found = saved_name(given.path, "task", "task")
    if found is None:
        raise UsageError(f"{given.path} does not say of what task it is: expected --task")
    return found
