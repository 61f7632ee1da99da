"""Output of training in a recipe: a line every few seconds.

All other output of fairseq is written to ``--log-file``. Recipes set ``SMOE_SCREEN``, the seconds between
two lines; without it, ``fairseq-train`` prints fairseq's messages.
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.progress import duration

VARIABLE = "SMOE_SCREEN"
CLEAR = "\r\033[K"  # clears a terminal's line
FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"  # fairseq's
_screen = None


def begin(cfg) -> None:
    """Move fairseq's messages from the screen to the log, if a recipe has started this rank.

    Args:
        cfg: fairseq's ``FairseqConfig``.
    """
    global _screen
    logging.FileHandler.handleError = _tell_once
    seconds, log = os.environ.get(VARIABLE), cfg.common.log_file
    if not seconds or not log or _screen is not None:
        return
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("  %(message)s"))
    if int(os.environ.get("RANK") or 0):
        return
    file = logging.FileHandler(log)
    file.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
    # fairseq itself writes the rest to the same file.
    file.addFilter(lambda r: r.module != "progress_bar" and r.name != "fairseq_cli.train")
    root.addHandler(file)
    root.setLevel(logging.INFO)
    metric = cfg.checkpoint.best_checkpoint_metric
    _screen = Screen(float(seconds), cfg.optimization.max_update, metric)
    logging.getLogger("fairseq_cli.train").addHandler(_EarlyEnd())


def _tell_once(handler: logging.FileHandler, record: logging.LogRecord) -> None:
    """In place of a stack trace for each line of a log that cannot be written, as on a full disk."""
    handler.emit = lambda record: None
    reason = getattr(sys.exc_info()[1], "strerror", None) or sys.exc_info()[1]
    message = f"warning: {handler.baseFilename} cannot be written: {reason}; training continues"
    print(message, file=sys.stderr, flush=True)


@replaces("fairseq.logging.progress_bar:progress_bar")
def open_log_once(progress_bar, *arguments, **options):
    """fairseq opens the log again for each epoch and validation, and writes each line as many times."""
    handlers = logging.getLogger("fairseq.logging.progress_bar").handlers
    opened = {getattr(handler, "baseFilename", None) for handler in handlers}
    if options.get("log_file") and os.path.abspath(options["log_file"]) in opened:
        del options["log_file"]
    return progress_bar(*arguments, **options)


class _EarlyEnd(logging.Handler):
    """Shows fairseq's message that a limit, such as ``--patience``, ends training."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.lower().startswith(("early stop", "stopping training")):
            _screen.line(message, stays=True)


def after_update(updates: int) -> None:
    """Show an update if a line is due, with the values that fairseq has just logged."""
    if _screen is not None:
        from fairseq.logging import metrics

        words = metrics.get_meter("train_inner", "wpb")
        loss = metrics.get_smoothed_values("train_inner").get("loss")
        _screen.update(updates, loss, words.val if words else 0)


def before_validation(updates: int) -> None:
    """Show that a validation begins, which may take minutes."""
    if _screen is not None:
        from fairseq.checkpoint_utils import save_checkpoint

        _screen.best = getattr(save_checkpoint, "best", None)  # a resumed run's, too
        _screen.validating(updates)


def after_save(updates: int, state: Mapping) -> None:
    """Show that a checkpoint was saved; ``state`` is its "extra_state"."""
    if _screen is not None:
        _screen.saved(updates, state.get("val_loss"), state.get("best"))


class Screen:
    """Progress on standard output: in a terminal one line that is overwritten, else a list of lines.

    Args:
        seconds: between two lines.
        max_update: the last update; 0 if only epochs are limited.
        metric: of validation, by which fairseq chooses the best checkpoint.
    """

    def __init__(self, seconds: float, max_update: int, metric: str = "loss"):
        self.seconds = seconds
        self.max_update, self.metric = max_update, metric
        self.terminal = sys.stdout.isatty()
        self.began: tuple[float, int] | None = None  # time and number of the first update
        self.shown = (0.0, 0)  # time of the last line, and the number of words up to then
        self.words = 0
        self.best: float | None = None
        self.paused: float | None = None  # when a validation began
        if self.terminal:
            atexit.register(self._write, CLEAR)

    def update(self, updates: int, loss: float | None, words: float) -> None:
        """Show the first update, the last one, and those between that are due."""
        now = time.monotonic()
        self.words += words
        if self.began is None:
            self.began = (now, updates)
        elif now - self.shown[0] < self.seconds and updates != self.max_update:
            return
        parts = [self._count(updates)]
        if loss is not None:
            parts.append(f"loss {loss:.3f}")
        if self.shown[0]:
            speed = (self.words - self.shown[1]) / max(now - self.shown[0], 1e-6)
            parts.append(f"{speed:,.0f} words/s")
        start, first = self.began
        if self.max_update > updates > first:
            left = (self.max_update - updates) * (now - start) / (updates - first)
            parts.append(f"{duration(left)} left")
        self.shown = (now, self.words)
        self.line(" | ".join(parts), stays=not self.terminal)

    def validating(self, updates: int) -> None:
        """Show that a validation begins."""
        self.paused = time.monotonic()
        self.line(f"{self._count(updates)} | validation begins", stays=not self.terminal)

    def saved(self, updates: int, value: float | None, best: float | None) -> None:
        """Show a checkpoint, with the validation metric if it was just computed."""
        if self.paused is not None:  # words per second are those of training
            time_of_line, words = self.shown
            self.shown, self.paused = (time_of_line + time.monotonic() - self.paused, words), None
        parts = [self._count(updates)]
        if value is not None:
            mark = (
                "" if value != best else " (best)" if best != self.best else " (equal to the best)"
            )
            self.best = best
            parts.append(f"validation {self.metric} {value:.3f}{mark}")
        self.line(" | ".join([*parts, "saved"]), stays=True)

    def _count(self, updates: int) -> str:
        of = f" of {self.max_update:,}" if self.max_update else ""
        return f"update {updates:,}{of}"

    def line(self, text: str, stays: bool) -> None:
        """Show a line; unless it ``stays``, the next one replaces it in a terminal."""
        self._write((CLEAR if self.terminal else "") + f"  {text}" + ("\n" if stays else ""))

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # training continues if standard output is closed
            sys.stdout.write(text)
            sys.stdout.flush()
