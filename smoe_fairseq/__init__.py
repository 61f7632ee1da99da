"""SMoE for fairseq: the entry point of fairseq (``--user-dir``) and Python.

Importing the package registers its models and criterion with fairseq and enables safe checkpoint
loading. Registration happens when fairseq is imported: with ``--user-dir`` at once, in a light
command such as ``smoe path`` never. The block (``smoe_fairseq.modules``) does not need fairseq.
"""

import sys

from smoe_fairseq.compat import install, register, require_fairseq

__version__ = "0.2.0"

if "fairseq" in sys.modules:
    require_fairseq()
install()
register()
