"""What the start-up hook does when fairseq is first imported.

fairseq has to be patched before its own first line runs, long before it reads ``--user-dir``, and no
code of ours runs then. So setup.py installs, beside the package, ``smoe_fairseq.pth``, a line that
Python runs whenever it starts, and a copy of this file as ``_smoe_fairseq_startup``. The line puts
a finder in front of ``sys.meta_path`` that calls ``patch_fairseq`` when fairseq is imported, and
finds nothing itself. Until then it does not even import this file: in an empty program the first
import from disk would cost more than all the rest of the line.
"""

import importlib.machinery
import importlib.util
import sys


def patch_fairseq() -> None:
    """Installs the patches, so that the import of fairseq that is under way succeeds."""
    for part in ("errors", "files", "forms", "compat"):
        module = load(".".join(("smoe_fairseq", part)))
    if module:
        module.install()


def load(name: str):
    """Load a package within ``smoe_fairseq`` without importing ``smoe_fairseq``, and return it.

    The parent stays out of ``sys.modules`` on purpose: fairseq takes a ``--user-dir`` only if no
    package of that name has been imported from another place. Returns None where the package is
    gone (a checkout that has been moved, say), which is no reason to break the user's fairseq.
    """
    if name in sys.modules:
        return sys.modules[name]
    parent = importlib.util.find_spec(name.partition(".")[0])
    folders = parent.submodule_search_locations if parent else None
    spec = importlib.machinery.PathFinder.find_spec(name, folders) if folders else None
    if spec is None:
        return None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
