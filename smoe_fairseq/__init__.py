"""SMoE for fairseq: the entry point of fairseq (``--user-dir``) and Python.

Importing the package registers its models and criterion with fairseq and enables safe checkpoint
loading. Registration happens when fairseq is imported: with ``--user-dir`` at once, in a light
command such as ``smoe path`` never. The block (``smoe_fairseq.modules``) does not need fairseq.
"""

import os
import signal
import sys

# Ctrl-C ends the imports of a command without a stack trace.
_program = os.path.basename(sys.argv[0]) if sys.argv else ""
if _program == "smoe" or _program == "-m" and f"{__name__}.recipes" in sys.orig_argv:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

from smoe_fairseq.compat import install, register, require_fairseq  # noqa: E402

__version__ = "0.2.0"

if "fairseq" in sys.modules:
    require_fairseq()
install()
register()
