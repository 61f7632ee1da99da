"""Which part of the package may import which: no arrow upwards, no circle, nothing heavy at the bottom.

All imports are read, those within functions too, without running anything.
"""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import smoe_fairseq

PACKAGE = Path(smoe_fairseq.__file__).parent
ROOT = PACKAGE.name

# Layers, lowest first, and what each may import besides itself. `ROOT` itself is the package's
# ``__init__.py``, which only the topmost import: for the version and the path.
LAYERS = {
    "errors": set(),
    "ending": {"errors"},
    "files": {"errors"},
    "locks": {"errors", "files"},
    "progress": set(),
    "journal": {"errors", "files"},
    "flags": {"errors"},
    "forms": {"errors", "files"},
    "subwords": {"errors", "files", "forms"},
    "host_memory": set(),
    "languages": set(),
    "plugins": {"errors"},
    "compat": {"errors", "files", "forms", "plugins"},
    "modules": set(),
    "translate": {
        *("errors", "files", "flags", "forms", "host_memory", "journal", "languages"),
        *("modules", "subwords"),
    },
    "models": {
        *("compat", "errors", "flags", "host_memory", "modules", "translate"),
    },
    "criterions": {"errors", "flags", "models", "modules"},
    "huggingface": {"errors", "files", "forms", "modules", "subwords"},
    "checkpoints": {
        *("compat", "errors", "files", "flags", "forms", "host_memory", "huggingface"),
        *("models", "modules", "subwords", "translate"),
    },
    "training": {
        *("checkpoints", "compat", "criterions", "ending", "errors", "files", "flags"),
        *("host_memory", "languages", "locks", "models", "modules", "progress", "subwords"),
        "translate",
    },
    "analysis": {
        *(ROOT, "checkpoints", "compat", "errors", "files", "flags", "forms", "models"),
        *("languages", "modules", "progress", "subwords", "translate"),
    },
    "serve": {
        *("analysis", "errors", "files", "flags", "forms", "host_memory"),
        *("languages", "models", "translate"),
    },
}
for top in ("recipes", "cli"):  # these import all below them
    LAYERS[top] = {ROOT, *LAYERS}
LAYERS[ROOT] = {"compat"}

# The one list of names of higher layers: what the plugin adds to fairseq, imported only with it.
NAMED_BY_COMPAT = (Path("compat/__init__.py"), "ADDITIONS")
WITHOUT_FAIRSEQ = (
    "plugins",
    *("ending", "errors", "files", "flags", "forms", "host_memory", "huggingface"),
    *("languages", "locks", "modules", "progress", "subwords"),
)
# At import time: the start-up hook waits for them.
STANDARD_LIBRARY_ONLY = ("errors", "files", "forms", "locks")


def violations(package: Path) -> list[str]:
    """One sentence per violation, in a package folder of the name `ROOT`."""
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        layer = layer_of(path)
        if layer not in LAYERS:
            found.append(f"{path} is of no layer")
            continue
        for line, name, _, at_once in imports(ast.parse(file.read_text("utf-8")), path):
            top, _, rest = name.partition(".")
            if top == ROOT:
                used = layer_of(Path(*rest.split(".")).with_suffix(".py")) if rest else ROOT
                if used != layer and used not in LAYERS[layer]:
                    found.append(f"{path}:{line} imports {name}, which is not below {layer}")
            elif layer in WITHOUT_FAIRSEQ and top in ("fairseq", "fairseq_cli"):
                found.append(f"{path}:{line} imports {name}, and {layer} does without")
            elif layer in STANDARD_LIBRARY_ONLY and at_once and top not in sys.stdlib_module_names:
                found.append(f"{path}:{line} imports {name} at once, not in a function")
    return found


