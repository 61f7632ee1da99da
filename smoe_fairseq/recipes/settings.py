"""The settings of a recipe: flags, whose defaults are environment variables. They are read here alone."""

import math
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import filled, flag_of

LARGEST_SEED = 2**31 - 1
# The value of a text ("": not set), after what names it in a message: "--gpus " or "DRY_RUN=".
Parse = Callable[[str, str], Any]


def _whole(least: int, default: int | None = None, most: float = math.inf) -> Parse:
    def parse(said: str, text: str) -> int | None:
        if not text:
            return default
        if text.isascii() and text.isdecimal() and least <= int(text) <= most:
            return int(text)
        bounds = f"of at least {least}" if math.isinf(most) else f"from {least} to {most:,}"
        raise UsageError(f"{said}{text}: expected a whole number {bounds}")

    return parse


def _path(said: str, text: str) -> Path | None:
    path = Path(text).expanduser() if text else None
    return path.absolute() if text.startswith("-") else path  # else it looks like a flag


def _folder(default: str) -> Parse:
    def parse(said: str, text: str) -> Path:
        path = _path(said, text or default)
        if path.exists() and not path.is_dir():
            raise UsageError(f"{said}{path}: expected a folder")
        return path

    return parse


def _configs(said: str, text: str) -> Path:
    # Next to an installed package, a folder ``configs`` is not ours.
    installed = Path(__file__).parent / "configs"
    checkout = Path(__file__).parents[2] / "configs"
    folder = Path(text).expanduser() if text else installed if installed.is_dir() else checkout
    if not (folder / "datasets").is_dir():
        advice = f"set {said.strip()} to the folder with datasets/ and methods/"
        raise UsageError(f"{folder} holds no recipes: {advice}")
    return folder


def _seeds(said: str, text: str) -> tuple[int, ...]:
    seeds: list[int] = []
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", word)
        first, last = map(int, (match[1], match[2] or match[1])) if match else (0, -1)
        if not first <= last <= min(LARGEST_SEED, first + 999):
            numbers = f"up to 1,000 numbers from 0 to {LARGEST_SEED:,}, such as 1,2 or 1-8"
            raise UsageError(f"{said}{word}: expected {numbers}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{said}{text}: expected each seed once")
    return tuple(seeds)


_count = _whole(1)
_seed = _whole(0, None, LARGEST_SEED)


def _threads(said: str, text: str) -> int | None:
    return _count(said, text.partition(",")[0])  # OpenMP's list has those of inner levels, too


@dataclass
class Setting:
    """One of `Settings`: its flag, the variable that is its default, and how the text is read."""

    metavar: str  # of the flag's value; "" for a switch, which sets `value`
    help: str  # "" for a variable without a flag
    default: str  # in words
    parse: Parse = lambda said, text: text
    name: str = ""  # the flag; by default the variable in lower case
    value: str = "1"

    def __set_name__(self, owner: type, name: str) -> None:
        self.variable, self.name = name.upper(), self.name or flag_of(name)

    def __get__(self, settings: "Settings | None", owner: type) -> Any:
        if settings is None:
            return self
        given = settings.flags.get(self.variable)
        said = f"{self.name} " if self.metavar else f"{self.variable}="
        return self.parse(said, given or settings.variables.get(self.variable, ""))

    def add_to(self, parser: ArgumentParser) -> None:
        kind = {"action": "store_const", "const": self.value}
        if self.metavar:
            kind = {"metavar": self.metavar, "type": filled}
        words = f"{self.help} (default: ${self.variable}, else {self.default})"
        parser.add_argument(self.name, dest=self.variable, help=words, **kind)


@dataclass(frozen=True)
class Settings:
    """What a recipe's flags and, where they are not given, environment variables say.

    An attribute is read, and raises UsageError for invalid text, when it is used: a command does not
    refuse a variable that it does not use. Without arguments, all have their defaults. ``flags`` are by
    variable; programs that the recipe starts inherit them.
    """

    flags: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    gpus = Setting("N", "GPUs of each machine; 0: the CPU", "all of this machine", _whole(0))
    nodes = Setting("N", "machines", "1", _whole(1, 1))
    launcher = Setting("NAME", "plain, torchrun or slurm", "torchrun for several processes")
    seed = Setting("N", "random seed; each seed has its own folder", "the data set's", _seed)
    seeds = Setting("N,N", "random seeds of each method, as 1,2 or 1-8", "the data set's", _seeds)
    batch = Setting("SIZE", "tokens per update: a number, or a name of the data set", "its own")
    precision = Setting("TYPE", "auto, bf16, fp16 or fp32", "the data set's, mostly auto")
    jobs = Setting("N", "processes (study: runs) in parallel", "as cores and memory allow", _count)
    workers = Setting("N", "processes of each step", "all cores", _count)
    pretrained = Setting("PATH", "model to fine-tune: run, checkpoint or folder", "the data set's")
    raw = Setting("PATH", "folder of text; for m4, m15, libreoffice: or archive", "download", _path)
    data_dir = Setting("DIR", "folder of prepared data sets", "data", _folder("data"))
    run_dir = Setting("DIR", "folder of runs", "runs", _folder("runs"))
    results_dir = Setting("DIR", "folder of a study's results", "results", _folder("results"))
    config_dir = Setting("DIR", "folder of data sets and methods", "the checkout's", _configs)
    comet = Setting("PROGRAM", "path of comet-score, to add COMET scores", "no COMET")
    comet_model = Setting("NAME", "model of COMET", "Unbabel/wmt22-comet-da")
    forecast = Setting(
        "", "do not forecast the memory", "forecast", _whole(0, 1, 1), "--no-forecast", "0"
    )
    dry_run = Setting("", "print the commands and run nothing", "run them", _whole(0, 0, 1))
    omp_num_threads = Setting("", "", "cores, divided by runs", _threads)
    # Where the machines of a run meet.
    master_addr = Setting("", "", "localhost")
    master_port = Setting("", "", "29500", _whole(1, 29500, 2**16 - 1))

    @classmethod
    def read(cls, flags: Mapping[str, str] | None = None) -> "Settings":
        """The settings of this command by its flags, and of the environment."""
        names = {each.variable for each in vars(cls).values() if isinstance(each, Setting)}
        return cls(flags or {}, {name: os.environ[name] for name in names & os.environ.keys()})


SETTINGS = [each for each in vars(Settings).values() if isinstance(each, Setting) and each.help]
