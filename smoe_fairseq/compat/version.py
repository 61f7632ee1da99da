"""Which fairseq the patches are for, and the sentence to read where another one is installed."""

import sys
from importlib import metadata

FAIRSEQ_VERSION = "0.12.2"
REMEDY = f"run `pip install --no-deps fairseq=={FAIRSEQ_VERSION}`"


class FairseqVersionError(ImportError):
    """fairseq is missing or has another version; the message is one sentence with the remedy."""


def problem() -> str | None:
    """One sentence on what is wrong with the installed fairseq, or None if nothing is."""
    try:
        found = metadata.version("fairseq")
    except metadata.PackageNotFoundError:
        return f"smoe_fairseq needs fairseq {FAIRSEQ_VERSION}, which is not installed: {REMEDY}"
    if found != FAIRSEQ_VERSION:
        return f"smoe_fairseq needs fairseq {FAIRSEQ_VERSION}, but {found} is installed: {REMEDY}"
    return None


def require_fairseq() -> None:
    """Raises FairseqVersionError unless the right fairseq is installed.

    Where nobody catches the error, the user reads its sentence alone, without a stack trace.
    """
    sentence = problem()
    if sentence is None:
        return
    previous_hook = sys.excepthook

    def print_sentence_only(kind, error, trace):
        if isinstance(error, FairseqVersionError):
            print(error, file=sys.stderr)
        else:
            previous_hook(kind, error, trace)

    sys.excepthook = print_sentence_only
    raise FairseqVersionError(sentence)
