"""One sentence for a full disk, where fairseq's commands end in a stack trace that names no file.

For fairseq 0.12.2 on any Python. fairseq-preprocess writes its data, fairseq-generate its translations. (What
training saves is written whole, see publish_checkpoints.py.) A log on that disk misses what it has no room
for, as Python's logging means it, but without a stack trace for every line; the terminal has them all.
"""

import logging
import sys
from types import ModuleType

from smoe_fairseq.system.errors import NO_ROOM

from .command_errors import is_fairseq_command

_PLACES = ("--destdir", "--results-path", "--save-dir")  # what commands call where they write to


def name_full_disk(utils: ModuleType) -> None:
    """fairseq-preprocess and fairseq-generate have no function of fairseq's around their work."""
    show_error, show_log_error = sys.excepthook, logging.Handler.handleError

    def print_sentence(kind, error, trace):
        if not _is_of_full_disk(error):
            return show_error(kind, error, trace)
        print(f"error: {_place(error)} cannot be written: {error.strerror}", file=sys.stderr)

    def handle(handler, record):
        if not _is_of_full_disk(sys.exc_info()[1]):
            show_log_error(handler, record)

    sys.excepthook, logging.Handler.handleError = print_sentence, handle


def _is_of_full_disk(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in NO_ROOM and is_fairseq_command()


def _place(error: OSError) -> str:
    """The file if it is known, which that of a failed write is not, or else what the user has named."""
    if error.filename:
        return error.filename
    words = [part for word in sys.argv for part in word.split("=", 1)]
    for flag, value in zip(words, words[1:]):
        if flag in _PLACES:
            return f"{flag} {value}"
    return "standard output"
