"""Packaging. CONTRIBUTING.md explains the start-up hook."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
PACKAGE = ROOT / "smoe_fairseq"

# The start-up hook, which goes to the root of the wheel, and so into site-packages. An editable installation
# also contains a copy of the module, which works after the checkout has moved.
STARTUP_FILES = {
    "smoe_fairseq.pth": PACKAGE / "compat" / "smoe_fairseq.pth",
    "_smoe_fairseq_startup.py": PACKAGE / "compat" / "startup.py",
}

# The recipes; an editable installation uses those of the checkout.
CONFIGS = {
    f"smoe_fairseq/recipes/configs/{path.relative_to(ROOT / 'configs').as_posix()}": path
    for path in sorted((ROOT / "configs").rglob("*.yaml"))
}


class BuildWithMore(build_py):
    """Adds the start-up files and the recipes to an ordinary wheel."""

    FILES = STARTUP_FILES | CONFIGS

    def run(self):
        super().run()
        if not self.editable_mode:
            for name, source in self.FILES.items():
                self.mkpath(str(Path(self._target(name)).parent))
                self.copy_file(str(source), self._target(name))

    def _target(self, name):
        return str(Path(self.build_lib, name))

    def get_outputs(self, include_bytecode=1):
        return super().get_outputs(include_bytecode) + [self._target(name) for name in self.FILES]


class EditableWheelWithHook(editable_wheel):
    """Adds the start-up files to an editable wheel, with any of setuptools' strategies."""

    def _select_strategy(self, name, tag, build_lib):
        return StrategyWithHook(super()._select_strategy(name, tag, build_lib))


class StrategyWithHook:
    """setuptools' strategy for an editable installation, plus the start-up files."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __enter__(self):
        self.strategy.__enter__()
        return self

    def __exit__(self, *error):
        return self.strategy.__exit__(*error)

    def __call__(self, wheel, files, mapping):
        self.strategy(wheel, files, mapping)
        for name, source in STARTUP_FILES.items():
            wheel.write(str(source), name)


def version():
    source = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]


readme = ROOT / "README.md"

setup(
    name="smoe-fairseq",
    version=version(),
    description="Stratified Mixture of Experts (SMoE) for machine translation: a fairseq plugin",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="The smoe-fairseq authors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["smoe_fairseq", "smoe_fairseq.*"]),
    package_dir={"": "."},
    package_data={
        "smoe_fairseq.analysis": ["report.html.jinja"],
        "smoe_fairseq.recipes": ["paper_tables.yaml", "phrasebook/*.tsv.xz"],
        "smoe_fairseq.compat": ["smoe_fairseq.pth"],
        "smoe_fairseq.serve": ["page/*"],
    },
    entry_points={"console_scripts": ["smoe = smoe_fairseq.cli:main"]},
    # Without fairseq 0.12.2, since current pip cannot install its requirements (hydra-core<1.1,
    # omegaconf<2.1). `make setup` runs `pip install --no-deps fairseq==0.12.2`.
    install_requires=[
        "torch>=2.6,<2.16",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "jinja2>=3.1,<4",
        "langcodes>=3.4,<4",
        "language-data>=1.3,<2",
        "lxml>=4.9",
        "numpy>=2,<3",
        "polib>=1.2,<2",
        "bitarray>=2.6",
        "cffi>=1.15.1",
        "fairscale>=0.4.13,<0.5",
        "pyyaml>=6.0.1",
        "regex>=2022.10.31",
        "sacrebleu>=2.3",
        "scipy>=1.13,<2",
        "sentencepiece>=0.2.1",
        "tabulate>=0.9,<1",
        "tqdm>=4.60",
    ],
    extras_require={
        "analysis": ["matplotlib>=3.9"],
        "export": ["safetensors>=0.4.3"],
        "datasets": ["datasets>=3", "zstandard>=0.22"],  # Hugging Face's data sets; .zst files
        "ctranslate2": ["ctranslate2>=4.6,<5"],  # 146 MB
        "huggingface": ["safetensors>=0.4.3", "transformers>=5,<6"],  # 160 MB
        "kernels": ["triton>=3.6; sys_platform == 'linux'"],  # part of torch for CUDA; 200 MB
        "serve": ["starlette>=0.40,<2", "uvicorn>=0.30,<1"],
        "subword-nmt": ["subword-nmt>=0.3.8,<0.4"],  # models of fairseq with @@
        "dev": [
            "mkdocs-material>=9.5,<10",
            "playwright>=1.45",  # drives an installed Chromium
            "pytest>=8",
            "pytest-xdist>=3",
            "ruff",
            "setuptools>=70",
            "tensorboard>=2.14",
        ],
        "dev-huggingface": ["accelerate>=1.1", "peft>=0.18"],  # peft needs transformers
    },
    cmdclass={"build_py": BuildWithMore, "editable_wheel": EditableWheelWithHook},
)
