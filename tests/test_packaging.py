"""Installing the package brings the start-up hook along: from a wheel, and in editable mode.

The installations go into a bare environment that sees the packages of this one, but not its `.pth`
files, so that nothing patches fairseq but what has been installed there.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from commands import run
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HOOK_FILES = {"smoe_fairseq.pth", "_smoe_fairseq_startup.py"}


@pytest.fixture
def source(tmp_path):
    """A copy of what is packaged."""
    folder = tmp_path / "source"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "smoe_fairseq", folder / "smoe_fairseq", ignore=unwanted)
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def bare(tmp_path):
    """The Python of a new environment without the hook, in which fairseq cannot be imported."""
    folder = tmp_path / "bare"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site_packages = execute(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    packages = sysconfig.get_path("purelib")
    (Path(site_packages) / "aaa.pth").write_text(packages)
    with pytest.raises(RuntimeError, match="mutable default"):
        execute(python, "import fairseq")
    return python


def execute(python, program):
    """Runs a program outside the checkout; returns its output or raises with its last words."""
    result = subprocess.run(
        [python, "-c", program], cwd=python.parent, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout.strip()


def install(python, *what):
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "-q")
    run("python", "-m", "pip", "--python", python, "install", *options, *what)


def wheel_of(source, folder):
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", folder)
    run("python", "-m", "pip", "wheel", *options, source)
    (wheel,) = folder.glob("smoe_fairseq-*.whl")
    return wheel


def check_installation(python, package):
    execute(python, "import fairseq.models")
    assert smoe(python, "path") == f"{package}\n"
    assert "smoe-2-2-2-2" in smoe(python, "cost", "--paper", "m4")


def smoe(python, *words):
    """What its ``smoe`` prints."""
    given = {name: value for name, value in os.environ.items() if name != "CONFIG_DIR"}
    options = {"cwd": python.parent, "env": given, "capture_output": True}
    words = [python.parent / "smoe", *words]
    return subprocess.run(words, check=True, text=True, **options).stdout


@pytest.mark.soak
def test_wheel(source, bare, tmp_path):
    wheel = wheel_of(source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        line = archive.read("smoe_fairseq.pth").decode()
    files = [path for path in source.glob("smoe_fairseq/**/*") if path.is_file()]
    packaged = {str(path.relative_to(source)) for path in files} | HOOK_FILES
    configs = source.glob("configs/**/*.yaml")
    packaged |= {f"smoe_fairseq/recipes/{path.relative_to(source)}" for path in configs}
    assert packaged == {name for name in names if ".dist-info/" not in name}
    assert line.count("\n") == 1 and line.startswith("import ")

    install(bare, wheel)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.rmtree(source)  # and with it the checkout
    check_installation(bare, bare.parent.parent / "lib" / python / "site-packages/smoe_fairseq")


@pytest.mark.soak
def test_editable_installation(source, bare):
    install(bare, "-e", source)
    check_installation(bare, source / "smoe_fairseq")

    # A checkout that has gone leaves fairseq as it was, and other programs undisturbed.
    source.rename(source.with_name("elsewhere"))
    assert execute(bare, "print('well')") == "well"
    with pytest.raises(RuntimeError, match="mutable default"):
        execute(bare, "import fairseq")


def test_the_constraints_suit_every_python_that_setup_py_admits():
    """Debian 12 has 3.11.2, and a version that needs 3.11.5 cannot be installed there."""
    installed = {canonicalize_name(dist.name): dist for dist in metadata.distributions()}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    found = 0
    for pin in map(Requirement, pins):
        dist = installed.get(canonicalize_name(pin.name))
        if dist and pin.specifier.contains(dist.version, prereleases=True):
            found += 1
            needed = SpecifierSet(dist.metadata["Requires-Python"] or "")
            assert "3.11.0" in needed, f"{pin} needs Python {needed}"
    assert found
