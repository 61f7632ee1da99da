"""Which fairseq the mends are for, and the sentence to read where another one is installed."""

from importlib import metadata

from smoe_fairseq.system.errors import UsageError

FAIRSEQ_VERSION = "0.12.2"
REMEDY = f"run `pip install --no-deps fairseq=={FAIRSEQ_VERSION}`"


class FairseqVersionError(ImportError, UsageError):
    """fairseq is missing or has another version; the message is one sentence with the remedy."""


def is_installed() -> bool:
    """Whether there is a fairseq of any version."""
    try:
        metadata.version("fairseq")
    except metadata.PackageNotFoundError:
        return False
    return True


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
    """Raises FairseqVersionError unless the right fairseq is installed."""
    if sentence := problem():
        raise FairseqVersionError(sentence)
