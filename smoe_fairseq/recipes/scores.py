"""Scores of one run: ``scores.json`` beside its checkpoints."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import write_whole

FILE = "scores.json"


@dataclass(frozen=True)
class Score:
    """One direction: BLEU in points (0 to 100) and how sacreBLEU computed it.

    ``length_ratio`` is that of the translations' tokens to the references', sacreBLEU's own count; None
    in files that were written before it was kept.
    """

    bleu: float
    signature: str
    sentences: int
    length_ratio: float | None = None

    def __str__(self) -> str:
        bleu = f"BLEU {self.bleu:.2f}"
        if self.length_ratio is None:
            return bleu
        return f"{bleu}, {self.length_ratio:.2f} of the references' length"

    @property
    def is_sound(self) -> bool:
        """Whether all is of its type, and no number negative or none; a file may hold anything."""
        ratio = 1 if self.length_ratio is None else self.length_ratio
        numbers = (self.bleu, self.sentences, ratio)
        return isinstance(self.signature, str) and all(
            isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf
            for n in numbers
        )

    @property
    def has_odd_length(self) -> bool:
        """Whether translations that do not end, or end too early, are more likely than bad luck."""
        return self.length_ratio is not None and not 0.8 <= self.length_ratio <= 1.2


def read_score(folder: Path, direction: str) -> Score:
    """What sacreBLEU wrote for a direction, with the number of sentences translated."""
    result = json.loads((folder / f"{direction}.json").read_text("utf-8"))
    sentences = (folder / f"{direction}.txt").read_text("utf-8").count("\n")
    # Its only place in sacreBLEU's result: "62.1/36.8/... (BP = 0.984 ratio = 0.984 hyp_len = ...".
    ratio = re.search(r"ratio = ([\d.]+)", result.get("verbose_score", ""))
    return Score(result["score"], result["signature"], sentences, ratio and float(ratio[1]))


def write(
    folder: Path, checkpoint: Path, settings: Sequence[str], directions: Sequence[str]
) -> None:
    """Gathers the scores of ``folder/test`` into ``folder/scores.json``.

    ``settings`` are the flags of the search that made the translations, kept beside their scores.
    """
    scores = {d: asdict(read_score(folder / "test", d)) for d in directions}
    content = {
        "checkpoint": checkpoint.name,
        "generate": " ".join(settings),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scores": scores,
    }
    write_whole(folder / FILE, json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Score]:
    """Scores by direction; empty where the run has not been evaluated yet."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        scores = {direction: Score(**score) for direction, score in content["scores"].items()}
        if not all(score.is_sound for score in scores.values()):
            raise ValueError
        return scores
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{path} is not a file of scores: delete it and run scripts/evaluate.sh again"
        ) from None
