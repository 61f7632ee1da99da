"""SMoE for fairseq: the door through which fairseq (``--user-dir``) and Python come in.

Importing the package registers its models and criterion with fairseq and opens safe checkpoint
loading. Nothing heavy is loaded for that: registration takes place once fairseq has been imported,
which for ``--user-dir`` is at once, and for a light command such as ``smoe path`` is never. The block
itself (``smoe_fairseq.modules``) needs no fairseq.
"""

import sys

from smoe_fairseq.compat import install, register, require_fairseq

__version__ = "0.2.0"

if "fairseq" in sys.modules:
    require_fairseq()
install()
register()
