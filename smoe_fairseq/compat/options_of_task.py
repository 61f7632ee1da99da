"""One sentence where a model takes an option from its task, and the task has none of that name.

For fairseq 0.12.2 on any Python. A language model says "as long as the task's samples"; with another task
than its own, the command ends in omegaconf's stack trace about an interpolation.
"""

import functools
from types import ModuleType

from smoe_fairseq.system.errors import UsageError


def name_missing_options(utils: ModuleType) -> None:
    from omegaconf.errors import InterpolationResolutionError

    original = utils.convert_namespace_to_omegaconf

    @functools.wraps(original)
    def convert_namespace_to_omegaconf(args):
        try:
            return original(args)
        except InterpolationResolutionError as error:
            part, _, option = str(error.full_key).partition(".")
            if part != "model":
                raise
            name = option.replace("_", "-")
            raise UsageError(
                f"--arch {args.arch} with --task {args.task}: the model takes --{name} from "
                "its task, which has no such option; expected the task that it is for, such as "
                "language_modeling"
            ) from None

    utils.convert_namespace_to_omegaconf = convert_namespace_to_omegaconf
