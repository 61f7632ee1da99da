"""``scripts/study.sh``: train and score all remaining methods and seeds, several in parallel."""

import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import check_plain, open_plain
from smoe_fairseq.host_memory import cores, machine_memory
from smoe_fairseq.locks import lock_folder
from smoe_fairseq.progress import progress
from smoe_fairseq.recipes.compare.report import write_report
from smoe_fairseq.recipes.datasets import Dataset, naming_settings
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.folders import Folders, default_seed, run_method, run_name
from smoe_fairseq.recipes.methods import has_strata, method_flags, tables
from smoe_fairseq.recipes.processes import ProcessGroups, environment, recipe, warn
from smoe_fairseq.recipes.program_flags import arguments, flag_values, parse_flags, value_of
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.study import results
from smoe_fairseq.recipes.training import identity
from smoe_fairseq.recipes.training.launcher import plan_launch, visible_gpus
from smoe_fairseq.recipes.training.train import plan

POLL_SECONDS = 1
LOG, LOCK = "study.log", "study.lock"
_RUN_MEMORY = 3 << 30  # bytes that a run on a CPU may need
_UPDATES = re.compile(rb"num_updates[=: ]+(\d+)")


@dataclass
class Run:
    """A method with a seed, to be trained for a number of updates."""

    dataset: Dataset
    method: str
    seed: int
    flags: tuple[str, ...]
    updates: int
    strata: bool  # see `has_strata`
    sharded: bool = False  # each rank saves its own experts
    reached: int = field(default=0, repr=False)
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return run_name(self.dataset, self.method, self.seed)

    @property
    def folder(self) -> Path:
        return Folders(self.dataset).runs / self.name

    @property
    def line(self) -> str:
        """The commands, which do not repeat complete training and evaluation."""
        run, settings = (self.dataset.name, self.method, "--seed", self.seed), self.dataset.settings
        given = {"batch": settings.batch or None, "precision": settings.precision or None}
        train = recipe("train", *run, *arguments(given), *self.flags)
        evaluate = recipe("evaluate", *run)
        after = results.commands(self.dataset, self.folder, self.strata, self.sharded)
        return " && ".join([train, evaluate, *after])

    def done(self) -> int:
        """The updates so far, according to the end of the log; never fewer than it said before."""
        check_plain(self.folder / "train.log")
        try:
            with open(self.folder / "train.log", "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 50_000))
                updates = _UPDATES.findall(log.read())
        except OSError:
            return self.reached
        if updates:  # a resumed run first logs its settings
            self.reached = max(self.reached, min(self.updates, int(updates[-1])))
        return self.reached


def study(dataset: Dataset, flags: Sequence[str]) -> None:
    """Train and score the runs that have no results; ``flags`` are methods, then flags of fairseq-train.

    Only one study runs in a folder at a time. When a run ends, its results are saved and the report is
    rewritten. If a run fails, the others continue.

    Raises:
        UsageError: a method is unknown, a seed is invalid, or a run failed.
        SystemExit: a signal stopped all runs; the next start resumes them.
    """
    runs = _runs(dataset, flags)
    folders, settings = Folders(dataset), dataset.settings
    if not settings.dry_run:
        folders.check_prepared()
    slots = _slots(settings)
    as_one = replace(settings, flags=settings.flags | {"GPUS": slots[0]["GPUS"]})
    one = replace(dataset, settings=as_one)
    # This reports invalid settings before any run.
    plans = {method: plan(one, method, runs[0].flags) for method in {r.method for r in runs}}
    for run in runs:
        launch, words, _ = plans[run.method]
        run.sharded = launch.processes > 1 and "--expert-parallel" in words

    # Of other seeds, too, which the report compares with these; earlier versions kept no flags.
    known, done = results.read(dataset), set()
    saved = (each.name for each in known if each.about.get("flags"))
    for name in {run.name for run in runs}.union(n for n in saved if run_method(n) in plans):
        launch, words, _ = plans[run_method(name)]
        if results.are_saved(dataset, name, words, launch.processes):
            done.add(name)
    left = [run for run in runs if run.name not in done]
    for method in {run.method for run in left}:
        with naming_settings(one, (f"methods.{method}", "train", "task"), flags), quietly():
            parse_flags("fairseq-train", plans[method][1])
    if left and folders.binary.exists():
        results.check_text(dataset, known)
    print(f"# {dataset.name}: {len(left)} of {len(runs)} runs are still to do", flush=True)
    if settings.dry_run:
        for run in left:
            print(run.line)
        return
    for run in left:  # these raise UsageError before the work
        results.summarize_starts(run.folder)
        trained = identity.record(run.folder).get("trained", {}).get("--max-update", 0)
        results.check_length(run.folder, float(trained), run.updates)
    results.folder_of(dataset).mkdir(parents=True, exist_ok=True)
    folders.runs.mkdir(parents=True, exist_ok=True)
    lock_folder(folders.runs, LOCK)  # before any start is recorded
    failed = _work(left, slots) if left else []
    if failed:
        with suppress(UsageError):  # there may be no results
            write_report(dataset)
        names, log = ", ".join(run.name for run in failed), failed[0].folder / LOG
        count = f"{len(failed)} of {len(left)} runs failed ({names})"
        raise UsageError(f"{count}: {log} and so on say why; the same command tries them again")
    write_report(dataset)


def _runs(dataset: Dataset, words: Sequence[str]) -> list[Run]:
    first_flag = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    methods, flags = words[:first_flag] or dataset.study, tuple(words[first_flag:])
    for flag in {"--save-dir", "--log-file"} & flag_values(flags).keys():
        raise UsageError(f"{flag} in a study, whose runs have folders: expected --run-dir")
    methods = methods or list(tables().get(dataset.name, {}).get("rows", {}))
    methods = dict.fromkeys(methods)  # without duplicates
    if not methods:
        raise UsageError(f"{dataset.name} has no methods to study: name them after it")
    runs = []
    seeds = dataset.settings.seeds or (default_seed(dataset),)
    for seed in seeds:  # all methods with the first seed come first
        for method in methods:
            recipe = dataset.train | method_flags(method, dataset)
            typed = flag_values(flags).get("--max-update", "")
            updates = int(typed if typed.isdecimal() else value_of(recipe, "max-update", 0))
            runs.append(Run(dataset, method, seed, flags, updates, has_strata(recipe)))
    return runs


def _work(left: list[Run], slots: dict[int, dict[str, str]]) -> list[Run]:
    """Train and evaluate the runs; returns those that failed."""
    failed, running, new = [], {}, False
    waiting, before = deque(left), sum(run.done() for run in left)
    total = sum(run.updates for run in left) - before
    with ProcessGroups() as groups, progress("study", total, "updates") as advance:
        while (waiting or running) and not groups.received:
            for slot in [s for s in slots if s not in running]:
                if waiting:
                    run = running[slot] = waiting.popleft()
                    _start(groups, run, slots[slot])
            if new and running:  # after the last run the report is written anyway
                try:
                    write_report(left[0].dataset)
                except Exception as error:  # a bad report must not end hours of training
                    warn(f"the report is to be made anew: {error}")
                new = False
            time.sleep(POLL_SECONDS)
            before, last = sum(run.done() for run in left), before
            advance(before - last)
            for slot, run in list(running.items()):
                if (status := run.process.poll()) is not None and not groups.received:
                    del running[slot]
                    count = len(left) - len(waiting) - len(running)
                    if status:
                        warn(f"{run.name} failed: {run.folder / LOG}")
                    elif _save(run):
                        new = True
                        known, trained = scores.read(run.folder), run.dataset.directions
                        scored = {d: score for d, score in known.items() if d in trained}
                        bleu = f"BLEU {scores.mean_points(scored):.2f}"
                        mean = f"{bleu} over {len(scored)} directions"
                        print(f"# {run.name}: {mean} ({count} of {len(left)} runs)", flush=True)
                        continue
                    failed.append(run)
    return failed


def _save(run: Run) -> bool:
    """Save the results; warns and returns False if that fails."""
    try:
        results.save(run.dataset, run.name, run.line)
    except (UsageError, OSError, ValueError) as error:
        warn(f"{run.name} is trained and scored, and its results cannot be kept: {error}")
        return False
    return True


def _slots(settings: Settings) -> dict[int, dict[str, str]]:
    """The slots for parallel runs, with the environment variables of each.

    Without a GPU there are ``JOBS`` slots, by default as many as cores and memory allow. With GPUs there is
    one slot with all of them, or ``JOBS`` slots that divide them. If there are more slots than GPUs, slots
    share a GPU, of which a small model leaves most idle. Slots divide the cores, unless ``OMP_NUM_THREADS``
    is set.
    """
    launch = plan_launch(settings, ())
    fit = (machine_memory() or 1 << 62) // _RUN_MEMORY
    slots = settings.jobs or (max(1, min(cores(), fit)) if launch.cpu else 1)
    threads = str(settings.omp_num_threads or max(1, cores() // slots))
    if launch.cpu:
        return dict.fromkeys(range(slots), {"GPUS": "0", "JOBS": "1", "OMP_NUM_THREADS": threads})
    if slots == 1:
        return {0: {"GPUS": str(launch.gpus), "JOBS": ""}}
    gpus, environments = visible_gpus(launch.gpus), {}
    for i in range(slots):
        share = gpus[i::slots] or [gpus[i % len(gpus)]]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(share), "GPUS": str(len(share))}
        environments[i] = visible | {"JOBS": "", "OMP_NUM_THREADS": threads}
    return environments


def _start(groups: ProcessGroups, run: Run, variables: dict[str, str]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    run.sharded = run.sharded and variables["GPUS"] != "1"  # slots may have different numbers
    results.record_start(run.folder, variables)
    variables = environment(run.dataset.settings) | variables
    with open_plain(run.folder / LOG, append=True) as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        run.process = groups.start(["bash", "-c", run.line], variables, **output)
