"""The scores of a run: ``scores.json`` next to its checkpoints."""

import hashlib
import json
import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain, read_text, write_whole
from smoe_fairseq.forms import SCORES, read_json
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import Folders, test_file
from smoe_fairseq.recipes.methods import PRETRAINED
from smoe_fairseq.recipes.program_flags import arguments, flag_values

FILE = "scores.json"
UNFINISHED = "test.partial"  # next to it: the folder of an incomplete evaluation
SPBLEU_TOKENIZER = "flores200"
BLEU, CHRF, SPBLEU, COMET = "BLEU", "chrF++", "spBLEU", "COMET"
# sacreBLEU's flags for each metric; None: another program computes it, as it does a data set's `metrics`.
METRICS = {
    BLEU: {"metrics": ["bleu"]},
    CHRF: {"metrics": ["chrf"], "chrf-word-order": 2},
    SPBLEU: {"metrics": ["bleu"], "tokenize": SPBLEU_TOKENIZER},
    COMET: None,
    "chrF": {"metrics": ["chrf"], "chrf-word-order": 0},
    "TER": {"metrics": ["ter"]},
}
LOWER_IS_BETTER = {"TER"}
OF_SACREBLEU = re.compile(r"[^.]+(\.spbleu)?\.json")  # files of its scores


@dataclass(frozen=True)
class Score:
    """The score of a direction: BLEU in points (0 to 100), with sacreBLEU's signature.

    ``length_ratio`` is the number of tokens in the translations over that in the references, by sacreBLEU;
    None in older files. ``others`` has points and signature of the other `METRICS`. ``test_checksum`` is of
    the raw source and reference, ``checksum`` of the translations; None in older files.
    """

    bleu: float
    signature: str
    sentences: int
    length_ratio: float | None = None
    others: dict[str, tuple[float, str]] = field(default_factory=dict)
    test_checksum: str | None = None
    checksum: str | None = None

    def __str__(self) -> str:
        parts = [f"BLEU {self.bleu:.2f}"]
        if self.length_ratio is not None:
            parts.append(f"{self.length_ratio:.2f} times the references' length")
        return ", ".join([*parts, *(f"{name} {self.others[name][0]:.2f}" for name in self.others)])

    def of(self, metric: str) -> tuple[float, str] | None:
        """Points and signature of one of `METRICS`; None if it was not computed."""
        return (self.bleu, self.signature) if metric == BLEU else self.others.get(metric)

    @property
    def has_odd_length(self) -> bool:
        """Whether translations seem to be endless or cut short."""
        return self.length_ratio is not None and not 0.8 <= self.length_ratio <= 1.2


def read_score(folder: Path, direction: str) -> Score:
    """Read a score from ``DIRECTION.json``, ``DIRECTION.spbleu.json`` and ``DIRECTION.METRIC.json``."""
    results = {}
    files = [f"{direction}{kind}.json" for kind in ("", ".spbleu", ".comet")]
    files += sorted(path.name for path in folder.glob(f"{direction}.*.json"))
    for file in dict.fromkeys(files):
        if (folder / file).exists():
            content = read_json(folder / file, (dict, [dict]))
            for result in content if isinstance(content, list) else [content]:
                name = re.sub(r"^chrF2(?=\+*$)", "chrF", result["name"])  # 2 is beta
                results.setdefault(SPBLEU if file.endswith(".spbleu.json") else name, result)
    bleu = results.pop(BLEU)
    others = {name: (result["score"], result["signature"]) for name, result in results.items()}
    if "tok:flores" in bleu["signature"]:
        others[SPBLEU] = (bleu["score"], bleu["signature"])
    text = read_text(folder / f"{direction}.txt")
    sentences, checksum = text.count("\n"), hashlib.sha256(text.encode()).hexdigest()
    # sacreBLEU writes the ratio only in "62.1/36.8/... (BP = 0.984 ratio = 0.984 hyp_len = ...".
    ratio = re.search(r"ratio = ([\d.]+)", bleu.get("verbose_score", ""))
    ratio = ratio and float(ratio[1])
    return Score(bleu["score"], bleu["signature"], sentences, ratio, others, checksum=checksum)


def write(
    folder: Path,
    scores: dict[str, Score],
    checkpoint: str,
    contents: Mapping[str, str],
    settings: Sequence[str],
) -> None:
    """Write ``scores.json``: by direction, with the checkpoint's name, `fingerprints`, and search flags."""
    content = {
        "checkpoint": checkpoint,
        "contents": contents,
        "generate": " ".join(settings),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scores": {direction: asdict(score) for direction, score in scores.items()},
    }
    write_whole(folder / FILE, json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Score]:
    """Scores by direction, also of an unfinished evaluation; raises UsageError for an invalid file."""
    scored = {}
    for direction, values in _content(folder)["scores"].items():
        numbers = {f.name: values[f.name] for f in fields(Score) if f.name in values}
        others = {metric: tuple(each) for metric, each in (values.get("others") or {}).items()}
        scored[direction] = Score(**numbers | {"others": others})
    return scored


