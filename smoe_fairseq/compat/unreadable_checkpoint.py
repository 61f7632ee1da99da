"""One sentence for a checkpoint that cannot be read, where fairseq ends in torch's stack trace, or in none.

For fairseq 0.12.2 on any torch. A full disk or a killed process leaves files that are cut off, a
failing disk changes bytes of a tensor, which torch takes without a word, and a file of another user is not
for this one to read; the user has to know which file it is, and what is wrong. Where a file holds a
type that is not loaded for safety, torch's words go on to say how to load it all the same, which runs
whatever program the file brings along; ours name the type.
"""

import functools
from types import ModuleType

from smoe_fairseq.system.checkpoint_file import CutOffCheckpoint, check_content, reading
from smoe_fairseq.system.errors import UsageError


def name_unreadable_checkpoints(checkpoint_utils: ModuleType) -> None:
    for name in ("load_checkpoint_to_cpu", "load_ema_from_checkpoint"):
        setattr(checkpoint_utils, name, _checked(getattr(checkpoint_utils, name)))
    checkpoint_utils.load_checkpoint_to_cpu = _whole(checkpoint_utils.load_checkpoint_to_cpu)
    name = "load_model_ensemble_and_task"
    setattr(checkpoint_utils, name, _usable(getattr(checkpoint_utils, name)))


def _checked(load):
    @functools.wraps(load)
    def load_checked(path, *others, **options):
        try:
            with reading(path):
                return load(path, *others, **options)
        except CutOffCheckpoint as error:
            raise UsageError(
                f"{error}: resume from another one with --restore-file, or remove it to start anew"
            ) from None

    return load_checked


def _whole(load):
    """Of a file that can be read: what fairseq makes of it has to be the content of a checkpoint."""

    @functools.wraps(load)
    def load_whole(path, *others, **options):
        try:
            state = load(path, *others, **options)
        except FileNotFoundError:
            raise UsageError(f"{path} is missing") from None
        except UsageError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                f"{path} is not a checkpoint of fairseq, or parts of it are missing: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from None
        check_content(path, state)
        return state

    return load_whole


def _usable(load):
    """Of a model to translate with: it has to fit, and not to have diverged, which the search asserts."""

    @functools.wraps(load)
    def load_usable(filenames, *others, **options):
        try:
            models, *rest = load(filenames, *others, **options)
        except RuntimeError as error:
            if not (said := str(error)).startswith("Error(s) in loading state_dict"):
                raise
            first = " ".join(said.splitlines()[1].split())
            raise UsageError(
                f"{', '.join(filenames)} does not fit the model that its options and the data's dictionaries "
                f"ask for: {first}"
            ) from None
        for file, model in zip(filenames, models):
            for name, parameter in model.named_parameters():
                if not parameter.isfinite().all():
                    raise UsageError(
                        f"{file}: {name} has values that are not numbers (NaN or infinity): its training has "
                        "diverged; take an earlier checkpoint"
                    )
        return models, *rest

    return load_usable
