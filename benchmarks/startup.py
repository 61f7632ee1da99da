"""What the start-up hook costs a Python that never imports fairseq: benchmarks/startup.py [RUNS]

Starts an empty program in two bare environments, alike but for the hook's two files, in turn, and
prints the median of each and their ratio. A third environment, like the first, shows the noise.
"""

import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

COMPAT = Path(__file__).resolve().parent.parent / "smoe_fairseq" / "compat"


def make_environment(folder: Path, hook: bool) -> Path:
    """A bare virtual environment; returns its Python."""
    venv.create(folder, symlinks=True)
    if hook:
        site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        shutil.copy(COMPAT / "smoe_fairseq.pth", site_packages)
        shutil.copy(COMPAT / "startup.py", site_packages / "_smoe_fairseq_startup.py")
    return folder / "bin" / "python"


def seconds(python: Path) -> float:
    start = time.perf_counter()
    subprocess.run([python, "-c", ""], check=True)
    return time.perf_counter() - start


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pythons = {
            name: make_environment(Path(folder, name), hook=name == "with hook")
            for name in ("without hook", "with hook", "without, again")
        }
        times = {name: [] for name in pythons}
        for _ in range(runs):
            for name, python in pythons.items():
                times[name].append(seconds(python))
    base = statistics.median(times["without hook"])
    for name, measured in times.items():
        median = statistics.median(measured)
        print(f"{name:16}{median * 1000:8.2f} ms   ratio {median / base:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
