"""The start-up hook: mends fairseq at the moment it is first imported and does nothing before.

fairseq has to be mended before its own first line runs, long before it reads ``--user-dir``, and no
code of ours runs then. So setup.py installs a copy of this file beside the package, under the name
``_smoe_fairseq_startup``, and a one-line ``.pth`` file that imports it whenever Python starts. Each
start of Python pays for what stands here, hence no import but ``sys``.
"""

import sys


class StartupHook:
    """A meta-path finder that finds nothing itself; it waits for the first import of fairseq."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "fairseq":
            return None
        sys.meta_path.remove(cls)
        if compat := load_compat():
            compat.install()

        # Search again: the finders have changed under the search that called us.
        import importlib.util

        return importlib.util.find_spec(name)


def load_compat():
    """Loads ``smoe_fairseq.compat`` without its parent package and returns it.

    The parent stays out of ``sys.modules`` on purpose: fairseq takes a ``--user-dir`` only if no
    package of that name has been imported from another place. Returns None where the package is
    gone (a checkout that has been moved, say), which is no reason to break the user's fairseq.
    """
    name = "smoe_fairseq.compat"
    if name in sys.modules:
        return sys.modules[name]

    import importlib.machinery
    import importlib.util

    parent = importlib.util.find_spec("smoe_fairseq")
    folders = parent.submodule_search_locations if parent else None
    spec = importlib.machinery.PathFinder.find_spec(name, folders) if folders else None
    if spec is None:
        return None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.meta_path.insert(0, StartupHook)
