"""The start-up hook, which patches fairseq when it is first imported.

fairseq has to be patched before its first line runs, long before it reads ``--user-dir``. So setup.py
installs two files next to the package: ``smoe_fairseq.pth``, a line that Python runs whenever it starts,
and a copy of this file as ``_smoe_fairseq_startup``. The line adds a finder to ``sys.meta_path`` that calls
``patch_fairseq`` when fairseq is imported. It imports this file only then, since an import would slow down
the start of every program.
"""

import importlib.machinery
import importlib.util
import sys


def patch_fairseq():
    """Install the patches, before the import of fairseq continues by the spec that this returns."""
    for part in ("errors", "files", "forms", "compat"):
        module = load(".".join(("smoe_fairseq", part)))
    return module.WaitingFinder.find_spec("fairseq") if module and module.install() else None


def load(name: str):
    """Load a module of ``smoe_fairseq`` without importing ``smoe_fairseq``.

    The parent must not be in ``sys.modules``: fairseq accepts a ``--user-dir`` only if no package of that
    name has been imported from another place. Returns None if the package is missing (its checkout was
    moved, for example), so that fairseq still works.
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
