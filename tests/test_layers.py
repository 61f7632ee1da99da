"""Who may import whom: no arrow upwards, nothing heavy at the bottom, one name for one file.

All imports are read, those within functions too, without running anything.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import smoe_fairseq

PACKAGE = Path(smoe_fairseq.__file__).parent
ROOT = PACKAGE.name

# Layers, lowest first, and what each may import besides itself. `ROOT` itself is the package's door,
# ``__init__.py``, which only the topmost ask for: for the version and the place.
LAYERS = {
    "system": set(),
    "compat": {"system"},
    "settings": {"system"},
    "modules": set(),
    "models": {"modules", "system"},
    "criterions": {"models", "modules", "system"},
    "checkpoint": {"modules", "system"},
    "distributed": {"checkpoint", "models", "modules", "system"},
    "translation": {"models", "modules", "system"},
}
LAYERS["analysis"] = {ROOT, *LAYERS}
LAYERS["conversion"] = {"analysis", "checkpoint", "models", "modules", "settings", "system"}
LAYERS["serving"] = {"analysis", "models", "system", "translation"}
for top in ("recipes", "path", "cli"):
    LAYERS[top] = {ROOT, *LAYERS}
LAYERS[ROOT] = {"compat"}

# The one list of names of what lies higher: what the plugin adds to fairseq, imported only with it.
NAMED_BY_COMPAT = (Path("compat/__init__.py"), "ADDITIONS")
WITHOUT_FAIRSEQ = ("system", "modules")
STANDARD_LIBRARY_ONLY = ("system",)  # at import time: the start-up hook waits for it
MAY_SHARE_A_NAME = ("__init__.py", "__main__.py")
TOLD = {"modules": "nothing, nor fairseq", "system": "Python's own library"}
PICTURES = Path("analysis/figures")  # one for each thing that is drawn, under its name


def violations(package: Path) -> list[str]:
    """A sentence for each, of a package folder of the name `ROOT`."""
    found, names = [], defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        layer = layer_of(path)
        if layer not in LAYERS:
            found.append(f"{path} is of no layer")
            continue
        for line, name, at_once in imports(ast.parse(file.read_text("utf-8")), path):
            top, _, rest = name.partition(".")
            if top == ROOT:
                used = rest.partition(".")[0] or ROOT
                if used != layer and used not in LAYERS[layer]:
                    found.append(f"{path}:{line} imports {name}, which is not below {layer}")
            elif layer in WITHOUT_FAIRSEQ and top in ("fairseq", "fairseq_cli"):
                found.append(f"{path}:{line} imports {name}, and {layer} does without")
            elif layer in STANDARD_LIBRARY_ONLY and at_once and top not in sys.stdlib_module_names:
                found.append(f"{path}:{line} imports {name} at once, not in a function")
        if path.name not in MAY_SHARE_A_NAME and PICTURES not in path.parents:
            names[path.name].append(str(path))
    return found + [f"{' and '.join(p)} share a name" for p in names.values() if len(p) > 1]


def layer_of(path: Path) -> str:
    """``cost`` of ``cost.py`` or ``cost/table.py``; the door's is that of the package."""
    return ROOT if path == Path("__init__.py") else path.parts[0].removesuffix(".py")


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether it is imported together with the file) of each import in it.

    A module's name as a string counts too, as importlib and ``python -m`` take it, except in
    `NAMED_BY_COMPAT`.
    """
    file, exempt = NAMED_BY_COMPAT
    later = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    left_out = {
        node
        for statement in tree.body
        if path == file and isinstance(statement, ast.Assign)
        if [getattr(target, "id", None) for target in statement.targets] == [exempt]
        for node in ast.walk(statement)
    }
    parents = [ROOT, *path.parent.parts]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            # What is taken from the package itself are its parts.
            names = [f"{source}.{a.name}" if source == ROOT else source for a in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if module.startswith(f"{ROOT}.") and module.replace(".", "").isidentifier():
                names = [module] if node not in left_out else []
        for name in names:
            yield node.lineno, name, node not in later


def test_the_package_keeps_its_layers():
    assert violations(PACKAGE) == []


def test_contributing_tells_the_same():
    lines = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    told = [line[2:].split("  ") for line in lines if re.match(r"  \w+ {3}", line)]
    told = {name.strip(): next(filter(None, rest)).strip() for name, *rest in told}
    expected = {}
    for layer in reversed([layer for layer in LAYERS if layer not in (ROOT, "path")]):
        lower = ", ".join(sorted(LAYERS[layer])) or TOLD[layer]
        expected[layer] = "all below" if ROOT in LAYERS[layer] else lower
    expected["__init__"] = ", ".join(LAYERS[ROOT])
    assert list(told.items()) == list(expected.items())


WRONG = {
    "modules/gate.py": (
        "def f():\n    from smoe_fairseq.system.errors import UsageError",
        "modules/gate.py:2 imports smoe_fairseq.system.errors, which is not below modules",
    ),
    "models/size.py": (
        "from ..distributed import options",
        "models/size.py:1 imports smoe_fairseq.distributed, which is not below models",
    ),
    "checkpoint/write.py": (
        "from smoe_fairseq import analysis",
        "checkpoint/write.py:1 imports smoe_fairseq.analysis, which is not below checkpoint",
    ),
    "settings/dataset.py": (
        "import smoe_fairseq",
        "settings/dataset.py:1 imports smoe_fairseq, which is not below settings",
    ),
    "distributed/start.py": (
        "import importlib\nimportlib.import_module('smoe_fairseq.recipes.training.batch')",
        "distributed/start.py:2 imports smoe_fairseq.recipes.training.batch, which is not below distributed",
    ),
    "compat/version.py": (
        "ADDITIONS = ('smoe_fairseq.models:add',)",
        "compat/version.py:1 imports smoe_fairseq.models, which is not below compat",
    ),
    "modules/experts.py": (
        "class Experts:\n    def f(self):\n        import fairseq.utils",
        "modules/experts.py:3 imports fairseq.utils, and modules does without",
    ),
    "system/memory.py": (
        "def f():\n    import torch\ntry:\n    import yaml\nexcept ImportError:\n    pass",
        "system/memory.py:4 imports yaml at once, not in a function",
    ),
    "tools/new.py": ("", "tools/new.py is of no layer"),
}
RIGHT = {
    "compat/__init__.py": "from .version import a\nADDITIONS = (('fairseq', 'smoe_fairseq.models'),)",
    "recipes/training/batch.py": "import smoe_fairseq\nfrom smoe_fairseq.analysis.cost import count",
    "analysis/figures/cost.py": "from . import style\nimport matplotlib",
    "analysis/figures/style.py": "",
    "analysis/cost.py": "from fairseq import utils\n'''smoe_fairseq.recipes is above.'''",
    "cli.py": "COMMANDS = {'cost': 'smoe_fairseq.analysis.cost'}",
}


def made(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        file = folder / ROOT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return folder / ROOT


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(tmp_path, name):
    source, sentence = WRONG[name]
    assert violations(made(tmp_path, RIGHT | {name: source})) == [sentence]


def test_two_files_of_one_name_are_found(tmp_path):
    assert violations(made(tmp_path, RIGHT)) == []
    package = made(tmp_path, {"modules/rows.py": "", "recipes/tables/rows.py": ""})
    assert violations(package) == ["modules/rows.py and recipes/tables/rows.py share a name"]
