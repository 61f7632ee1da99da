"""An evaluation of a run: its files, its commands, and what of an interrupted one still counts."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import read_plain, write_whole
from smoe_fairseq.forms import read_json
from smoe_fairseq.recipes.data.download import tokenizer_file
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import metrics, scores
from smoe_fairseq.recipes.folders import test_file
from smoe_fairseq.recipes.processes import command
from smoe_fairseq.recipes.program_flags import Flags, arguments, parse_flags
from smoe_fairseq.recipes.training.train import data_arguments

FILE = "evaluation.json"
UNFINISHED = "unfinished.jsonl"  # in a direction's folder, see `translations.Model`


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run's checkpoint on ``directions``; ``extra`` are flags of the search."""

    dataset: Dataset
    folder: Path
    checkpoint: Path
    directions: tuple[str, ...]
    extra: tuple[str, ...] = ()
    preparation: tuple[str, ...] = ()  # commands that make the checkpoint from others
    contents: Mapping[str, str] = field(default_factory=dict)  # its `fingerprints`

    @property
    def partial(self) -> Path:
        """The folder until all directions are done."""
        return self.folder / scores.UNFINISHED

    @property
    def complete(self) -> Path:
        """The folder when all directions are done."""
        return self.folder / "test"

    def check_unchanged(self) -> None:
        """Raise UsageError if training has replaced the checkpoint since its ``contents`` were read."""
        from smoe_fairseq.checkpoints.reading import made_of  # imports torch

        before, now = self.contents, {self.checkpoint.name: fingerprint(self.checkpoint)}
        if before and before != now and before != made_of(self.checkpoint):
            raise UsageError(f"{self.checkpoint} was replaced while it was loaded: evaluate again")

    def source(self, direction: str) -> Path:
        """The raw text that is translated."""
        return test_file(self.dataset, direction, direction.split("-")[0])

    def reference(self, direction: str) -> Path:
        """The raw text that a direction is scored against."""
        return test_file(self.dataset, direction, direction.split("-")[1])

    def generation(self, direction: str) -> list[str]:
        """The arguments of ``fairseq-generate``."""
        source, target = direction.split("-")
        words = [*data_arguments(self.dataset), "--source-lang", source, "--target-lang", target]
        words += ["--gen-subset", "test", "--path", str(self.checkpoint)]
        words += arguments(self.dataset.generate)
        return [*words, "--results-path", str(self.partial / direction), *self.extra]

    def generated(self, direction: str) -> Path:
        """The file that ``fairseq-generate`` writes."""
        return self.partial / direction / "generate-test.txt"

    def scoring(self, direction: str) -> list[str]:
        """The commands that follow ``fairseq-generate``."""
        start = self.partial / direction
        translation, partial = f"{start}.txt", f"{start}.json.tmp"
        select = command("grep", "-a", "^D-", self.generated(direction))
        sort = command("sort", "-t-", "-k2,2n")
        lines = [f"{select} | {sort} | {command('cut', '-f3-', output=translation)}"]
        sacrebleu = ["sacrebleu", self.reference(direction), "-i", translation]
        for kind, flags in self.scorings(direction).items():
            output = f"{start}{kind}.json" if kind else partial
            lines.append(command(*sacrebleu, *arguments(flags), output=output))
        return [*lines, command("mv", partial, f"{start}.json")]

    def scorings(self, direction: str) -> dict[str, Flags]:
        """sacreBLEU's flags by suffix of the file of scores.

        BLEU of sentencepiece tokens (".spbleu") is added if its model has been downloaded.
        """
        flags, language = self.dataset.sacrebleu, direction.split("-")[1]
        tokenizer, scorings = metrics.tokenizer_of(flags, language), {}
        if not tokenizer.startswith("flores") and tokenizer_file(scores.SPBLEU_TOKENIZER):
            scorings[".spbleu"] = metrics.flags_for(flags, language, scores.SPBLEU)
        return scorings | {"": flags | {"tokenize": tokenizer}}

    def resume(self) -> dict[str, scores.Score]:
        """The scores so far of an interrupted evaluation; deletes what is of a different one.

        Translations by the same search are scored again if only the scoring, or a reference, has changed.
        """
        folder, same = self.partial, self._of_this_search(self.partial)
        if not same:
            folder, same = self.complete, self._of_this_search(self.complete)
            if not same:  # before anything goes
                with quietly():
                    parse_flags("fairseq-generate", self.generation(self.directions[0]))
        texts = {d: [each / f"{d}.txt" for each in (self.partial, folder)] for d in self.directions}
        again = [d for d in texts if d not in same and any(map(Path.exists, texts[d]))]
        if again:
            before = "another checkpoint, search or source text was translated before"
            print(f"# {', '.join(again)}: {before}; again now")
        if folder == self.complete:
            shutil.rmtree(self.partial, ignore_errors=True)
        for direction in same:
            with suppress(UsageError):  # not translated
                self.add_scores(folder, direction)
        scored, known = self.scored(folder), {}
        if folder == self.complete and (self.folder / scores.FILE).exists():
            known = scores.read(self.folder)
        for direction in list(scored):  # without translations that something else has changed
            before = known.get(direction) or scored[direction]
            if direction not in same or before.checksum not in (None, scored[direction].checksum):
                del scored[direction]
        if len(scored) == len(self.directions):
            self._write_key(folder)
            return scored
        begun = {direction for direction in same if not (folder / f"{direction}.txt").exists()}
        if same and folder == self.complete:  # which stays until another is complete
            shutil.copytree(folder, self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        for path in self.partial.glob("*"):
            if path.name.partition(".")[0] not in scored.keys() | begun:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._write_key(self.partial)
        if scored:
            self.save(scored, self.partial)
        return scored

    def scored(self, folder: Path) -> dict[str, scores.Score]:
        """The scores in a folder, by direction."""
        scored = {}
        for direction in self.directions:
            with suppress(UsageError, LookupError, TypeError):  # missing or incomplete
                scored[direction] = self.score(folder, direction)
        return scored

    def add_scores(self, folder: Path, direction: str) -> None:
        """Write sacreBLEU's output for translations where it is missing, as a dry run's commands do."""
        for kind, flags in self.scorings(direction).items():
            file = folder / f"{direction}{kind}.json"
            if not file.exists():
                texts = folder / f"{direction}.txt", self.reference(direction)
                write_whole(file, metrics.score(*map(scores.lines_of, texts), flags) + "\n")

    def score(self, folder: Path, direction: str) -> scores.Score:
        """The score in a folder, of the present test set."""
        checksum = scores.test_checksums(self.dataset, [direction]).get(direction)
        return replace(scores.read_score(folder, direction), test_checksum=checksum)

    def has_saved(self, scored: dict[str, scores.Score]) -> bool:
        with suppress(UsageError):  # invalid
            return scores.read(self.folder) == scored
        return False

    def save(self, scored: dict[str, scores.Score], folder: Path) -> None:
        """Write ``scores.json``, in the data set's order."""
        ordered = {d: scored[d] for d in self.directions if d in scored}
        settings = [*arguments(self.dataset.generate), *self.extra]
        scores.write(folder, ordered, self.checkpoint.name, self.contents, settings)

    def finish(self, scored: dict[str, scores.Score]) -> None:
        """Replace an earlier evaluation, which is kept if the disk is full."""
        self.save(scored, self.folder)
        for file in (self.partial / scores.FILE, *self.partial.glob(f"*/{UNFINISHED}")):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.complete, ignore_errors=True)
        os.replace(self.partial, self.complete)

    def _of_this_search(self, folder: Path) -> set[str]:
        """The directions that a folder has translations of by this search, if it has any.

        Deletes scores of another reference or by other flags of sacreBLEU.
        """
        try:
            saved, key = read_json(folder / FILE), self._key
        except UsageError:
            return set()
        if any(saved.get(name) != key[name] for name in ("checkpoint", "flags")):
            return set()
        texts, sources = saved.get("texts", {}), saved.get("sources", {})
        for file in folder.glob("*-*.json") if saved != key | {"sources": sources} else ():
            if texts != key["texts"] or scores.OF_SACREBLEU.fullmatch(file.name):
                file.unlink()
        return {d for d in self.directions if sources.get(d) == key["sources"][d]}

    def _write_key(self, folder: Path) -> None:
        write_whole(folder / FILE, json.dumps(self._key, indent=2) + "\n")

    @property
    def _key(self) -> dict:
        """What the translations depend on: checkpoint, sources, flags; and the scores: the rest."""
        sources = {
            d: hashlib.sha256(read_plain(self.source(d))).hexdigest() for d in self.directions
        }
        scoring = self.dataset.sacrebleu
        tokenizers = (metrics.tokenizer_of(scoring, d.split("-")[1]) for d in self.directions)
        scoring = scoring | {"tokenize": list(dict.fromkeys(tokenizers))}  # in place of `auto`
        return {
            "checkpoint": {self.checkpoint.name: self.contents},
            "sources": sources,
            "flags": [*arguments(self.dataset.task | self.dataset.generate), *self.extra],
            "texts": scores.test_checksums(self.dataset, self.directions),
            "sacrebleu": [version("sacrebleu"), *arguments(scoring)],
        }
