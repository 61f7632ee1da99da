"""Write and read the results of a study's runs: small text files in ``results/DATASET/RUN``."""

import csv
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import smoe_fairseq
from smoe_fairseq.analysis import training_log
from smoe_fairseq.analysis.training_log import UPDATES
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_text, whole_folder, write_whole
from smoe_fairseq.forms import read_json
from smoe_fairseq.recipes.compare.statistics import spearman
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.scores import Score
from smoe_fairseq.recipes.folders import (
    CONSOLIDATED,
    Folders,
    checkpoint_file,
    refuse_twice,
    run_method,
    run_seed,
    vocab_size,
)
from smoe_fairseq.recipes.pretrained import STARTED, started
from smoe_fairseq.recipes.processes import command
from smoe_fairseq.recipes.program_flags import flag_values, words_of
from smoe_fairseq.recipes.training import identity
from smoe_fairseq.recipes.training.train import data_arguments

FILE = "run.json"
CURVE = "curve.csv"
ROUTING = "routing.json"
STARTS_FILE = "starts.json"  # next to the checkpoints
ANALYSIS = "routing"  # next to the checkpoints: the output of `smoe analyze`
KEPT = "kept.log"  # next to the checkpoints: the validation of pairs that are not trained
EXPERTS = "experts_per_token"
COLUMNS = ("update", "training_nll", "validation_nll", EXPERTS, "words", "seconds")
MIN_COUNT = 10  # minimum occurrences of a token to use its mean requested capacity
_ABOUT = {"command": str, "commit": str, "machine": str, "versions": dict, "updates": int}
_ABOUT |= {"flags?": {str: str}, "dictionary?": (None, str), "limits?": (None, {str: str})}
_ABOUT |= {"kept_loss?": (None, float), "vocabulary?": (None, int), "settings?": dict}
_ABOUT |= {f"{identity.TEXT}?": (None, str), f"{identity.SELECTION}?": {str: str}}


def folder_of(dataset: Dataset) -> Path:
    """The data set's folder in ``RESULTS_DIR`` (results/)."""
    return dataset.settings.results_dir / dataset.name


# The commits and machines that trained a run.


def record_start(run: Path, variables: Mapping[str, str]) -> None:
    """Add this commit and machine to the run's starts; ``variables`` are the run's environment variables."""
    start, starts = {"commit": _commit(), "machine": _machine(variables)}, _starts(run)
    starts = starts if identity.is_saved(run) else []  # else it begins anew
    if start not in starts:
        write_whole(run / STARTS_FILE, json.dumps([*starts, start], indent=1) + "\n")


def summarize_starts(run: Path) -> dict[str, str]:
    """``commit`` and ``machine`` of all starts; with several machines, also ``untimed``."""
    starts = _starts(run)
    commits, machines = ([*dict.fromkeys(s[k] for s in starts)] for k in ("commit", "machine"))
    summary = {"commit": ", ".join(commits), "machine": ", then ".join(machines)}
    return summary | ({"untimed": "of two machines"} if len(machines) > 1 else {})


def _starts(run: Path) -> list[dict[str, str]]:
    file = run / STARTS_FILE
    advice = "delete it; only the next start will be recorded"
    return read_json(file, [{"commit": str, "machine": str}], advice) if file.exists() else []


