"""``scripts/study.sh``: train and score all remaining methods and seeds, several in parallel."""

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain, lock_folder, open_plain
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.recipes.config import Dataset, flag_values, has_strata, method_flags, tables
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.folders import Folders, run_name, seeds_of
from smoe_fairseq.recipes.processes import (
    ProcessGroups,
    dry_run,
    environment,
    step,
    variables,
    warn,
    whole_number,
)
from smoe_fairseq.recipes.study import results
from smoe_fairseq.recipes.study.report import write_report
from smoe_fairseq.recipes.training.launcher import cores, launch, visible_gpus
from smoe_fairseq.recipes.training.train import plan

POLL_SECONDS = 1
REPORT_SECONDS = 600  # between two lines on what is running, unless there is a terminal
LOG, LOCK = "study.log", "study.lock"
_MEMORY = 3 << 30  # bytes that a run on a CPU may take
_UPDATES = re.compile(rb"num_updates[=: ]+(\d+)")


@dataclass
class Run:
    """A method with a seed; ``updates`` is how many updates it is trained for."""

    dataset: Dataset
    method: str
    seed: int
    flags: tuple[str, ...]
    updates: int
    strata: bool  # whether the model has several strata at which tokens may stop
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return run_name(self.dataset, self.method, self.seed)

    @property
    def folder(self) -> Path:
        return Folders(self.dataset.name).run(self.name)

    @property
    def line(self) -> str:
        """The commands; training and evaluation that are complete are not repeated."""
        steps = [
            step("train", self.dataset.name, self.method, *self.flags),
            step("evaluate", self.dataset.name, self.method),
        ]
        if self.strata:
            steps += results.commands(self.dataset, self.folder)
        return " && ".join(steps)

    def done(self) -> int:
        """The updates so far, according to its log."""
        check_plain(self.folder / "train.log")
        try:
            with open(self.folder / "train.log", "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 50_000))
                found = _UPDATES.findall(log.read())
        except OSError:
            return 0
        return min(self.updates, int(found[-1])) if found else 0


def study(dataset: Dataset, flags: Sequence[str]) -> None:
    """Train and score the runs that have no results; ``flags`` are methods, then flags of fairseq-train.

    One study at a time works in a folder. Whenever a run ends, its results are kept and the report is
    written again. The other runs go on if one fails.

    Raises:
        UsageError: a method or a seed is unknown, or a run failed.
        SystemExit: a signal stopped all runs; the next start resumes them.
    """
    runs = _runs(dataset, flags)
    left = [run for run in runs if not results.are_saved(dataset, run.name, run.flags)]
    folders = Folders(dataset.name)
    if not dry_run():
        folders.check_prepared(dataset.pairs)
    slots = _slots()
    with variables({"GPUS": slots[0]["GPUS"]}):
        for method in {run.method for run in left}:  # what a run would refuse is refused before any
            plan(dataset, method, left[0].flags)
    print(f"# {dataset.name}: {len(left)} of {len(runs)} runs are left", flush=True)
    if dry_run():
        for run in left:
            print(f"SEED={run.seed} {run.line}")
        return
    for run in left:  # raises UsageError before the work rather than after it
        results.summarize_starts(run.folder)
    results.folder_of(dataset.name).mkdir(parents=True, exist_ok=True)
    folders.runs.mkdir(parents=True, exist_ok=True)
    lock_folder(folders.runs, LOCK)  # before anything is noted of a run
    failed = _work(left, slots) if left else []
    if failed:
        with suppress(UsageError):  # no run may be kept
            write_report(dataset)
        names, log = ", ".join(run.name for run in failed), failed[0].folder / LOG
        count = f"{len(failed)} of {len(left)} runs failed ({names})"
        raise UsageError(f"{count}: {log} and so on say why; the same command tries them again")
    write_report(dataset)


def _runs(dataset: Dataset, words: Sequence[str]) -> list[Run]:
    first_flag = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    methods, flags = words[:first_flag] or dataset.study, tuple(words[first_flag:])
    methods = methods or list(tables().get(dataset.name, {}).get("rows", {}))
    methods = dict.fromkeys(methods)  # each once
    if not methods:
        raise UsageError(f"{dataset.name} has no methods to study: name them behind it")
    runs = []
    for seed in seeds_of(dataset):  # all methods are trained with the first seed first
        for method in methods:
            given = dataset.train | method_flags(method, dataset)
            asked = flag_values(flags).get("--max-update", "")
            updates = int(asked if asked.isdecimal() else given.get("max-update", 0))
            runs.append(Run(dataset, method, seed, flags, updates, has_strata(given)))
    return runs


def _work(left: list[Run], slots: dict[int, dict[str, str]]) -> list[Run]:
    """Make the runs; returns those that failed."""
    from tqdm import tqdm

    failed, running, new = [], {}, False
    waiting = deque(left)
    total = sum(run.updates for run in left)
    news = time.monotonic()
    with (
        ProcessGroups() as groups,
        tqdm(total=total, unit=" updates", disable=not sys.stderr.isatty()) as bar,
    ):
        before = sum(run.done() for run in left)
        bar.initial = bar.n = before
        started = time.monotonic()
        while (waiting or running) and not groups.received:
            for slot in [s for s in slots if s not in running]:
                if waiting:
                    run = running[slot] = waiting.popleft()
                    _start(groups, run, slots[slot])
            if new and running:  # after the last run the report is written anyway
                try:
                    write_report(left[0].dataset)
                except Exception as error:  # the report can be made again, hours of training cannot
                    warn(f"the report is to be made anew: {error}")
                new = False
            time.sleep(POLL_SECONDS)
            updates = sum(run.done() for run in left)
            bar.update(updates - bar.n)
            for slot, run in list(running.items()):
                if (status := run.process.poll()) is not None and not groups.received:
                    del running[slot]
                    count = len(left) - len(waiting) - len(running)
                    if status:
                        warn(f"{run.name} failed: {run.folder / LOG}")
                    elif _keep(run):
                        new = True
                        _print_scores(run, count, len(left))
                        continue
                    failed.append(run)
            if bar.disable and time.monotonic() > news + REPORT_SECONDS:
                news = time.monotonic()
                _print_progress(running, updates, updates - before, total, news - started)
    return failed


def _keep(run: Run) -> bool:
    """Keep the results; returns False, with a warning, if that fails."""
    try:
        results.keep(run.dataset, run.name, f"SEED={run.seed} {run.line}")
    except (UsageError, OSError, ValueError) as error:
        warn(f"{run.name} is trained and scored, and its results cannot be kept: {error}")
        return False
    return True


def _slots() -> dict[int, dict[str, str]]:
    """The slots in which runs are trained side by side, with the environment variables of each.

    Without a GPU there are ``JOBS`` slots, by default as many as cores and memory allow. With GPUs there is
    one slot with all of them, or ``JOBS`` slots that divide them. More slots than GPUs share these: a small
    model leaves most of a GPU idle.
    """
    where = launch(())
    if where.cpu:
        fit = (machine_memory() or 1 << 62) // _MEMORY
        slots = whole_number("JOBS", least=1) or max(1, min(cores(), fit))
        threads = str(max(1, cores() // slots))
        return dict.fromkeys(range(slots), {"GPUS": "0", "JOBS": "1", "OMP_NUM_THREADS": threads})
    slots = whole_number("JOBS", least=1, default=1)
    if slots == 1:
        return {0: {"GPUS": str(where.gpus), "JOBS": ""}}
    gpus = visible_gpus(where.gpus)
    found = {}
    for i in range(slots):
        share = gpus[i::slots] or [gpus[i % len(gpus)]]
        found[i] = {"CUDA_VISIBLE_DEVICES": ",".join(share), "GPUS": str(len(share)), "JOBS": ""}
        found[i]["OMP_NUM_THREADS"] = str(max(1, cores() // slots))
    return found


def _start(groups: ProcessGroups, run: Run, variables: dict[str, str]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    results.note(run.folder, variables)
    variables = environment() | variables | {"SEED": str(run.seed)}
    with open_plain(run.folder / LOG, append=True) as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        run.process = groups.start(["bash", "-c", run.line], variables, **output)


def _print_scores(run: Run, count: int, total: int) -> None:
    found = scores.read(run.folder)
    bleu = scores.mean_bleu(found)
    mean = "no scores" if bleu is None else f"BLEU {bleu:.2f} over {len(found)} directions"
    print(f"# {run.name}: {mean} ({count} of {total} runs)", flush=True)


def _print_progress(running: dict[int, Run], updates: int, made: int, total: int, seconds: float):
    where = ", ".join(f"{run.name} {run.done()} of {run.updates}" for run in running.values())
    hours = ""
    if total > made > 0:
        hours = f", about {(total - updates) * seconds / made / 3600:.1f} h left"
    print(f"# {updates:,} of {total:,} updates{hours}; {where}", flush=True)
