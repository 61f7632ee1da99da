"""Output of training in a recipe: a line every few seconds.

All other output of fairseq goes to ``--log-file``. Recipes set ``SMOE_SCREEN``, the seconds between two
lines; without it, ``fairseq-train`` prints what fairseq prints.
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "SMOE_SCREEN"
CLEAR = "\r\033[K"  # of a terminal's line
FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"  # fairseq's
_screen = None


def begin(cfg) -> None:
    """Moves fairseq's messages from the screen to the log, on a rank that a recipe has started.

    Args:
        cfg: fairseq's ``FairseqConfig``, before anything else is done with it.
    """
    global _screen
    seconds, log = os.environ.get(VARIABLE), cfg.common.log_file
    if not seconds or not log or _screen is not None:
        return
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(logging.WARNING)
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


def after_update(updates: int) -> None:
    """Shows an update when it is time to, with what fairseq has just logged of it."""
    if _screen is not None:
        from fairseq.logging import metrics

        words = metrics.get_meter("train_inner", "wpb")
        loss = metrics.get_smoothed_values("train_inner").get("loss")
        _screen.update(updates, loss, words.val if words else 0)


def after_save(updates: int, state: Mapping) -> None:
    """Shows that a checkpoint was saved; ``state`` is what fairseq saves beside the model."""
    if _screen is not None:
        _screen.saved(updates, state.get("val_loss"), state.get("best"))


class Screen:
    """Lines of progress on standard output: one that is written over in a terminal, else one below another.

    Args:
        seconds: between two lines.
        max_update: where training ends; 0 where only its epochs are limited.
        metric: of validation, by which fairseq chooses the best checkpoint.
    """

    def __init__(self, seconds: float, max_update: int, metric: str = "loss"):
        self.seconds = seconds
        self.max_update, self.metric = max_update, metric
        self.terminal = sys.stdout.isatty()
        self.began: tuple[float, int] | None = None  # time and number of the first update
        self.shown = (0.0, 0)  # when a line was shown, and the words up to then
        self.words = 0
        if self.terminal:
            atexit.register(self._write, CLEAR)

    def update(self, updates: int, loss: float | None, words: float) -> None:
        """Shows the first update, the last one, and those between that are due."""
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
        self._line(" | ".join(parts), stays=not self.terminal)

    def saved(self, updates: int, found: float | None, best: float | None) -> None:
        """Shows a checkpoint, with the metric on the validation set where it was just computed."""
        parts = [self._count(updates)]
        if found is not None:
            parts.append(
                f"validation {self.metric} {found:.3f}{' (best)' if found == best else ''}"
            )
        self._line(" | ".join([*parts, "saved"]), stays=True)

    def _count(self, updates: int) -> str:
        of = f" of {self.max_update:,}" if self.max_update else ""
        return f"update {updates:,}{of}"

    def _line(self, text: str, stays: bool) -> None:
        text = f"  {text}"
        self._write((CLEAR if self.terminal else "") + text + ("\n" if stays else ""))

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # training goes on where nobody reads
            sys.stdout.write(text)
            sys.stdout.flush()


def duration(seconds: float) -> str:
    """Such as 40 s, 3 min 20 s or 5 h 07 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