def _commit() -> str:
    """The commit of the code, with "-dirty" if there are uncommitted changes."""
    git = {"cwd": Path(smoe_fairseq.__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
    changed = ("git", "status", "--porcelain", "--untracked-files=no", ".")
    try:
        commit = subprocess.check_output(("git", "rev-parse", "--short", "HEAD"), **git).strip()
        return commit + "-dirty" * bool(subprocess.check_output(changed, **git).strip())
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('smoe_fairseq')}"


def _machine(variables: Mapping[str, str]) -> str:
    """The hardware in words. Times are compared only between equal descriptions."""
    import torch

    if variables["GPUS"] != "0" and torch.cuda.is_available():
        return f"{variables['GPUS']} x {torch.cuda.get_device_name(0)}"
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:(.*)", info.read_text() if info.exists() else "", re.M)
    name = model[1].strip() if model else platform.processor()
    machine = f"{os.cpu_count()} cores of {name}"
    machine += f", {torch.backends.cpu.get_cpu_capability()}"  # decides how kernels round
    threads = variables.get("OMP_NUM_THREADS", "1")
    return machine if threads == "1" else f"{machine}, {threads} threads"


# Writing the results of a run that is trained and scored.


def are_saved(dataset: Dataset, name: str, words: Sequence[str], processes: int) -> bool:
    """Whether a run has results; raises UsageError if they were made with other settings than ``words``."""
    folder = folder_of(dataset) / name
    if not (folder / FILE).exists():
        return False
    about, method, data = _about(folder), run_method(name), Folders(dataset).binary
    limits = about.get("limits") or {"--max-update": str(about["updates"])}  # of older runs
    saved = {"method": method, "dictionary": about.get("dictionary"), "trained": limits}
    saved |= {"flags": about.get("flags", {}), identity.TEXT: about.get(identity.TEXT)}
    words = [_anywhere(dataset, word) for word in [*words, *started(dataset, words)]]
    difference = identity.other_settings(saved, words, processes, data)
    if difference is None and (flags := scores.other_search(dataset, folder)):
        difference = f"was evaluated with {flags}"
    now = _settings(dataset)
    other = [key for key, value in about.get("settings", now).items() if now.get(key) != value]
    if difference is None and other:
        difference = f"was made with other `{other[0]}` in {dataset.file}"
    own, chosen = about.get(identity.SELECTION), identity.selection(flag_values(words))
    if difference is None and own not in (None, chosen):  # earlier versions lack it
        shown = (" ".join(words_of(each)) or "none" for each in (own, chosen))
        difference = f"chose its best checkpoint by other flags ({', not '.join(shown)})"
    if (seed := run_seed(name, dataset)) != _seed(name, about, dataset):
        difference = f"was trained with another seed than {seed}"
    if difference:
        advice = "set --results-dir and --run-dir to other folders for a study with other settings"
        raise UsageError(f"{folder} {difference}: {advice}")
    return True


def check_text(dataset: Dataset, results: "Sequence[Result]") -> None:
    """Raise UsageError if one of the results is of a run on other text than there is now."""
    now = scores.test_checksums(dataset, dataset.directions)
    records = {result.folder: result.about for result in results}
    found = identity.other_text(records, Folders(dataset).binary)
    for result in results:
        if other := scores.different_tests(result.scores, now=now):
            found.setdefault(result.folder, f"was scored on other test sets ({', '.join(other)})")
    if found:
        folder, difference = next(iter(found.items()))
        advice = "set --results-dir to another folder for a study of other text"
        raise UsageError(f"{folder} {difference}: {advice}")


def check_length(run: Path, updates: float, most: float) -> None:
    """Raise UsageError if a run was trained for more updates than a study has; 0: no limit."""
    if 0 < most < updates:
        advice = f"give --max-update {updates:g}, or set --run-dir to another folder for the study"
        raise UsageError(f"{run} was trained for {updates:g} updates, not {most:g}: {advice}")


def _settings(dataset: Dataset) -> dict[str, dict]:
    """What decides which checkpoint is the best, and how translations are scored."""
    irrelevant, given = ("width", "metrics"), dataset.sacrebleu
    scoring = {n: v for n, v in given.items() if v is not None and n not in irrelevant}
    return {"validate": dataset.validation, "sacrebleu": scoring}


def save(dataset: Dataset, name: str, line: str) -> None:
    """Write the results of a run that ``line`` trained."""
    run = Folders(dataset).runs / name
    own = identity.record(run)
    flags = {name: _anywhere(dataset, value) for name, value in own.get("flags", {}).items()}
    log = run / "train.log"
    # An interruption repeats some updates: the last line counts.
    lines = training_log.read_lines(log)
    logged = {int(x[UPDATES]): x for x in lines if "nll_loss" in x and "wpb" in x}
    curve = _curve(logged, training_log.read_validations(log))
    if all(row["validation_nll"] is None for row in curve):
        raise UsageError(f"{log} has no validation loss, which the report of a study compares")
    limits, updates = own.get("trained"), curve[-1]["update"]
    check_length(run, updates, float((limits or {}).get("--max-update", 0)))
    validated = run / KEPT
    kept = re.findall(r"\| nll_loss (\S+)", read_text(validated)) if validated.exists() else []
    content = {
        "command": _anywhere(dataset, line),
        "flags": flags,
        "dictionary": own.get("dictionary"),
        "vocabulary": vocab_size(dataset),
        "limits": limits,
        **{name: own[name] for name in (identity.TEXT, identity.SELECTION) if name in own},
        "settings": _settings(dataset),
        **summarize_starts(run),
        "versions": {p: version(p) for p in ("torch", "fairseq", "sacrebleu")},
        "python": platform.python_version(),
        "updates": updates,
        EXPERTS: _experts_per_token(logged),
        "kept_loss": float(kept[-1]) if kept else None,  # bits per target token, on the test set
    }
    routing = routing_summary(run)
    with whole_folder(folder_of(dataset) / name, replace=True) as folder:
        shutil.copyfile(run / scores.FILE, folder / scores.FILE)
        with open(folder / CURVE, "w", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(curve)
        if routing is not None:
            (folder / ROUTING).write_text(json.dumps(routing, indent=1) + "\n", "utf-8")
        (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _anywhere(dataset: Dataset, text: str) -> str:
    """A text with the data set's folders as they are called by default: the same on any machine."""
    for folder, default in ((Folders(dataset).data, "data"), (Folders(dataset).runs, "runs")):
        text = text.replace(f"{folder}/", f"{default}/{dataset.name}/")
    return text


def _curve(logged: Mapping[int, dict[str, float]], validated: Iterable[dict]) -> list[dict]:
    """A row of `COLUMNS` for each update that was logged or validated.

    Losses are in bits per target token. Training loss and experts per token are means since the last line,
    target words and seconds totals since the start; seconds are computed from words per second.
    """
    rows: dict[int, dict] = defaultdict(lambda: dict.fromkeys(COLUMNS))
    for update, line in logged.items():
        rows[update] |= {"training_nll": line["nll_loss"], EXPERTS: line.get(EXPERTS)}
    for line in validated:
        if "nll_loss" in line:
            rows[int(line[UPDATES])]["validation_nll"] = line["nll_loss"]
    words, seconds, last = 0.0, 0.0, 0
    for update in sorted(rows):
        if line := logged.get(update):
            new = line["wpb"] * (update - last)
            words, last = words + new, update
            seconds += new / line["wps"] if line["wps"] else 0.0
        rows[update] |= {"update": update, "words": round(words), "seconds": round(seconds, 2)}
    return [rows[update] for update in sorted(rows)]


def _experts_per_token(logged: Mapping[int, Mapping[str, float]]) -> float | None:
    """The mean over all of training; None without experts."""
    lines = [(line[EXPERTS], line["wpb"]) for line in logged.values() if EXPERTS in line]
    return round(statistics.fmean(*zip(*lines)), 3) if any(words for _, words in lines) else None


def commands(dataset: Dataset, run: Path, strata: bool, sharded: bool) -> list[str]:
    """The commands on the test set: with strata for `routing_summary`, with ``keep`` for "kept_loss".

    ``sharded``: the evaluation has joined the experts of all ranks in one checkpoint.
    """
    checkpoint, lines = checkpoint_file(run, dataset.checkpoint), []
    every = dataset.all_directions
    tested = [*scores.test_checksums(dataset, every)] or every  # all in a dry run without text
    if sharded and checkpoint.parent == run:  # an average is one file already
        checkpoint = run / CONSOLIDATED / checkpoint.name
    if strata:
        analyze = ["smoe", "analyze", Folders(dataset).binary_path()]
        analyze += ["--path", checkpoint, "--gen-subset", "test", "--output", run / ANALYSIS]
        if dataset.keep or len(tested) < len(every):
            analyze += ["--lang-pairs", ",".join(tested)]
        lines = [command("rm", "-rf", run / ANALYSIS), command(*analyze)]
    kept = replace(dataset, pairs=dataset.keep).directions
    if kept := [direction for direction in kept if direction in tested]:
        words = data_arguments(dataset, kept)
        words += ["--path", str(checkpoint), "--valid-subset", "test", "--max-tokens", "4096"]
        lines.append(command("fairseq-validate", *words, output=run / KEPT))
    return lines


def routing_summary(run: Path) -> dict | None:
    """A summary of the analysis; None if there is none.

    Returns:
        By direction and layer ("encoder.1"): "requested_capacity", the mean over text tokens; and
        "rank_correlation", Spearman's correlation over token types between frequency rank in training (1 is
        the most frequent) and mean requested capacity.
    """
    folder = run / ANALYSIS
    if not folder.exists():
        return None
    requested, correlation = defaultdict(dict), defaultdict(dict)
    for direction, layer, row in _text_rows(folder / "blocks.csv"):
        requested[direction][layer] = float(row["requested_capacity"])
    types: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for direction, layer, row in _text_rows(folder / "tokens.csv"):
        if row["frequency_rank"] and int(row["occurrences"]) >= MIN_COUNT:
            numbers = float(row["frequency_rank"]), float(row["requested_capacity"])
            types[direction, layer].append(numbers)
    for (direction, layer), numbers in types.items():
        rho = spearman(*np.array(numbers).T) if len(numbers) > 2 else math.nan
        if not math.isnan(rho):  # NaN if all types request the same
            correlation[direction][layer] = round(rho, 4)
    return {"requested_capacity": dict(requested), "rank_correlation": dict(correlation)}


def _text_rows(file: Path) -> Iterator[tuple[str, str, dict]]:
    with open(file, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["kind"] == "text":
                yield row["direction"], f"{row['side']}.{row['layer']}", row


# Reading the results.


@dataclass(frozen=True)
class Result:
    """The results of one run."""

    name: str
    seed: int
    scores: dict[str, Score]
    curve: list[dict[str, float | None]]
    about: dict
    routing: dict | None = None  # from `routing_summary`
    folder: Path = Path()
    kept: Mapping[str, Score] = field(default_factory=dict)  # of directions that are not trained

    def is_paired(self, other: "Result") -> bool:
        """Whether one machine and torch, which decide how results round, trained both from one start."""
        mine, its = ((r.about["machine"], r.about["versions"].get("torch")) for r in (self, other))
        starts = {r.about.get("flags", {}).get(STARTED) for r in (self, other)}
        return mine == its and len(starts - {None}) < 2  # None: from random weights

    @property
    def validation(self) -> float:
        """The lowest validation loss, that of the scored checkpoint; NaN if the last one is not finite."""
        losses = [row["validation_nll"] for row in self.curve if row["validation_nll"] is not None]
        return min(filter(math.isfinite, losses)) if math.isfinite(losses[-1]) else math.nan

    @property
    def diverged(self) -> bool:
        """Whether the run ended with a loss that is not finite: a study leaves its seed out."""
        return math.isnan(self.validation)

    @property
    def logged(self) -> list[dict[str, float | None]]:
        """The rows of logged updates; none if the run was shorter than the log interval."""
        return [row for row in self.curve if row["training_nll"] is not None]

    @property
    def time(self) -> float:
        """Seconds of training per target token; 0 if unknown or not comparable ("untimed").

        The median over the lines of the log, to ignore validation and other delays.
        """
        logged = [] if self.about.get("untimed") else self.logged
        words, seconds = ([0, *(row[name] for row in logged)] for name in ("words", "seconds"))
        steps = zip(np.diff(words), np.diff(seconds), strict=True)
        times = [float(duration / number) for number, duration in steps if number > 0]
        return statistics.median(times) if times else 0.0


Systems = Mapping[str, Sequence[Result]]  # by method, a result for each seed


def read(dataset: Dataset) -> list[Result]:
    """The results of all runs, ordered by name; raises UsageError if two are of one method and seed."""
    folders = sorted(file.parent for file in folder_of(dataset).glob(f"*/{FILE}"))
    whole = [folder for folder in folders if folder.suffix not in (".partial", ".old")]
    results = [_read(folder, dataset) for folder in whole]
    refuse_twice({result.folder: result.seed for result in results})
    return results


def _seed(name: str, about: Mapping, dataset: Dataset) -> int:
    """That of a run's training; if its flags are unknown, that of its name."""
    given = about.get("flags", {}).get("--seed", "")
    return int(given) if given.isdecimal() else run_seed(name, dataset)


def _about(folder: Path) -> dict:
    return read_json(folder / FILE, _ABOUT)


def _read(folder: Path, dataset: Dataset) -> Result:
    about, scored = _about(folder), scores.read(folder)
    try:
        curve = [
            {name: float(row[name]) if row.get(name) else None for name in COLUMNS}
            for row in csv.DictReader(read_text(folder / CURVE).splitlines())
        ]
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{folder / CURVE} is no curve of a run ({error})") from None
    if any(row[name] is None for row in curve for name in ("update", "words", "seconds")):
        raise UsageError(f"{folder / CURVE} has an empty cell")
    file = folder / ROUTING
    routing = read_json(file) if file.exists() else None
    kept = {name: scored.pop(name) for name in dataset.kept_directions if name in scored}
    seed = _seed(folder.name, about, dataset)
    result = Result(folder.name, seed, scored, curve, about, routing, folder, kept)
    if not result.scores or all(row["validation_nll"] is None for row in curve):
        raise UsageError(f"{folder} has no scores or no validation loss: delete it and study again")
    return result


def means(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """The mean of the values of each key, in the keys' order."""
    values = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return {key: statistics.fmean(values[key]) for key in sorted(values)}


def mean_capacity(results: Iterable[Result]) -> dict[str, float] | None:
    """Mean requested capacity over directions and runs, by MoE layer as named by `moe_blocks`."""
    routings = (result.routing["requested_capacity"] for result in results if result.routing)
    layers = (item for each in routings for of in each.values() for item in of.items())
    return means((layer.replace(".", ".layer."), value) for layer, value in layers) or None


def mean_experts_per_token(results: Iterable[Result]) -> float | None:
    """Mean number of copies that were not dropped, per token and stop in training; None if unknown."""
    known = [r.about[EXPERTS] for r in results if r.about.get(EXPERTS) is not None]
    return statistics.fmean(known) if known else None
