"""What a study keeps of each run."""

import csv
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

import smoe_fairseq
from smoe_fairseq.analysis.training_log import UPDATES, read_lines
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_folder, write_whole
from smoe_fairseq.recipes import folders, identity, scores
from smoe_fairseq.recipes.config import Dataset, arguments, given_flags
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.launcher import visible_gpus
from smoe_fairseq.recipes.processes import command
from smoe_fairseq.recipes.scores import Score
from smoe_fairseq.recipes.statistics import spearman

STARTS_FILE = "starts.json"


def note(folder: Path, variables: Mapping[str, str]) -> None:
    """Adds this commit and this machine, of a start with these ``variables`` of the environment.

    Those of an earlier start stay: a run may be begun by one and finished by another.
    """
    now = {"commit": _commit(), "machine": _machine(variables)}
    before = _read_start(folder)
    if now not in before:
        write_whole(folder / STARTS_FILE, json.dumps([*before, now], indent=1) + "\n")


def summary_of_starts(folder: Path) -> dict[str, str]:
    """``commit`` and ``machine`` of all starts, and ``untimed`` where its times are of two machines."""
    starts = _read_start(folder)
    commits, machines = (
        list(dict.fromkeys(s[key] for s in starts)) for key in ("commit", "machine")
    )
    found = {"commit": ", ".join(commits), "machine": ", then ".join(machines)}
    return found | ({"untimed": "of two machines"} if len(machines) > 1 else {})


def _read_start(folder: Path) -> list[dict[str, str]]:
    file = folder / STARTS_FILE
    if not file.exists():
        return []
    try:
        starts = json.loads(file.read_text("utf-8"))
        return [{key: str(start[key]) for key in ("commit", "machine")} for start in starts]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{file} does not say with what the run was started: delete it, and the run is said to be of "
            "its next start alone"
        ) from None


def _commit() -> str:
    """With "-dirty" behind it where the code is not that of the commit."""
    folder = Path(smoe_fairseq.__file__).parent
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", folder, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "."),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('smoe_fairseq')}"
    return f"{commit}-dirty" if changes else commit


def _machine(variables: Mapping[str, str]) -> str:
    """Runs that differ in it are not compared in time."""
    import torch

    gpus = variables.get("GPUS")
    if gpus != "0" and torch.cuda.is_available():
        count = int(gpus) if gpus else len(visible_gpus(torch.cuda.device_count()))
        return f"{count} x {torch.cuda.get_device_name(0)}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    machine = f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"
    threads = variables.get("OMP_NUM_THREADS", "1")
    return machine if threads == "1" else f"{machine}, {threads} threads"


# Where the capacity of a run goes, in the numbers that claims are about, as ``smoe analyze`` finds
# them.

FOLDER = "routing"  # beside the checkpoints
MIN_COUNT = 10  # occurrences of a token whose mean is looked at


def commands(dataset: Dataset, run: Path) -> list[str]:
    """What makes the analysis of the test set, anew."""
    checkpoint = run / f"checkpoint_{dataset.checkpoint}.pt"
    data = Folders(dataset.name).binary_path(dataset.shards)
    analyze = ("smoe", "analyze", data, "--path", checkpoint, "--gen-subset", "test")
    return [
        command("rm", "-rf", run / FOLDER),
        command(*analyze, "--output", run / FOLDER),
    ]


def summary(run: Path) -> dict | None:
    """What is kept of it, with layers as "encoder.1"; None where there is none.

    Returns:
        By direction and layer: "requested_capacity", the mean over tokens that are text, and
        "rank_correlation", Spearman's, over types, of a type's rank by frequency in training (1 is the most
        frequent) and its mean requested capacity. Within a direction, since languages differ in both.
    """
    folder = run / FOLDER
    if not folder.exists():
        return None
    requested: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _rows(folder / "blocks.csv"):
        requested[row["direction"]][_layer(row)] = float(row["requested_capacity"])
    types: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)  # rank, capacity
    for row in _rows(folder / "tokens.csv"):
        if row["frequency_rank"] and int(row["occurrences"]) >= MIN_COUNT:
            numbers = float(row["frequency_rank"]), float(row["requested_capacity"])
            types[row["direction"], _layer(row)].append(numbers)
    correlation: dict[str, dict[str, float]] = defaultdict(dict)
    for (direction, layer), numbers in types.items():
        if len(numbers) > 2:
            found = spearman(*np.array(numbers).T)
            if found == found:  # where all ask for the same there is none
                correlation[direction][layer] = round(found, 4)
    return {"requested_capacity": dict(requested), "rank_correlation": dict(correlation)}