def circle(package: Path) -> list[str]:
    """Files that import each other in a circle, in its order; empty if there is none."""
    files = {
        ".".join([ROOT, *path.with_suffix("").parts]).removesuffix(".__init__"): path
        for path in (file.relative_to(package) for file in package.rglob("*.py"))
    }
    graph = {}
    for module, path in files.items():
        found = imports(ast.parse((package / path).read_text("utf-8")), path)
        used = (n if f"{n}.{a}" not in files else f"{n}.{a}" for _, n, a, _ in found)
        graph[module] = {name for name in used if name in files and name != module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def layer_of(path: Path) -> str:
    """``cost`` for ``cost.py`` and for ``cost/table.py``; `ROOT` for the package's own door."""
    return ROOT if path == Path("__init__.py") else path.parts[0].removesuffix(".py")


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[int, str, str, bool]]:
    """(line, module, name from it or "", whether it is imported together with the file) of each import.

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
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            # What is taken from the package itself are its parts.
            is_root = source == ROOT
            names = [
                (f"{source}.{a.name}", "") if is_root else (source, a.name) for a in node.names
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if module.startswith(f"{ROOT}.") and module.replace(".", "").isidentifier():
                names = [(module, "")] if node not in left_out else []
        for name, attribute in names:
            yield node.lineno, name, attribute, node not in later


def test_the_package_keeps_its_layers():
    assert violations(PACKAGE) == []
    assert circle(PACKAGE) == []


def test_the_layers_are_those_of_contributing_and_each_imports_only_lower_ones():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8")
    lines = text.partition("smoe_fairseq/\n")[2].partition("configs/")[0].splitlines()
    order = [n for line in lines for n in line.strip().partition("  ")[0].split()][::-1]
    assert [name for name in LAYERS if name != ROOT] == order
    for number, name in enumerate(order):
        assert LAYERS[name] <= {ROOT, *order[:number]}


def test_no_file_but_those_of_the_gates_names_a_gate():
    """Neither a gate's class nor, beside the word gate, its name as text."""
    from smoe_fairseq.modules.gates import GATES

    names = re.compile(rf"gate\b.{{0,20}}(?<![\w-])({'|'.join(GATES)})(?![\w-])")
    classes = {kind.__name__ for kind in GATES.values()}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        if path.parts[:2] == ("modules", "gates"):
            continue
        tree = ast.parse(file.read_text("utf-8"))
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.alias):
                assert (getattr(node, "id", None) or node.name) not in classes, path
            elif isinstance(node, ast.Compare | ast.Constant) and node not in docs:
                assert not names.search(ast.unparse(node)), f"{path}:{node.lineno}"


WRONG = {  # a file, and where the sentence points
    "modules/gate.py": ("def f():\n    from smoe_fairseq.errors import UsageError", ":2"),
    "models/size.py": ("from ..training import options", ":1"),
    "checkpoints/write.py": ("from smoe_fairseq import analysis", ":1"),
    "analysis/inputs.py": ("from smoe_fairseq.recipes.datasets import load_dataset", ":1"),
    "training/start.py": (
        "import importlib\nimportlib.import_module('smoe_fairseq.recipes.training.identity')",
        ":2",
    ),
    "compat/patches.py": ("ADDITIONS = ('smoe_fairseq.models:add',)", ":1"),
    "modules/experts.py": ("class Experts:\n    def f(self):\n        import fairseq.utils", ":3"),
    "files.py": (
        "def f():\n    import torch\ntry:\n    import yaml\nexcept ImportError:\n    pass",
        ":4",
    ),
    "tools/new.py": ("", ""),
}


def made(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        file = folder / ROOT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return folder / ROOT


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(tmp_path, name):
    source, place = WRONG[name]
    (found,) = violations(made(tmp_path, {name: source}))
    assert found.startswith(f"{name}{place} ")


def test_a_circle_is_found(tmp_path):
    files = {
        "models/a.py": "from smoe_fairseq.models import b, c",
        "models/b.py": "def f():\n    from smoe_fairseq.models.c import g",
        "models/c.py": "import smoe_fairseq.models.a",
        "models/__init__.py": "from smoe_fairseq.models.a import x",
    }
    found = circle(made(tmp_path, files))
    assert found[0] == found[-1] and {*found} <= {f"{ROOT}.models.{name}" for name in "abc"}
