"""Modules of other people, with gates, branches and losses; imported only if the user names them."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from traceback import extract_tb

from smoe_fairseq.errors import UsageError

VARIABLE = "SMOE_PLUGINS"  # of `smoe` commands and recipes: plugins separated as in PATH
imported: dict[str, None] = {}  # as they were named, in order


def import_plugin(name: str) -> None:
    """Import a folder with ``__init__.py``, a file, or a module by its name.

    Raises:
        UsageError: there is no such module, another one has its name, what it registers is taken, or its
            code raises an error.
    """
    if name in imported:
        return
    path = Path(name)
    file = (path / "__init__.py" if path.is_dir() else path).resolve()
    kinds = "a folder with __init__.py, a file that ends in .py, or a module that Python finds"
    is_path = path.is_dir() or path.suffix == ".py"
    lacks = f"{file} is missing; " * is_path + f"expected {kinds}"
    missing = UsageError(f"plugin {name}: {lacks}; several are joined by {os.pathsep!r}")
    try:
        if not is_path:
            importlib.import_module(name)
        elif file.is_file():
            _import_file(file, path.stem)
        else:
            raise missing
    except UsageError:
        raise
    except Exception as error:  # of the plugin's code
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            raise missing from None
        lines = [at.lineno for at in extract_tb(error.__traceback__) if at.filename == str(file)]
        kind = "" if isinstance(error, SyntaxError | ValueError) else f"{type(error).__name__}: "
        at = f" (line {lines[-1]})" if lines else ""
        raise UsageError(f"plugin {name}: {kind}{error}{at}") from error
    imported[name] = None


def _import_file(file: Path, module: str) -> None:
    other = sys.modules.get(module)
    if other is not None and getattr(other, "__file__", None) != str(file):
        raise ValueError(f"Python has another module {module}; expected another name")
    if other is not None:
        return
    is_package = file.name == "__init__.py"
    folder = [str(file.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(module, file, submodule_search_locations=folder)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[module])
    except BaseException:
        del sys.modules[module]
        raise


def import_named_plugins() -> None:
    """Import the plugins of the environment variable `VARIABLE`."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        import_plugin(name)