def mean(runs: Iterable[dict | None]) -> dict[str, float] | None:
    """Requested capacity by MoE layer, as `moe_blocks` names them, over directions and ``runs``."""
    found = defaultdict(list)
    for run in runs:
        for layers in run["requested_capacity"].values() if run else ():
            for layer, value in layers.items():
                found[layer.replace(".", ".layer.")].append(value)
    return {layer: statistics.fmean(values) for layer, values in found.items()} or None


def _rows(file: Path) -> Iterator[dict]:
    """Those of text."""
    with open(file, encoding="utf-8", newline="") as lines:
        yield from (row for row in csv.DictReader(lines) if row["kind"] == "text")


def _layer(row: dict) -> str:
    return f"{row['side']}.{row['layer']}"


# What is kept of a run: small text files in ``results/DATASET/RUN``, from which all else is made.

FILE = "run.json"
CURVE = "curve.csv"
ROUTING = "routing.json"
SENTENCES = "sentences.csv"  # see `sentence_counts`
EXPERTS = "experts_per_token"
COLUMNS = ("update", "training_nll", "validation_nll", EXPERTS, "words", "seconds")
_ABOUT = {"command": str, "commit": str, "machine": str, "versions": dict, "updates": int}
_VALID = re.compile(
    r"valid on '[^']*' subset \|.*? \| nll_loss ([\d.]+|nan|inf) \|.*\| num_updates (\d+)"
)


def folder_of(dataset: str) -> Path:
    """``RESULTS_DIR`` (results/) of the data set."""
    return Path(os.environ.get("RESULTS_DIR") or "results") / dataset


def make_folder(dataset: str) -> None:
    """Where results are to be kept.

    Raises:
        UsageError: they cannot.
    """
    folder = folder_of(dataset)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made: {error.strerror}; RESULTS_DIR is where results are kept"
        ) from None


def there(dataset: Dataset, name: str) -> bool:
    """Whether a run's results are kept."""
    return (folder_of(dataset.name) / name / FILE).exists()


def check_flags(dataset: Dataset, name: str, words: Sequence[str]) -> None:
    """Raise UsageError where a run is kept that was trained with another value of a flag in ``words``."""
    folder = folder_of(dataset.name) / name
    about = _about(folder)
    given = given_flags(words)
    made_with = [*arguments(dataset.train), *shlex.split(about["command"].split(" && ")[0])]
    flags = about.get("flags", {}) | identity.limits(given_flags(made_with))
    for flag, value in (identity.what_is_trained(given) | identity.limits(given)).items():
        if flag not in identity.BATCH and flags.get(flag) != value:
            was = f"with {flag} {flags[flag]}" if flag in flags else "without it"
            raise UsageError(
                f"{flag} {value}: {folder} is there and was made {was}; set RESULTS_DIR and RUN_DIR to "
                "other folders for a study with other flags"
            )


