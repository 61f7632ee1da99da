"""One evaluation of a run: its commands, and the folder that it fills, which an interruption does not empty.

What is translated and scored is in ``test.partial``; when all is done, that becomes ``test``. A direction is
done when its scores are there, which are written last.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from smoe_fairseq.recipes.evaluating import scores
from smoe_fairseq.recipes.evaluating.tokenizer import tokenizer_file
from smoe_fairseq.recipes.folders import tested_text
from smoe_fairseq.recipes.shell import command, pipe
from smoe_fairseq.recipes.training.train import data_arguments
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.system.files import write_whole

FILE = "evaluation.json"
SPBLEU_TOKENIZER = "flores200"


@dataclass(frozen=True)
class Evaluation:
    """Of ``checkpoint`` by ``directions``, for the run in ``folder``; ``extra`` flags go to the search."""

    dataset: Dataset
    folder: Path
    checkpoint: Path
    directions: tuple[str, ...]
    extra: tuple[str, ...] = ()

    @property
    def partial(self) -> Path:
        """What is there already."""
        return self.folder / scores.UNFINISHED

    @property
    def complete(self) -> Path:
        """What all of it becomes."""
        return self.folder / "test"

    def source(self, direction: str) -> Path:
        """The text that is translated."""
        return tested_text(self.dataset, direction, direction.split("-")[0])

    def reference(self, direction: str) -> Path:
        """The raw text that a direction is scored against, not what binarisation left of it."""
        return tested_text(self.dataset, direction, direction.split("-")[1])

    def generation(self, direction: str) -> tuple[str, ...]:
        """The arguments of ``fairseq-generate``."""
        source, target = direction.split("-")
        words = [*data_arguments(self.dataset), "--source-lang", source, "--target-lang", target]
        words += ["--gen-subset", "test", "--path", str(self.checkpoint)]
        words += [
            *arguments(self.dataset.generate),
            "--results-path",
            str(self.partial / direction),
        ]
        return (*words, *self.extra)

    def generated(self, direction: str) -> Path:
        """What ``fairseq-generate`` writes."""
        return self.partial / direction / "generate-test.txt"

    def scoring(self, direction: str) -> list[str]:
        """The commands that follow on it."""
        translation = self.partial / f"{direction}.txt"
        lines = [
            pipe(
                command("grep", "-a", "^D-", self.generated(direction)),
                command("sort", "-t-", "-k2,2n"),
                command("cut", "-f3-", output=translation),
            )
        ]
        sacrebleu = ["sacrebleu", self.reference(direction), "-i", translation]
        sacrebleu += arguments(self.dataset.sacrebleu)
        if self.with_spbleu:
            more = ["--metrics", "bleu", "--tokenize", SPBLEU_TOKENIZER]
            output = self.partial / f"{direction}.spbleu.json"
            lines.append(command(*sacrebleu, *more, output=output))
        partial = self.partial / f"{direction}.json.tmp"
        lines.append(command(*sacrebleu, output=partial))
        lines.append(command("mv", partial, self.partial / f"{direction}.json"))
        return lines

    @property
    def with_spbleu(self) -> bool:
        """Whether BLEU of sentencepiece's tokens is computed beside the data set's own."""
        own = str(self.dataset.sacrebleu.get("tokenize", ""))
        return not own.startswith("flores") and tokenizer_file(SPBLEU_TOKENIZER) is not None

    def resume(self) -> dict[str, scores.Score]:
        """Makes the folder, or takes what is there of the same evaluation; returns the scores so far.

        Anything else in it, of an older checkpoint or of other flags, is deleted.
        """
        if self._is_of_this(self.complete) and not self.partial.exists():
            return self._scored(self.complete)
        if not self._is_of_this(self.partial):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            write_whole(self.partial / FILE, json.dumps(self._key, indent=2) + "\n")
        return self._scored(self.partial)

    def _scored(self, folder: Path) -> dict[str, scores.Score]:
        there = (d for d in self.directions if (folder / f"{d}.json").exists())
        return {direction: scores.read_score(folder, direction) for direction in there}

    def save(self, scored: dict[str, scores.Score], folder: Path) -> None:
        """Writes ``scores.json``, in the data set's order."""
        ordered = {d: scored[d] for d in self.directions if d in scored}
        settings = [*arguments(self.dataset.generate), *self.extra]
        scores.write(folder, ordered, self.checkpoint.name, settings)

    def finish(self, scored: dict[str, scores.Score]) -> None:
        """Gives all of it its place; on a full disk the old translations stay, with their scores."""
        self.save(scored, self.folder)
        for log in self.partial.glob("process-*.log"):
            log.unlink()
        (self.partial / scores.FILE).unlink(missing_ok=True)
        shutil.rmtree(self.complete, ignore_errors=True)
        os.replace(self.partial, self.complete)

    def _is_of_this(self, folder: Path) -> bool:
        try:
            return json.loads((folder / FILE).read_text("utf-8")) == self._key
        except (OSError, ValueError):
            return False

    @property
    def _key(self) -> dict:
        """What the translations and scores depend on."""
        texts = [text(d) for d in self.directions for text in (self.source, self.reference)]
        return {
            "checkpoint": _trace(self.checkpoint),
            "texts": hashlib.sha256(" ".join(map(_trace, texts)).encode()).hexdigest(),
            "flags": [*arguments(self.dataset.task | self.dataset.generate), *self.extra],
            "sacrebleu": [version("sacrebleu"), *arguments(self.dataset.sacrebleu)],
        }


def _trace(file: Path) -> str:
    """What changes when the file does, without reading gigabytes."""
    found = file.stat()
    return f"{file.name} {found.st_size} {found.st_mtime_ns}"
