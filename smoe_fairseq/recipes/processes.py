"""Commands as child processes: folders, seeds, printing for a dry run, launching on several devices."""

import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import smoe_fairseq
from smoe_fairseq.errors import ENDING, UsageError
from smoe_fairseq.recipes.config import Dataset

CHILD_PATIENCE = (
    60  # seconds that the command's own children have after it; torchrun gives its workers 30
)


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command's exit status, negative where a signal ended it, once all of its group has ended.

    Raises:
        SystemExit: this process was sent one of `ENDING`, with the shell's status for it, 128 + n.
    """
    with Groups() as groups:
        process = groups.start(command, environment)
        status = process.wait()
    return status


STARTED = "SMOE_RECIPE"  # in the environment of what a recipe has started
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux alone
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """This process gets SIGTERM when its parent ends, by SIGKILL too, which no parent can pass on."""
    if _prctl is not None:
        _prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


class Groups:
    """Commands in groups of their own, to which signals to this process are passed on.

    A group has one address for the command, its pipe and all that they start. It cannot read from the
    terminal, and no command of a recipe does. At the end, where a signal was received or there was an error,
    by which they are terminated, all that is left of the groups is waited for.

    Raises:
        SystemExit: at the end, where this process was sent one of `ENDING`: the shell's status for it.
    """

    def __init__(self):
        self.groups: list[int] = []
        self.received: list[int] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options):
        """A `subprocess.Popen`, which ends with this process; ``options`` are more of its arguments."""
        options |= {"stdin": subprocess.DEVNULL, "process_group": 0, "preexec_fn": end_with_parent}
        process = subprocess.Popen(command, env=environment, **options)
        self.groups.append(process.pid)
        for number in list(self.received):  # what came while it was being started
            _send(process.pid, number)
        return process

    def __enter__(self):
        actions = dict.fromkeys(ENDING, self._pass_on) | {signal.SIGTSTP: self._pause}
        # What is ignored (nohup, a shell's background jobs) stays so, in the commands too.
        before = {n: signal.getsignal(n) for n in actions}
        self.before = {n: action for n, action in before.items() if action is not signal.SIG_IGN}
        for number in self.before:
            signal.signal(number, actions[number])
        return self

    def __exit__(self, error, *_):
        try:
            if error and not self.received:
                self._send_all(signal.SIGTERM)
            if error or self.received:
                for group in self.groups:
                    _wait_for(group)
        finally:
            for number, action in self.before.items():
                signal.signal(number, action)
        if self.received:
            raise SystemExit(128 + self.received[0])

    def _pass_on(self, number: int, _frame) -> None:
        self.received.append(number)
        self._send_all(number)

    def _pause(self, _number: int, _frame) -> None:
        # Ctrl-Z reaches this process alone, since the commands are in groups of their own.
        self._send_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send_all(signal.SIGCONT)

    def _send_all(self, number: int) -> None:
        for group in self.groups:
            _send(group, number)


def quietly_run(line: str, environment: Mapping[str, str]) -> None:
    """A line of shell that says nothing unless it fails; it gets the signals of this process's group.

    Raises:
        UsageError: it failed; with its last words.
    """
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        said = (done.stderr.splitlines() or ["it does not say why"])[-1]
        raise UsageError(f"{line.split()[0]} failed with exit status {done.returncode}: {said}")


def _send(group: int, number: int) -> bool:
    """Whether there was still a process in the group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter, on macOS, where all have ended
        return False
    return True


def _wait_for(group: int) -> None:
    """What the command has left behind ends too; what does not within a minute is killed."""
    deadline = time.monotonic() + CHILD_PATIENCE
    while _send(group, 0):
        if time.monotonic() > deadline:
            _send(group, signal.SIGKILL)
            return
        time.sleep(0.02)


# Shell commands: what `DRY_RUN=1` prints is what is run.

# Programs whose last words are a sentence about what went wrong.
_TELL = {"python", "smoe", "fairseq-train", "fairseq-generate"}
_TELL |= {"torchrun", "srun"}  # about how they themselves ended, below the former's


def command(*words: object, output: object = None) -> str:
    """One quoted line; ``output`` is the file that its standard output goes to."""
    line = shlex.join(str(word) for word in words)
    return line if output is None else f"{line} > {shlex.quote(str(output))}"


def pipe(*commands: str) -> str:
    """Commands that feed one another."""
    return " | ".join(commands)


