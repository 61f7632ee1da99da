"""Scores of one run: ``scores.json`` beside its checkpoints."""

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole

FILE = "scores.json"
UNFINISHED = "test.partial"  # beside it: an evaluation that goes on, and what it has so far
BLEU, CHRF, SPBLEU, COMET = METRICS = ("BLEU", "chrF++", "spBLEU", "COMET")


@dataclass(frozen=True)
class Score:
    """One direction: BLEU in points (0 to 100) and how sacreBLEU computed it.

    ``length_ratio`` is that of the translations' tokens to the references', sacreBLEU's own count; None
    in files that were written before it was kept. ``others`` has, by its name in `METRICS`, points and
    signature of what else was computed.
    """

    bleu: float
    signature: str
    sentences: int
    length_ratio: float | None = None
    others: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"BLEU {self.bleu:.2f}"]
        if self.length_ratio is not None:
            said.append(f"{self.length_ratio:.2f} of the references' length")
        return ", ".join([*said, *(f"{name} {self.others[name][0]:.2f}" for name in self.others)])

    @property
    def unpenalized(self) -> float | None:
        """BLEU without its penalty for short translations; None where their length was not kept.

        From the ratio of lengths with three digits, so within 0.2 percent.
        """
        if not self.length_ratio:
            return None
        return self.bleu / math.exp(min(0.0, 1 - 1 / self.length_ratio))

    def of(self, metric: str) -> tuple[float, str] | None:
        """Points and signature of one of `METRICS`; None where it was not computed."""
        return (self.bleu, self.signature) if metric == BLEU else self.others.get(metric)

    @property
    def is_sound(self) -> bool:
        """Whether all is of its type, and no number negative or none; a file may hold anything."""
        ratio = 1 if self.length_ratio is None else self.length_ratio
        found = [self.of(metric) for metric in (BLEU, *self.others)]
        numbers = (self.sentences, ratio, *(points for points, _ in found))
        return all(isinstance(signature, str) for _, signature in found) and all(
            isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf
            for n in numbers
        )

    @property
    def has_odd_length(self) -> bool:
        """Whether translations that do not end, or end too early, are more likely than bad luck."""
        return self.length_ratio is not None and not 0.8 <= self.length_ratio <= 1.2


def read_score(folder: Path, direction: str) -> Score:
    """What sacreBLEU wrote for a direction, with the number of sentences translated.

    The files are ``DIRECTION.json`` and, where BLEU was computed with sentencepiece too,
    ``DIRECTION.spbleu.json``; ``DIRECTION.comet.json`` is of the same form.
    """
    results = {}
    for file in (f"{direction}{kind}.json" for kind in ("", ".spbleu", ".comet")):
        if (folder / file).exists():
            found = json.loads((folder / file).read_text("utf-8"))
            for result in found if isinstance(found, list) else [found]:
                results.setdefault(_metric_of(file, result), result)
    bleu = results.pop(BLEU)
    others = {name: (result["score"], result["signature"]) for name, result in results.items()}
    if "tok:flores" in bleu["signature"]:
        others[SPBLEU] = (bleu["score"], bleu["signature"])
    sentences = (folder / f"{direction}.txt").read_text("utf-8").count("\n")
    # Its only place in sacreBLEU's result: "62.1/36.8/... (BP = 0.984 ratio = 0.984 hyp_len = ...".
    ratio = re.search(r"ratio = ([\d.]+)", bleu.get("verbose_score", ""))
    return Score(bleu["score"], bleu["signature"], sentences, ratio and float(ratio[1]), others)


def _metric_of(file: str, result: dict) -> str:
    if result["name"] == "chrF2++":  # 2: its beta
        return CHRF
    return SPBLEU if file.endswith(".spbleu.json") else result["name"]


def write(folder: Path, scores: dict[str, Score], checkpoint: str, settings: Sequence[str]) -> None:
    """Puts the scores, by direction, into ``folder/scores.json``.

    ``checkpoint`` is its name; ``settings`` are the flags of the search that made the translations, kept
    beside their scores.
    """
    content = {
        "checkpoint": checkpoint,
        "generate": " ".join(settings),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scores": {direction: asdict(score) for direction, score in scores.items()},
    }
    write_whole(folder / FILE, json.dumps(content, indent=2) + "\n")


def mean_bleu(found: Mapping[str, Score]) -> float | None:
    """Over the directions; None without any."""
    return statistics.fmean(score.bleu for score in found.values()) if found else None


def mean_of(found: Mapping[str, Score], of: Callable[[Score], float | None]) -> float:
    """Of a number over the directions; NaN where one has none."""
    values = [of(score) for score in found.values()]
    return math.nan if None in values or not values else statistics.fmean(values)


def chrf(score: Score) -> float | None:
    """chrF++ in points."""
    return score.others[CHRF][0] if CHRF in score.others else None


def read(folder: Path) -> dict[str, Score]:
    """Scores by direction; empty where the run has not been evaluated yet.

    As long as a first evaluation is not complete these are the scores that it has so far.
    """
    path = _path(folder)
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        scores = {direction: _score(**score) for direction, score in content["scores"].items()}
        if not all(score.is_sound for score in scores.values()):
            raise ValueError
        return scores
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{path} is not a file of scores: delete it and run scripts/evaluate.sh again"
        ) from None


def search_flags(folder: Path) -> str:
    """The flags of the search that made the translations, of scores that can be read."""
    path = _path(folder)
    return str(json.loads(path.read_text("utf-8")).get("generate", "")) if path.exists() else ""


def _path(folder: Path) -> Path:
    complete = folder / FILE
    return complete if complete.exists() else folder / UNFINISHED / FILE


def _score(others: dict | None = None, **values) -> Score:
    others = {metric: (points, signature) for metric, (points, signature) in (others or {}).items()}
    return Score(**values, others=others)
