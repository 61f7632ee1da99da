"""Metrics by other programs than sacreBLEU: COMET, and those of a data set's ``metrics``."""

import itertools
import json
import math
import os
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_text, write_whole
from smoe_fairseq.forms import read_json
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation.scores import COMET, lines_of
from smoe_fairseq.recipes.processes import command, run_quietly
from smoe_fairseq.recipes.settings import Settings

MODEL = "Unbabel/wmt22-comet-da"
Texts = tuple[Path, Path, Path]  # source, translation and reference, of equal length


@dataclass(frozen=True)
class External:
    """A metric that a program computes.

    Args:
        words: the command, in which ``{source}``, ``{translation}``, ``{reference}`` and ``{output}`` stand
            for files. Without ``{output}``, it prints the result.
        signature: of its scores.
        read: the number of each line, from the result.
        scale: points per unit of these numbers.
        at_once: whether all directions are scored as one text, so that a model is loaded once.
    """

    name: str
    words: str
    signature: str
    read: Callable[[Path], list[float]]
    scale: float = 1
    at_once: bool = False

    def command(self, texts: Texts, output: Path) -> str:
        """The command with the names of files."""
        words = self.words
        files = (*texts, output)
        for name, file in zip(("source", "translation", "reference", "output"), files, strict=True):
            words = words.replace(f"{{{name}}}", shlex.quote(str(file)))
        return words

    def score(self, directions: Mapping[str, Texts], folder: Path, settings: Settings) -> None:
        """Write ``folder/DIRECTION.NAME.json`` for each direction that has no score of this signature.

        Raises UsageError if the command fails, or gives anything but a number for each line.
        """
        left = {name: t for name, t in directions.items() if not self._has_scored(folder, name)}
        for part in [left] if self.at_once and left else [{name: t} for name, t in left.items()]:
            print(f"# {self.name} of {', '.join(part)}", flush=True)
            counts = {name: len(lines_of(texts[1])) for name, texts in part.items()}
            with tempfile.TemporaryDirectory() as temporary:
                first, *others = part.values()
                texts = _joined(part, Path(temporary)) if others else first
                output = Path(temporary, "output")
                printed = os.devnull if "{output}" in self.words else shlex.quote(str(output))
                run_quietly(f"{self.command(texts, output)} > {printed}", settings)
                numbers = self.read(output)
            total = sum(counts.values())
            if len(numbers) != total or not all(map(math.isfinite, numbers)):
                raise UsageError(f"{self.name}: {self.words}: expected {total} lines with a number")
            for direction, count in counts.items():
                own, numbers = numbers[:count], numbers[count:]
                result = {"name": self.name, "score": self.scale * statistics.fmean(own)}
                result |= {"signature": self.signature, "sentences": own}
                write_whole(_file(folder, direction, self.name), json.dumps(result) + "\n")

    def _has_scored(self, folder: Path, direction: str) -> bool:
        with suppress(UsageError, KeyError):
            return read_json(_file(folder, direction, self.name))["signature"] == self.signature
        return False


def _joined(directions: Mapping[str, Texts], folder: Path) -> Texts:
    """The texts of several directions as one, in a folder."""
    together = tuple(folder / part for part in ("source", "translation", "reference"))
    for file, parts in zip(together, zip(*directions.values())):
        text = (line for part in parts for line in lines_of(part))
        file.write_text("".join(f"{line}\n" for line in text), "utf-8")
    return together


def externals_of(dataset: Dataset) -> list[External]:
    """COMET if its program is set, and the data set's own; raises UsageError if the program is missing."""
    own = [External(name, w, w + _contents(w), _printed) for name, w in dataset.metrics.items()]
    program = shlex.split(dataset.settings.comet)
    return [*([comet(program, dataset.settings.comet_model or MODEL)] if program else []), *own]


def _contents(words: str) -> str:
    """For a signature: the fingerprints of the files that a command names, such as its program.

    Left out are an interpreter of such a file, and what follows a ``|`` or ``>``, which it may write.
    """
    with suppress(ValueError):  # no command, as the shell will say
        split = shlex.shlex(words, posix=True, punctuation_chars=True)
        split.whitespace_split = True
        own = [*itertools.takewhile(lambda word: word[:1] not in "|>;&", split)]
        files = [Path(word) for word in own if os.path.isfile(word)]
        by_interpreter = len(files) > 1 and os.path.isabs(own[0])
        return "".join(map(_content, files[by_interpreter:]))
    return ""


def _content(file: Path) -> str:
    return f"|{file.name}:{fingerprint(file)[:12]}"


def comet(program: list[str], model: str) -> External:
    """COMET by ``comet-score`` (path, and flags), with a ``model`` by name or ``.ckpt`` file."""
    if shutil.which(program[0]) is None:
        expected = "expected comet-score of an environment with unbabel-comet (docs/recipes.md)"
        raise UsageError(f"--comet {program[0]}: there is no such program; {expected}")
    files = "-s {source} -t {translation} -r {reference}"
    words = f"{command(*program)} {files} {command('--model', model)} --quiet --to_json {{output}}"
    signature = f"model:{model}{_content(Path(model)) if os.path.isfile(model) else ''}"
    return External(COMET, words, signature, partial(_of_comet, model), 100, at_once=True)


def _of_comet(model: str, file: Path) -> list[float]:
    try:
        content = read_json(file, {str: [{COMET: float}]})
    except UsageError as error:
        raise UsageError(f"the program of --comet wrote no scores ({error})") from None
    scores = [segment[COMET] for segments in content.values() for segment in segments]
    if scores and not 0 <= (mean := statistics.fmean(scores)) <= 1:
        expected = f"expected a model whose scores are between 0 and 1, such as {MODEL}"
        raise UsageError(f"--comet-model {model} has a mean score of {mean:.2f}: {expected}")
    return scores


def _printed(file: Path) -> list[float]:
    try:
        return [float(line) for line in read_text(file).split()]
    except ValueError:
        return []


def numbers_of_lines(translations: Path, metric: str) -> list[float]:
    """The score of each line of ``DIRECTION.txt``; raises UsageError if it lacks those of the metric."""
    file = _file(translations.parent, translations.stem, metric)
    advice = f"run scripts/evaluate.sh again with {metric}"
    return read_json(file, {"sentences": [float]}, advice)["sentences"]


def _file(folder: Path, direction: str, metric: str) -> Path:
    return folder / f"{direction}.{metric.lower()}.json"