def keep(dataset: Dataset, name: str, line: str) -> None:
    """Gathers the results of a run that is trained and scored; ``line`` is the command that made them."""
    run = Folders(dataset.name).run(name)
    log = run / "train.log"
    logged = _logged(log)
    curve = _curve(log, logged)
    content = {
        "command": _as_anywhere(Folders(dataset.name), line),
        "flags": json.loads((run / "identity.json").read_text("utf-8"))["flags"],
        **summary_of_starts(run),
        "versions": {p: version(p) for p in ("torch", "fairseq", "sacrebleu")},
        "python": platform.python_version(),
        "updates": curve[-1]["update"] if curve else None,
        EXPERTS: _experts_per_token(logged),
    }
    capacity = summary(run)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    with whole_folder(folder_of(dataset.name) / name, replace=True) as folder:
        shutil.copyfile(run / scores.FILE, folder / scores.FILE)
        (folder / CURVE).write_text(text.getvalue(), "utf-8")
        if capacity is not None:
            (folder / ROUTING).write_text(json.dumps(capacity, indent=1) + "\n", "utf-8")
        (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _as_anywhere(of: Folders, line: str) -> str:
    """The command with paths as they are without ``DATA_DIR`` and ``RUN_DIR``, which are one machine's."""
    for folder, name in ((of.data, "data"), (of.runs, "runs")):
        line = line.replace(f"{folder}/", f"{name}/{of.dataset}/")
    return line


def _logged(log: Path) -> dict[int, dict[str, float]]:
    """By update the line of training that ends there.

    Of an update that was made twice, before and after an interruption, the later one counts.
    """
    lines = read_lines(log)
    return {int(line[UPDATES]): line for line in lines if "nll_loss" in line and "wpb" in line}


def _curve(log: Path, logged: Mapping[int, Mapping[str, float]]) -> list[dict]:
    """By update: training loss since the last line, validation loss, and so on.

    Losses are bits per target token. Experts per token are those since the last line; target words and
    seconds those of all training until then, the seconds of the updates in the curve, from the words per
    second of each.
    """
    rows: dict[int, dict] = {}
    for update, line in logged.items():
        row = rows.setdefault(update, dict.fromkeys(COLUMNS) | {"update": update})
        row |= {"training_nll": line["nll_loss"], EXPERTS: line.get(EXPERTS)}
        row |= {"wpb": line["wpb"], "wps": line["wps"]}
    for line in log.read_text("utf-8", "replace").splitlines():
        if found := _VALID.search(line):
            update = int(found[2])
            row = rows.setdefault(update, dict.fromkeys(COLUMNS) | {"update": update})
            row["validation_nll"] = float(found[1])
    curve, words, seconds, last = [], 0.0, 0.0, 0
    for update in sorted(rows):
        row = rows[update]
        if "wpb" in row:
            new = row.pop("wpb") * (update - last)
            words, last = words + new, update
            rate = row.pop("wps")
            seconds += new / rate if rate else 0.0
        curve.append(row | {"words": round(words), "seconds": round(seconds, 2)})
    return curve


def _experts_per_token(logged: Mapping[int, Mapping[str, float]]) -> float | None:
    """Of all of training; None where there are no experts."""
    lines = [line for line in logged.values() if EXPERTS in line]
    words = sum(line["wpb"] for line in lines)
    return round(sum(line[EXPERTS] * line["wpb"] for line in lines) / words, 3) if words else None


@dataclass(frozen=True)
class Result:
    """A run as it is kept."""

    name: str
    scores: dict[str, Score]
    curve: list[dict[str, float | None]]
    about: dict
    routing: dict | None = None  # see `capacity_summary.summary`
    folder: Path = Path()  # where it is kept

    @property
    def seed(self) -> int | None:
        """None is the data set's own."""
        return folders.seed_in(self.name)

    @property
    def machine(self) -> str:
        """What it was trained on, which its times depend on."""
        return self.about["machine"]

    @property
    def untimed(self) -> str:
        """Why its times are not to be compared; written into its file by hand, where something was odd."""
        return self.about.get("untimed", "")

    @property
    def experts_per_token(self) -> float | None:
        """Copies that an expert took, per token and stratum that it stopped at, in training."""
        return self.about.get(EXPERTS)

    @property
    def bleu(self) -> float:
        """Mean over the directions."""
        return scores.mean_bleu(self.scores)

    @property
    def validation(self) -> float:
        """The lowest loss, which is that of the checkpoint that was scored; NaN where none is a number."""
        losses = [row["validation_nll"] for row in self.curve if row["validation_nll"] is not None]
        return min((loss for loss in losses if math.isfinite(loss)), default=math.nan)

    @property
    def logged(self) -> list[dict[str, float | None]]:
        """The rows of the log's lines; none of a run that is shorter than the interval between two."""
        return [row for row in self.curve if row["training_nll"] is not None]

    def validated(self) -> dict[str, np.ndarray]:
        """Where it was validated: update, loss, and target words and seconds of training until then.

        Epochs end between two lines of the log, of which both are taken.
        """
        rows = [row for row in self.curve if row["validation_nll"] is not None]
        updates = [row["update"] for row in rows]
        found = {"update": updates, "loss": [row["validation_nll"] for row in rows]}
        for column in ("words", "seconds"):
            at = [[row["update"] for row in self.logged], [row[column] for row in self.logged]]
            found[column] = np.interp(updates, *at)
        return {name: np.array(values) for name, values in found.items()}

    @property
    def time(self) -> float:
        """Seconds of training per target token, the median of the log's lines.

        Validation, and what else holds up a few updates, is in few lines. 0 where there are none, and where
        ``untimed`` in its file says why its times are not to be compared.
        """
        logged = [] if self.untimed else self.logged
        before = [{"words": 0, "seconds": 0}, *logged]
        times = [
            (row["seconds"] - last["seconds"]) / (row["words"] - last["words"])
            for last, row in zip(before, logged, strict=False)
            if row["words"] > last["words"]
        ]
        return statistics.median(times) if times else 0.0


def by_seed(
    systems: Mapping[str, Sequence[Result]], of: Callable[[Result], float]
) -> dict[str, dict[int | None, float]]:
    """A number of each run, by method and seed."""
    return {method: {r.seed: of(r) for r in results} for method, results in systems.items()}


def mean_experts_per_token(results: Sequence[Result]) -> float | None:
    """Of the runs that it was kept of."""
    there = [r.experts_per_token for r in results if r.experts_per_token is not None]
    return statistics.fmean(there) if there else None


def read(dataset: str) -> list[Result]:
    """All runs that are kept, in the order of their names."""
    folders = sorted(file.parent for file in folder_of(dataset).glob(f"*/{FILE}"))
    return [_read(folder) for folder in folders if folder.suffix not in (".partial", ".old")]


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """What goes wrong while a run's results are read is a sentence that names them."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} does not hold a run's results ({error})") from None


def _about(folder: Path) -> dict:
    """What is kept of a run beside its numbers."""
    with _named(folder):
        about = json.loads((folder / FILE).read_text("utf-8"))
        for name, kind in _ABOUT.items():
            if not isinstance(about, dict) or not isinstance(about.get(name), kind):
                raise ValueError(f"{FILE} without {name!r}")
    return about


def _read(folder: Path) -> Result:
    about = _about(folder)
    with _named(folder):
        with open(folder / CURVE, encoding="utf-8", newline="") as lines:
            curve = [
                {name: float(row[name]) if row.get(name) else None for name in COLUMNS}
                for row in csv.DictReader(lines)
            ]
        if any(row[name] is None for row in curve for name in ("update", "words", "seconds")):
            raise ValueError(f"{CURVE} has an empty cell")
        file = folder / ROUTING
        capacity = json.loads(file.read_text("utf-8")) if file.exists() else None
    found = Result(folder.name, scores.read(folder), curve, about, capacity, folder)
    if not found.scores or all(row["validation_nll"] is None for row in curve):
        raise UsageError(f"{folder} has no scores or no validation loss: delete it and study again")
    return found


# Which systems of a study stand beside one another: those that can be compared over the same
# seeds.

Systems = Mapping[str, Sequence[Result]]  # by method, a result for each seed


def groups(
    study: Collection[str], systems: Systems, baseline: str, largest: float = math.inf
) -> list[dict[str, list[Result]]]:
    """The systems of the study with the seeds that half of them have, then all else by its seeds.

    Runs of two seeds say nothing of two systems, so a system in one seed stands beside the baseline's run of
    that seed and not beside its mean. A group after the first has ``largest`` systems, beside the baseline.
    """
    count = Counter(r.seed for method in study for r in systems.get(method, ()))
    usual = {seed for seed, n in count.items() if 2 * n >= len(systems.keys() & study)}
    first, others = {}, {}
    for method, results in systems.items():
        of_study = [r for r in results if method in study and r.seed in usual]
        if of_study:
            first[method] = of_study
        if rest := [r for r in results if r not in of_study]:
            others.setdefault(frozenset(r.seed for r in rest), {})[method] = rest
    found = [first] if first else []
    for seeds, members in others.items():
        beside = [r for r in systems.get(baseline, ()) if r.seed in seeds]
        beside = {baseline: beside} if beside else {}
        members = {method: rest for method, rest in members.items() if method != baseline}
        parts = max(1, math.ceil(len(members) / largest))
        size = math.ceil(len(members) / parts)
        names = list(members)
        for i in range(parts):
            of_part = names[i * size : (i + 1) * size]
            found.append(beside | {name: members[name] for name in of_part})
    return found
