"""A command and all that it starts, which is sent the signals that this process is sent."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.signals import ENDING

PATIENCE = (
    60  # seconds that the command's own children have after it; torchrun gives its workers 30
)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command's exit status, negative where a signal ended it, once all of its group has ended.

    Raises:
        SystemExit: this process was sent one of `ENDING`, with the shell's status for it, 128 + n.
    """
    with Groups() as groups:
        process = groups.start(command, environment)
        status = process.wait()
    return status


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
        """A `subprocess.Popen`; ``options`` are more of its arguments."""
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, process_group=0, **options
        )
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
    deadline = time.monotonic() + PATIENCE
    while _send(group, 0):
        if time.monotonic() > deadline:
            _send(group, signal.SIGKILL)
            return
        time.sleep(0.02)
