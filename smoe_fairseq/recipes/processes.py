"""Commands as child processes: printing, running and stopping them."""

import math
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from smoe_fairseq.errors import ENDING, UsageError, end_with_parent

STARTED = "SMOE_RECIPE"  # set in the environment of every command that a recipe starts
PATIENCE = 60  # seconds for a stopped command's processes to end; torchrun gives its workers 30
PYTHON = ("python", "-P")  # -P: no module of the current folder is imported
# Programs that explain their failure in a sentence of their own.
_TELL = {"python", "smoe", "fairseq-train", "fairseq-generate", "torchrun", "srun"}


def command(*words: object, output: object = None) -> str:
    """The words as one quoted shell command, with its standard output sent to the file ``output``."""
    line = shlex.join(str(word) for word in words)
    return line if output is None else f"{line} > {shlex.quote(str(output))}"


def step(name: str, *words: object) -> str:
    """The command that runs a step of a recipe (commands.py)."""
    return command(*PYTHON, "-m", "smoe_fairseq.recipes", name, *words)


def dry_run() -> bool:
    """Whether ``DRY_RUN`` asks to print commands and run none."""
    return os.environ.get("DRY_RUN", "0") not in ("", "0")


def report(message: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def whole_number(
    name: str, least: int, default: int | None = None, most: float = math.inf, given: str = ""
) -> int | None:
    """The value of an environment variable, or one ``given`` in it; raises UsageError out of the bounds."""
    if not (given := given or os.environ.get(name, "")):
        return default
    if given.isascii() and given.isdecimal() and least <= int(given) <= most:
        return int(given)
    bounds = f"of at least {least}" if math.isinf(most) else f"from {least} to {most:,}"
    raise UsageError(f"{name}={given}: expected a whole number {bounds}")


def environment() -> dict[str, str]:
    """The environment of commands; programs beside this Python come first on the path.

    Python's warnings are off, since fairseq causes dozens; ``PYTHONWARNINGS=default`` shows them.
    """
    return {
        "PYTHONWARNINGS": "ignore",
        # libgomp's threads spin while they wait. On a busy machine, a long spin makes a run two to ten
        # times slower.
        "GOMP_SPINCOUNT": "2000",
        **os.environ,
        STARTED: "1",
        "PYTHONSAFEPATH": "1",
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}",
    }


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and what it starts, within the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run(lines: Iterable[str], variables: Mapping[str, str] | None = None) -> None:
    """Print each comment and run each other line with bash; a dry run only prints all lines.

    Args:
        variables: added to the commands' environment.

    Raises:
        UsageError: a command failed without a sentence of its own, or a signal ended it.
        SystemExit: a command failed with a sentence of its own; or this process received a signal
            (status 128 + its number), passed it on to the command, and the command has ended.
    """
    for line in lines:
        if line.startswith("#") or dry_run():
            print(line, flush=True)
            continue
        with Groups() as groups:
            shell = ["bash", "-o", "pipefail", "-c", line]
            status = groups.start(shell, environment() | dict(variables or {})).wait()
        program = line.split()[0]
        if status < 0:
            raise UsageError(f"{program} was stopped by {signal.Signals(-status).name}")
        if status and program in _TELL:
            raise SystemExit(status)
        if status:
            programs = " | ".join(part.split()[0] for part in line.split(" | "))
            raise UsageError(f"{programs} failed with exit status {status}, for the reason above")


def run_quietly(line: str) -> None:
    """Run a line with bash without showing what it prints.

    Raises:
        UsageError: it failed; the message ends with the last line of its standard error.
    """
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        said = (done.stderr.splitlines() or ["it does not say why"])[-1]
        raise UsageError(f"{line.split()[0]} failed with exit status {done.returncode}: {said}")


class Groups:
    """Commands in process groups of their own; signals to this process are passed on to them.

    After a signal or an error, leaving the context waits until all processes of the groups have ended: an
    error sends them SIGTERM, and `PATIENCE` seconds later they are killed. The commands have no standard
    input.

    Raises:
        SystemExit: on leaving, if this process received one of `ENDING`; the status is 128 + its number.
    """

    def __init__(self):
        self.groups: list[int] = []
        self.received: list[int] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options):
        """Start a command; ``options`` are further arguments of `subprocess.Popen`, which it returns."""
        options |= {"stdin": subprocess.DEVNULL, "process_group": 0, "preexec_fn": end_with_parent}
        process = subprocess.Popen(command, env=environment, **options)
        self.groups.append(process.pid)
        for number in list(self.received):  # signals that arrived while it was being started
            _send(process.pid, number)
        return process

    def __enter__(self):
        # Ignored signals (nohup, background jobs of a shell) stay ignored, also in the commands.
        before = {number: signal.getsignal(number) for number in ENDING}
        self.before = {n: action for n, action in before.items() if action is not signal.SIG_IGN}
        for number in self.before:
            signal.signal(number, self._pass_on)
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

    def _send_all(self, number: int) -> None:
        for group in self.groups:
            _send(group, number)


def _send(group: int, number: int) -> bool:
    """Send a signal; returns whether the group still had a process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, when all have ended
        return False
    return True


def _wait_for(group: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while _send(group, 0):
        if time.monotonic() > deadline:
            _send(group, signal.SIGKILL)
            return
        time.sleep(0.02)
