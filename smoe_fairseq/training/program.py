"""Changes to ``fairseq_cli.train``, the program of ``fairseq-train``, while it runs."""

import functools
import os
import sys
from collections.abc import Callable, Mapping

PROGRAM = "fairseq_cli.train"


def change(name: str, changed: Callable[[Callable], Callable]) -> None:
    """Replace a function of the program by ``changed(function)``, once."""
    program = sys.modules.get(PROGRAM)
    original = getattr(program, name, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(program, name, functools.wraps(original)(changed(original)))


def save_if_validation_fails() -> None:
    """Have a validation that fails, for want of memory or by a fault of a criterion, end the run saved."""

    def changed(original: Callable) -> Callable:
        def validate(cfg, trainer, task, epoch_itr, subsets):
            try:
                return original(cfg, trainer, task, epoch_itr, subsets)
            except Exception:
                if trainer.data_parallel_world_size == 1:
                    save = sys.modules[PROGRAM].checkpoint_utils.save_checkpoint
                    save(cfg.checkpoint, trainer, epoch_itr, None)
                elif (
                    not cfg.checkpoint.no_save
                ):  # perhaps of this rank alone, as after a failed update
                    trainer.in_update = True
                    trainer.consolidate_optimizer()
                    file = os.path.join(cfg.checkpoint.save_dir, "crash.pt")
                    trainer.save_checkpoint(file, {"train_iterator": epoch_itr.state_dict()})
                raise

        return validate

    change("validate", changed)


# The count of validations without gain (--patience), which fairseq keeps as attributes of a function. It is
# saved in the checkpoint, since a resumed run begins without.

EARLY_STOP = "early_stop"  # key of a checkpoint's "extra_state"
_COUNTED = ("best", "num_runs")


def early_stop() -> dict[str, float]:
    """The best number so far and the validations since; empty before the first."""
    stop = getattr(sys.modules.get(PROGRAM), "should_stop_early", None)
    return {name: getattr(stop, name) for name in _COUNTED if getattr(stop, name, None) is not None}


def set_early_stop(state: Mapping[str, float]) -> None:
    """Go on counting from here."""
    stop = getattr(sys.modules.get(PROGRAM), "should_stop_early", None)
    for name in _COUNTED if stop is not None else ():
        setattr(stop, name, state.get(name))