def checkpoint_of(folder: Path) -> tuple[str, dict[str, str]]:
    """Which checkpoint was scored (best, ...), and its `fingerprints`; empty where they are unknown."""
    content = _content(folder)
    name = content.get("checkpoint", "").removeprefix("checkpoint_").removesuffix(".pt")
    return name.replace("_", ":"), content.get("contents", {})


def test_checksums(dataset: Dataset, directions: Iterable[str]) -> dict[str, str]:
    """Checksums of the raw sources and references, of those directions that have both."""
    checksums = {}
    for direction in directions:
        files = (test_file(dataset, direction, language) for language in direction.split("-"))
        with suppress(UsageError):  # missing
            checksums[direction] = hashlib.sha256(b"".join(map(read_plain, files))).hexdigest()
    return checksums


def different_tests(*results: Mapping[str, Score], now: Mapping[str, str]) -> list[str]:
    """The directions that were not all scored on one test set, and that of ``now``, as far as is known."""
    known = defaultdict(set, {direction: {checksum} for direction, checksum in now.items()})
    for direction, score in (item for result in results for item in result.items()):
        known[direction] |= {score.test_checksum} - {None}
    return _with_several(known)


def points(result: Mapping[str, Score], metric: str) -> dict[str, tuple[float, str]]:
    """Points and signature of the directions that have the metric."""
    found = {direction: score.of(metric) for direction, score in result.items()}
    return {direction: value for direction, value in found.items() if value is not None}


def signatures(*results: Mapping[str, Score], metric: str) -> dict[str, set[str]]:
    """The signatures by direction."""
    known = defaultdict(set)
    for result in results:
        for direction, (_, signature) in points(result, metric).items():
            known[direction].add(signature)
    return known


def different_signatures(*results: Mapping[str, Score], metric: str = BLEU) -> list[str]:
    """The directions whose signatures differ between results."""
    return _with_several(signatures(*results, metric=metric))


def _with_several(known: Mapping[str, set[str]]) -> list[str]:
    return [direction for direction, values in known.items() if len(values) > 1]


def other_search(dataset: Dataset, folder: Path) -> str:
    """The flags of a run's evaluation that differ from the data set's; raises UsageError as `read` does.

    "without" begins those that the data set sets; what an older file does not say is not compared.
    """
    content, usual = _content(folder), flag_values(arguments(dataset.generate))
    which, _ = checkpoint_of(folder)
    used = flag_values(content["generate"].split()) if "generate" in content else usual
    flags = [f"--checkpoint {which}"] if which not in ("", PRETRAINED, dataset.checkpoint) else []
    flags += [f"{flag} {v}".strip() for flag, v in used.items() if usual.get(flag) != v]
    return " ".join([*flags, *(f"without {flag}" for flag in usual if flag not in used)])


def search_notes(dataset: Dataset, run: str) -> list[str]:
    """A note on `other_search`, if it was another."""
    flags = other_search(dataset, Folders(dataset).runs / run)
    return [f"{run}: translated with {flags}"] if flags else []


def _content(folder: Path) -> dict:
    files = (folder / FILE, folder / UNFINISHED / FILE)
    file = next((file for file in files if os.path.lexists(file)), None)
    advice = "delete it and run scripts/evaluate.sh again"
    return read_json(file, SCORES, advice) if file else {"scores": {}}


def translations_of(folder: Path, direction: str) -> Path:
    """The translations whose scores `read` reads: of an unfinished evaluation if none is complete."""
    test = "test" if os.path.lexists(folder / FILE) else UNFINISHED
    return folder / test / f"{direction}.txt"


def mean_of(scored: Mapping[str, Score], of: Callable[[Score], float | None]) -> float:
    """The mean of a number over the directions; NaN if one lacks it."""
    values = [of(score) for score in scored.values()]
    return math.nan if None in values or not values else statistics.fmean(values)


def mean_points(scored: Mapping[str, Score], metric: str = BLEU) -> float:
    """The mean of a metric over the directions; NaN if one lacks it."""
    return mean_of(scored, lambda score: (score.of(metric) or [None])[0])


def label(metric: str) -> str:
    """What a table calls a metric."""
    if METRICS.get(metric) is None:
        return metric
    name = "sacreBLEU" if metric == BLEU else f"sacreBLEU's {metric}"
    return f"{name} (lower is better)" if metric in LOWER_IS_BETTER else name


def lines_of(file: Path) -> list[str]:
    """The lines as sacreBLEU's command reads them: split at line feeds, without trailing spaces."""
    return [line.rstrip() for line in read_text(file).removesuffix("\n").split("\n")]