def dry_run() -> bool:
    """Whether ``DRY_RUN`` asks to print commands only."""
    return os.environ.get("DRY_RUN", "0") not in ("", "0")


def environment() -> dict[str, str]:
    """Of the commands: the programs of this Python's environment come first on the path.

    Python's warnings are off, since fairseq, older than its libraries, draws dozens of them in each command;
    ``PYTHONWARNINGS=default`` shows them.
    """
    scripts = sysconfig.get_path("scripts")
    return {
        "PYTHONWARNINGS": "ignore",
        # libgomp's threads spin for long while they wait, and take the core from those they wait for as
        # soon as anything else runs on the machine: twice to ten times as slow. This is a short spin.
        "GOMP_SPINCOUNT": "2000",
        **os.environ,
        STARTED: "1",
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def run(lines: Iterable[str], variables: Mapping[str, str] | None = None) -> None:
    """Prints each comment and runs each other line; ``DRY_RUN`` prints these too, in place of that.

    The first command that fails ends the recipe, with its own words; those of programs that do not end
    in a sentence are given one. A signal that ends this process is passed on to all that the command has
    started, and waited for.

    Args:
        variables: more of the commands' environment.
    """
    for line in lines:
        comment = line.startswith("#")
        if comment or dry_run():
            print(line, flush=True)
            continue
        status = run_child(
            ["bash", "-o", "pipefail", "-c", line], environment() | dict(variables or {})
        )
        if status < 0:
            raise UsageError(f"{line.split()[0]} was stopped by {signal.Signals(-status).name}")
        if status and line.split()[0] in _TELL:
            raise SystemExit(status)
        if status:
            programs = " | ".join(part.split()[0] for part in line.split(" | "))
            raise UsageError(f"{programs} failed with exit status {status}, for the reason above")


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder that commands write to before they give it its name; where they fail, it is removed."""
    try:
        yield folder
    finally:
        if not dry_run():
            shutil.rmtree(folder, ignore_errors=True)


def report(message: str) -> None:
    """Tells the user, loudly and apart from the commands, what a recipe leaves out."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


# Where a recipe keeps its files: ``DATA_DIR`` and ``RUN_DIR``.


@dataclass(frozen=True)
class Folders:
    """The folders of one data set: below ``DATA_DIR`` (data/) and ``RUN_DIR`` (runs/)."""

    dataset: str

    @property
    def data(self) -> Path:
        return Path(os.environ.get("DATA_DIR") or "data") / self.dataset

    @property
    def download(self) -> Path:
        """Files as their publisher has them."""
        return self.data / "download"

    @property
    def raw(self) -> Path:
        """Plain text, ``{split}.{pair}.{language}``: what is trained on and scored against."""
        return self.data / "raw"

    @property
    def unpacked(self) -> Path:
        """What a data set needs of the archives in ``download``."""
        return self.data / "unpacked"

    @property
    def binary(self) -> Path:
        """Sentencepiece model, dictionary and binarised text; there only when complete."""
        return self.data / "bin"

    def binary_path(self, shards: int) -> str:
        """The binarised text as fairseq's commands take it: its folder, or ``shard0:shard1:...``.

        Args:
            shards: how many, where it is not there yet.
        """
        if self.binary.exists():
            return ":".join(map(str, shard_folders(self.binary)))
        return ":".join(str(self.binary / name) for name in shard_names(shards))

    @property
    def runs(self) -> Path:
        return Path(os.environ.get("RUN_DIR") or "runs") / self.dataset

    def run(self, method: str) -> Path:
        """Checkpoints, log, translations and scores of one method."""
        return self.runs / method


def shard_names(shards: int) -> tuple[str, ...]:
    """Folders below the binarised text; an only shard needs none."""
    return ("",) if shards == 1 else tuple(f"shard{i}" for i in range(shards))


def shard_folders(folder: Path) -> list[Path]:
    """Those that `shard_names` has called so in ``folder``, in order; without any, it is the only one."""
    shards = sum(1 for path in folder.glob("shard*") if path.is_dir())
    return [folder / name for name in shard_names(shards or 1)]


def tested_text(dataset: Dataset, direction: str, language: str) -> Path:
    """A direction's test set in one of its two languages, raw: what is translated, and scored against."""
    raw = Folders(dataset.name).raw
    return raw / f"test.{dataset.pair_of(direction)}.{language}"


def user_dir() -> str:
    """The plugin's path for ``--user-dir``, relative where that is possible."""
    path = Path(smoe_fairseq.__file__).parent
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# A run is a method and a seed: ``SEED=2 scripts/train.sh m4 moe`` has a folder of its own.

_NAME = re.compile(r"(?P<method>.+)\.seed-(?P<seed>\d+)")
LARGEST = 2**31 - 1


def seed_of(dataset: Dataset) -> int:
    """``SEED``, or the data set's own.

    Raises:
        UsageError: it is no number.
    """
    given = os.environ.get("SEED", "")
    return _number("SEED", given) if given else _own(dataset)


def several(dataset: Dataset) -> tuple[int, ...]:
    """``SEEDS``, with blanks between them, or the data set's own.

    Raises:
        UsageError: one is no number, or is there twice.
    """
    given = os.environ.get("SEEDS", "").split()
    found = tuple(_number("SEEDS", word) for word in given) or (_own(dataset),)
    if len(set(found)) < len(found):
        raise UsageError(f"SEEDS={' '.join(given)}: expected each seed once")
    return found


def _number(variable: str, given: str) -> int:
    if not (given.isascii() and given.isdecimal() and int(given) <= LARGEST):
        raise UsageError(f"{variable}={given}: expected a whole number from 0 to {LARGEST:,}")
    return int(given)


def run_name(dataset: Dataset, method: str) -> str:
    """The run's folder, of the seed that is chosen."""
    return name_of(dataset, method, seed_of(dataset))


def name_of(dataset: Dataset, method: str, seed: int) -> str:
    """A run's folder; that of the data set's own seed has just the method's name."""
    return method if seed == _own(dataset) else f"{method}.seed-{seed}"


def _own(dataset: Dataset) -> int:
    return dataset.train.get("seed", 1)  # fairseq's


def method_of(name: str) -> str:
    """Of a run's folder."""
    found = _NAME.fullmatch(name)
    return found["method"] if found else name


def seed_in(name: str) -> int | None:
    """Of a run's folder; None is the data set's own."""
    found = _NAME.fullmatch(name)
    return int(found["seed"]) if found else None


def number_in(dataset: Dataset, name: str) -> int:
    """The same, with the data set's own as a number."""
    found = seed_in(name)
    return _own(dataset) if found is None else found


def order(name: str) -> tuple[str, int]:
    """Runs of a method one after the other, that of the data set's own seed first."""
    found = _NAME.fullmatch(name)
    return (found["method"], int(found["seed"])) if found else (name, -1)


# The port over which torchrun's machines find one another: ``MASTER_ADDR`` and ``MASTER_PORT``.
#
# Where another program has that port, torchrun takes it for the first machine's torchrun and waits
# for its answer: for minutes, and a stack trace, or for ever. So it is looked at before.

PATIENCE = 5  # seconds in which a torchrun answers


def endpoint() -> tuple[str, int]:
    """Address and port, the same on all machines; a port that is none is a `UsageError`."""
    port = os.environ.get("MASTER_PORT") or "29500"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"MASTER_PORT={port}: expected a port, a number from 1 to 65535")
    return os.environ.get("MASTER_ADDR") or "localhost", int(port)


