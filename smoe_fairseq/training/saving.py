"""Saves between validations: every few minutes, and when a signal ends training.

All ranks agree after each update, so that they save the same one. The first signal lets the update, and a
validation that follows it, end; a second one ends the process at once.
"""

import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.util import register_after_fork

import torch
import torch.distributed as dist

from smoe_fairseq import locks
from smoe_fairseq.ending import ENDING
from smoe_fairseq.training import launch

logger = logging.getLogger(__name__)
_DUE = 1  # less than any 128 + signal
# From the second signal until the process is ended from outside of its main thread.
GRACE_SECONDS = 2


def end_by_parent(_) -> None:
    """Let a process that loads data, forked by multiprocessing, end by signals of its parent alone.

    `timeout`, SLURM and terminals send a signal to all processes of a run, but the update that ends, and a
    validation after it, need their data.
    """
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    def watch() -> None:
        while signal.sigwaitinfo(ENDING).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class SaveTimer:
    """When this rank wants to save.

    Args:
        minutes: the longest time without a save; 0: only signals count.
    """

    def __init__(self, minutes: float):
        register_after_fork(self, end_by_parent)
        self.minutes, self.saved, self.status = minutes, time.monotonic(), 0
        self.before: dict[int, object] = {}

    def listen(self) -> None:
        """Note signals from now on; those that are ignored (nohup) stay so. A second call changes nothing."""
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._note)
        received, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(received,), daemon=True).start()

    def _note(self, number: int, _frame) -> None:
        if not self.status:
            self.status = 128 + number
            return
        for each, action in self.before.items():
            signal.signal(each, action)
        signal.raise_signal(number)

    def _watch(self, received: int) -> None:
        """Tell of the first signal; end the process soon after the second.

        Python runs a handler only between instructions of the main thread, which may wait in vain for a rank.
        """
        first = True
        while number := os.read(received, 1):
            number = number[0]
            if number in self.before and not first:
                time.sleep(GRACE_SECONDS)
                os._exit(128 + number)
            if number in self.before:
                name, first = signal.Signals(number).name, False
                locks.tell("ends after a save")
                logger.warning(
                    f"{name}: training ends after this update, or validation; again: at once"
                )

    def wanted(self, device: torch.device) -> int:
        """0, `_DUE`, or 128 + the number of a signal: the largest of all ranks. A collective call."""
        due = self.minutes and time.monotonic() - self.saved >= 60 * self.minutes
        wanted = self.status or _DUE * bool(due)
        if not launch.is_distributed():
            return wanted
        wanted_1 = torch.tensor([wanted], device=device)
        dist.all_reduce(wanted_1, dist.ReduceOp.MAX)
        return int(wanted_1)


def save_in_time(validate_and_save, cfg, trainer, task, epoch_itr, subsets, end_of_epoch):
    """Save after an update if it is time; raises SystemExit, like a shell, if a signal ends training."""
    timer = trainer.save_timer
    if end_of_epoch and 0 < cfg.optimization.max_epoch <= epoch_itr.epoch:
        # fairseq would lose what it has trained since the last multiple of these intervals.
        cfg.checkpoint.save_interval = cfg.dataset.validate_interval = 1
    wanted, before = timer.wanted(trainer.device), timer.saved
    result = validate_and_save(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
    if wanted and timer.saved == before and not result[1]:
        save = sys.modules["fairseq.checkpoint_utils"].save_checkpoint
        save(cfg.checkpoint, trainer, epoch_itr, None)
    if wanted > _DUE and not result[1]:  # else training has ended anyway
        updates, folder = trainer.get_num_updates(), cfg.checkpoint.save_dir
        saved = not (cfg.checkpoint.no_save or cfg.checkpoint.no_last_checkpoints)
        file = os.path.join(folder, "checkpoint_last.pt")
        logger.warning(f"ended at update {updates}" + f", saved as {file}" * saved)
        raise SystemExit(wanted)
    return result
