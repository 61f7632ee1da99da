"""Print, run and stop commands."""

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from smoe_fairseq.ending import ENDING, end_with_parent
from smoe_fairseq.errors import UsageError
from smoe_fairseq.plugins import VARIABLE, imported
from smoe_fairseq.recipes.settings import Settings

STARTED_BY_RECIPE = "SMOE_RECIPE"  # variable that is set for every command of a recipe
TIMEOUT_SECONDS = 60  # until a stopped command is killed; torchrun gives its workers 30
PYTHON = ("python", "-P")  # -P: no module of the current folder is imported
_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}  # variables of a launched process
# Programs that print the reason for their failure in one sentence.
_EXPLAINING = {"python", "smoe", "fairseq-train", "fairseq-generate", "torchrun", "srun"}


class CommandError(UsageError):
    """A command failed or was stopped, and has not said why."""


def command(*words: object, output: object = None) -> str:
    """The words as one quoted shell command, with its standard output sent to the file ``output``.

    The command ``smoe`` reads no data set, so it gets the plugins that this process has imported.
    """
    line = shlex.join(str(word) for word in words)
    if imported and os.path.basename(words[0]) == "smoe":
        line = f"{VARIABLE}={shlex.quote(os.pathsep.join(imported))} {line}"
    return line if output is None else f"{line} > {shlex.quote(str(output))}"


def recipe(name: str, *words: object) -> str:
    """The command that runs a recipe or a step of one (commands.py)."""
    return command(*PYTHON, "-m", "smoe_fairseq.recipes", name, *words)


def warn(message: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def environment(settings: Settings) -> dict[str, str]:
    """The environment of commands; the programs of this Python's environment come first on the path.

    Python's warnings are off, since fairseq causes dozens; ``PYTHONWARNINGS=default`` shows them. What
    another launcher has set, such as that of a container, does not make the command one of its ranks.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _RANK}
    return {
        "PYTHONWARNINGS": "ignore",
        **inherited,
        **settings.flags,
        STARTED_BY_RECIPE: "1",
        "PYTHONSAFEPATH": "1",
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def run(lines: Iterable[str | Callable], settings: Settings, variables: Mapping = {}) -> None:
    """Print comments, call steps (`commands.Step`), run other lines with bash; a dry run only prints all.

    Raises:
        CommandError: a signal ended a command, or it failed and is not one of those that explain why.
        SystemExit: a command failed and explained why; or this process received a signal (status 128 + its
            number), passed it on to the command, and the command has ended.
    """
    for line in lines:
        if settings.dry_run or str(line).startswith("#"):
            print(line, flush=True)
            continue
        if callable(line):
            line()
            sys.stdout.flush()  # before what the next command prints
            continue
        with ProcessGroups() as groups:
            shell = ["bash", "-o", "pipefail", "-c", line]
            status = groups.start(shell, environment(settings) | variables).wait()
        program = next(word for word in shlex.split(line) if "=" not in word)
        if status < 0:
            raise CommandError(f"{program} was stopped by {signal.Signals(-status).name}")
        if status and program in _EXPLAINING:
            raise SystemExit(status)
        if status:
            programs = " | ".join(part.split()[0] for part in line.split(" | "))
            raise CommandError(f"{programs} failed with exit status {status}, for the reason above")


def run_quietly(line: str, settings: Settings) -> None:
    """Run a line with bash; if it fails, raise UsageError with the last line of its standard error."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env=environment(settings),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it does not say why"])[-1]
        raise UsageError(f"{line.split()[0]} failed with exit status {done.returncode}: {reason}")


class ProcessGroups:
    """Runs each command in its own process group, and passes signals to this process on to the groups.

    After a signal or an error, the context waits until all processes of the groups have ended. An error
    sends them SIGTERM, and after `TIMEOUT_SECONDS` they are killed. The commands have no standard input.
    Ctrl-Z (SIGTSTP) stops the groups together with this process until it continues.

    Raises:
        SystemExit: on leaving, if this process received one of `ENDING`; the status is 128 + its number.
    """

    def __init__(self):
        self.groups: list[subprocess.Popen] = []  # their first processes
        self.received: list[int] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options):
        """Start a command and return its `subprocess.Popen`; ``options`` are further arguments of that."""
        options |= {"stdin": subprocess.DEVNULL, "process_group": 0, "preexec_fn": end_with_parent}
        process = subprocess.Popen(command, env=environment, **options)
        self.groups.append(process)
        for number in list(self.received):  # signals that arrived meanwhile
            _send(process, number)
        return process

    def __enter__(self):
        # Ignored signals (nohup, a shell's background jobs) stay ignored, in the commands too.
        handlers = dict.fromkeys(ENDING, self._pass_on) | {signal.SIGTSTP: self._suspend}
        before = {number: signal.getsignal(number) for number in handlers}
        self.before = {n: action for n, action in before.items() if action is not signal.SIG_IGN}
        for number in self.before:
            signal.signal(number, handlers[number])
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

    def _suspend(self, *_) -> None:
        self._send_all(signal.SIGTSTP)
        signal.raise_signal(signal.SIGSTOP)
        self._send_all(signal.SIGCONT)

    def _send_all(self, number: int) -> None:
        for group in self.groups:
            _send(group, number)


def _send(group: subprocess.Popen, number: int) -> bool:
    """Send a signal; returns whether the group still had a process."""
    group.poll()  # else one that has ended would stay in it
    try:
        os.killpg(group.pid, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, when all have ended
        return False
    return True


def _wait_for(group: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while _send(group, 0):
        if time.monotonic() > deadline:
            _send(group, signal.SIGKILL)
            return
        time.sleep(0.02)
