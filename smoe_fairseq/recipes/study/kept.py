"""What is kept of a run: small text files in ``results/DATASET/RUN``, from which all else is made."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from smoe_fairseq.analysis.training_log import UPDATES, read_lines
from smoe_fairseq.recipes import seeds
from smoe_fairseq.recipes.evaluating import scores
from smoe_fairseq.recipes.evaluating.scores import Score
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.study import capacity_summary, starts
from smoe_fairseq.recipes.training import identity
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_folder

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
    given = identity.given_flags(words)
    made_with = [*arguments(dataset.train), *shlex.split(about["command"].split(" && ")[0])]
    flags = about.get("flags", {}) | identity.limits(identity.given_flags(made_with))
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
        **starts.summary(run),
        "versions": {p: version(p) for p in ("torch", "fairseq", "sacrebleu")},
        "python": platform.python_version(),
        "updates": curve[-1]["update"] if curve else None,
        EXPERTS: _experts_per_token(logged),
    }
    capacity = capacity_summary.summary(run)
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


def _as_anywhere(folders: Folders, line: str) -> str:
    """The command with paths as they are without ``DATA_DIR`` and ``RUN_DIR``, which are one machine's."""
    for folder, name in ((folders.data, "data"), (folders.runs, "runs")):
        line = line.replace(f"{folder}/", f"{name}/{folders.dataset}/")
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
        return seeds.seed_in(self.name)

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