def check_port() -> None:
    """Raise UsageError where a program that is no torchrun has the port on this machine."""
    address, port = endpoint()
    if _is_taken(address, port) and not _is_torchruns(address, port):
        raise_if_taken()


def raise_if_taken() -> None:
    """Raise UsageError where any program has it, when none of this run's should."""
    address, port = endpoint()
    if _is_taken(address, port):
        raise UsageError(
            f"MASTER_PORT {port} is in use by another program on this machine: set MASTER_PORT to a free "
            "port, the same on all machines"
        )


def _is_taken(address: str, port: int) -> bool:
    """Whether this machine is the one that has the address, and somebody listens on the port."""
    if not _is_here(address):
        return False
    everywhere = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        with socket.create_server(("", port), **everywhere if socket.has_dualstack_ipv6() else {}):
            return False
    except OSError:
        return True


def _is_here(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as own:
                own.bind(place)
                return True
        except OSError:
            continue
    return False


def _is_torchruns(address: str, port: int) -> bool:
    """Such as that of a second "machine" on this one, started before."""
    from torch.distributed import TCPStore

    answered, asked = [], threading.Event()

    def ask() -> None:
        try:
            limit = timedelta(seconds=PATIENCE)
            TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
            answered.append(True)
        except RuntimeError:
            pass
        finally:
            asked.set()

    # torch's limit is not that of a silent program's answer: such a thread is left behind.
    threading.Thread(target=ask, daemon=True).start()
    asked.wait(PATIENCE + 1)
    return bool(answered)


# Where training runs: processes without or with one GPU, on one machine, or on several by SLURM.

LAUNCHERS = ("plain", "torchrun", "slurm")


@dataclass(frozen=True)
class Launch:
    """``gpus`` of each of ``nodes`` machines, one process on each; no GPU is one process too.

    cpu: whether the processes compute on the CPU, for want of GPUs or because they are told to.
    """

    launcher: str
    nodes: int
    gpus: int
    cpu: bool = False

    @property
    def processes(self) -> int:
        """Over all machines: what distributed training calls the world size."""
        return self.nodes * max(1, self.gpus)

    @property
    def meets_at_port(self) -> bool:
        """Whether ``MASTER_PORT`` is used; otherwise torchrun takes a free one."""
        return self.launcher == "slurm" or (self.launcher == "torchrun" and self.nodes > 1)

    def words(self, program: str) -> list[str]:
        """The command that starts a program in every process."""
        if self.launcher == "plain":
            return [program]
        each = ["--nproc-per-node", str(max(1, self.gpus)), "--no-python", program]
        if not self.meets_at_port:
            return ["torchrun", "--standalone", *each]
        address, port = endpoint()
        nodes = ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d"]
        nodes += ["--rdzv-id", os.environ.get("SLURM_JOB_ID") or "smoe"]
        start = ["torchrun", *nodes, "--rdzv-endpoint", f"{address}:{port}", *each]
        if self.launcher == "slurm":
            return [
                "srun",
                "--kill-on-bad-exit",
                "--nodes",
                str(self.nodes),
                "--ntasks-per-node",
                "1",
                *start,
            ]
        return start

    def flags(self) -> dict[str, object]:
        """What fairseq has to know of it."""
        flags = {"cpu": self.cpu}
        if self.cpu and self.launcher != "plain":
            flags["distributed-backend"] = "gloo"  # fairseq's default is for GPUs only
        if self.processes > 1:
            return flags | {"ddp-backend": "legacy_ddp"}
        # Without it fairseq would start a process for every GPU that it sees.
        return flags | {"distributed-world-size": 1}


def launch(extra: Sequence[str]) -> Launch:
    """From ``GPUS`` (those of this machine), ``NODES`` (1) and ``LAUNCHER`` (as these numbers need).

    ``GPUS`` processes compute on the CPU where ``extra`` flags say ``--cpu``, or where this machine has no
    GPU. A dry run and SLURM take it as it is given: they are for other machines.
    """
    gpus = whole_number("GPUS", least=0, default=None)
    nodes = whole_number("NODES", least=1, default=1)
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    several = nodes * gpus > 1 or nodes > 1
    launcher = os.environ.get("LAUNCHER") or ("torchrun" if several else "plain")
    if launcher not in LAUNCHERS:
        raise UsageError(f"LAUNCHER={launcher}: choose one of {', '.join(LAUNCHERS)}")
    if launcher == "plain" and several:
        raise UsageError(
            f"LAUNCHER=plain is for one process, not for NODES={nodes} with GPUS={gpus}: choose "
            "torchrun or slurm"
        )
    cpu = gpus == 0 or "--cpu" in extra
    if not cpu and launcher != "slurm" and not dry_run():
        cpu = not _has_gpus(gpus)
    return Launch(launcher, nodes, gpus, cpu)


def cores() -> int:
    """Those that this process may use, where the system tells: a batch system's job has not all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(count: int) -> list[str]:
    """The first ``count`` of them, as ``CUDA_VISIBLE_DEVICES`` names those that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return (named or [str(i) for i in range(count)])[:count]


def _has_gpus(wanted: int) -> bool:
    """Whether this machine has them; False where it has none at all."""
    import torch

    there = torch.cuda.device_count()
    if 0 < there < wanted:
        raise UsageError(
            f"GPUS={wanted}: this machine has {there}; expected at most as many, or --cpu behind the method"
        )
    return there > 0


def whole_number(name: str, least: int, default: int | None) -> int | None:
    """A variable of the environment.

    Raises:
        UsageError: it is no number, or less than ``least``.
    """
    given = os.environ.get(name) or None
    if given is None:
        return default
    if not given.isdecimal() or int(given) < least:
        raise UsageError(f"{name}={given}: expected a whole number of at least {least}")
    return int(given)
