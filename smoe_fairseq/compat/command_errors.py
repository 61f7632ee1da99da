"""One sentence for bad input of a fairseq command, where Python would print a stack trace.

For all errors of this package's kind, those of the mends among them, and for what fairseq itself raises on
purpose (`smoe_fairseq.system.errors.of_command`). Anywhere else, in a notebook say, they are exceptions
like others.
"""

import sys
from types import ModuleType

from smoe_fairseq.system.errors import ends_with_sentence, of_command, print_sentences


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
    return "interrupted" if isinstance(error, KeyboardInterrupt) else of_command(error)
