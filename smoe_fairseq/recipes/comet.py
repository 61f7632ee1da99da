"""COMET beside sacreBLEU's scores, by the program ``comet-score`` of another environment.

``unbabel-comet`` 2.2.7 needs numpy below 2 and transformers below 5, and this package numpy 2: they
cannot be installed side by side. ``COMET`` names the program, ``COMET_MODEL`` the model.
"""

import json
import os
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes.processes import command, run_quietly
from smoe_fairseq.recipes.scores import COMET

MODEL = "Unbabel/wmt22-comet-da"


@dataclass(frozen=True)
class Texts:
    """The files of one direction, with as many lines each."""

    source: Path
    translation: Path
    reference: Path


@dataclass(frozen=True)
class Scorer:
    """``program`` with its own flags, and the name or the ``.ckpt`` file of a model."""

    program: tuple[str, ...]
    model: str

    def command(self, texts: Texts, output: Path) -> str:
        """Writes a score for each line to ``output``."""
        files = ["-s", texts.source, "-t", texts.translation, "-r", texts.reference]
        return command(*self.program, *files, "--model", self.model, "--quiet", "--to_json", output)

    def score(self, directions: Mapping[str, Texts], folder: Path) -> None:
        """Writes ``folder/DIRECTION.comet.json`` for each direction that this model has not scored.

        The model is loaded once: the lines of all directions are scored as one text.

        Raises:
            UsageError: the program failed, or its scores are not between 0 and 1.
        """
        left = {name: t for name, t in directions.items() if not self._is_there(folder, name)}
        if not left:
            return
        print(f"# {COMET} of {len(left)} directions by {self.model}", flush=True)
        lines = {name: len(_lines(texts.translation)) for name, texts in left.items()}
        with tempfile.TemporaryDirectory() as name:
            together = Texts(*(Path(name, part) for part in ("source", "translation", "reference")))
            for part, file in vars(together).items():
                texts = (line for t in left.values() for line in _lines(getattr(t, part)))
                file.write_text("".join(f"{line}\n" for line in texts), "utf-8")
            scored = Path(name, "scores.json")
            run_quietly(f"{self.command(together, scored)} > /dev/null")
            scores = self._read(scored, sum(lines.values()))
        for direction, count in lines.items():
            own, scores = scores[:count], scores[count:]
            result = {"name": COMET, "score": 100 * statistics.fmean(own)}
            result |= {"signature": f"model:{self.model}", "sentences": own}
            write_whole(_file(folder, direction), json.dumps(result) + "\n")

    def _is_there(self, folder: Path, direction: str) -> bool:
        try:
            found = json.loads(_file(folder, direction).read_text("utf-8"))
            return found["signature"] == f"model:{self.model}"
        except (OSError, ValueError, KeyError):
            return False

    def _read(self, file: Path, count: int) -> Sequence[float]:
        try:
            (segments,) = json.loads(file.read_text("utf-8")).values()
            scores = [float(segment[COMET]) for segment in segments]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.program[0]} wrote no scores ({error})") from None
        if len(scores) != count:
            raise UsageError(f"{self.program[0]} scored {len(scores)} of {count} lines")
        if not 0 <= statistics.fmean(scores) <= 1:
            raise UsageError(
                f"COMET_MODEL={self.model} has a mean score of {statistics.fmean(scores):.2f}: "
                f"expected a model whose scores are between 0 and 1, such as {MODEL}"
            )
        return scores


def scorer() -> Scorer | None:
    """What ``COMET`` asks for; None where it is not set.

    Raises:
        UsageError: there is no such program.
    """
    program = shlex.split(os.environ.get("COMET", ""))
    if not program:
        return None
    if shutil.which(program[0]) is None:
        raise UsageError(
            f"COMET={program[0]}: there is no such program; expected the comet-score of an environment "
            "in which unbabel-comet is installed (docs/recipes.md)"
        )
    return Scorer(tuple(program), os.environ.get("COMET_MODEL") or MODEL)


def _file(folder: Path, direction: str) -> Path:
    return folder / f"{direction}.comet.json"


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8").removesuffix("\n").split("\n")
