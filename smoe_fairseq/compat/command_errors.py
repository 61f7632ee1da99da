"""One sentence for bad input of a fairseq command, where Python would print a stack trace.

For all errors of this package's kind, those of the mends among them, and for what fairseq itself raises on
purpose: plain exceptions ("The dataset is empty ..."), and files that the system does not hand out. With
``LOGLEVEL=DEBUG`` their stack traces are shown all the same. Anywhere else, in a notebook say, they are
exceptions like others.
"""

import errno
import logging
import sys
from types import ModuleType

from smoe_fairseq.system.errors import ends_with_sentence, of_usage, print_sentences

NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # these have sentences of their own (full_disk.py)
logger = logging.getLogger(__name__)


def end_commands_with_sentence(utils: ModuleType) -> None:
    """Most commands do their work in ``call_main``, or in processes of their own; others have the hook."""
    for name in ("call_main", "distributed_main"):
        setattr(utils, name, ends_with_sentence(getattr(utils, name), _sentence))
    print_sentences(_sentence)  # options are read before


def is_fairseq_command() -> bool:
    """Whether this process is one of fairseq's programs."""
    return any(name.startswith("fairseq_cli.") for name in sys.modules)


def _sentence(error: BaseException) -> str | None:
    if not is_fairseq_command():
        return None
    if words := of_usage(error):
        return words
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return None
    if isinstance(error, OSError) and error.filename and error.strerror:
        words = f"{error.filename}: {error.strerror}"
    elif isinstance(error, FileNotFoundError) or type(error) in (Exception, OSError):
        words = " ".join(str(error).split())
    if words:
        logger.debug("where it comes from:", exc_info=error)
    return words
