"""``scripts/evaluate.sh``: translate the test sets and score them with sacreBLEU."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from smoe_fairseq import files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import rank_files, write_whole
from smoe_fairseq.forms import read_json
from smoe_fairseq.recipes.config import Dataset, arguments, method_flags
from smoe_fairseq.recipes.data.download import tokenizer_file
from smoe_fairseq.recipes.data.raw import check
from smoe_fairseq.recipes.evaluation import generate, scores
from smoe_fairseq.recipes.folders import Folders, run_name, tested_text
from smoe_fairseq.recipes.processes import (
    command,
    dry_run,
    report,
    run,
    run_quietly,
    step,
)
from smoe_fairseq.recipes.training.train import data_arguments
from smoe_fairseq.training.screen import duration

FILE = "evaluation.json"
NEWS_SECONDS = 30  # between two lines on progress, unless there is a terminal


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run's checkpoint on ``directions``; ``extra`` are flags of the search."""

    dataset: Dataset
    folder: Path
    checkpoint: Path
    directions: tuple[str, ...]
    extra: tuple[str, ...] = ()

    @property
    def partial(self) -> Path:
        """The folder of the directions that are done so far."""
        return self.folder / scores.UNFINISHED

    @property
    def complete(self) -> Path:
        """The folder's name when all directions are done."""
        return self.folder / "test"

    def source(self, direction: str) -> Path:
        """The raw text that is translated."""
        return tested_text(self.dataset, direction, direction.split("-")[0])

    def reference(self, direction: str) -> Path:
        """The raw text that a direction is scored against."""
        return tested_text(self.dataset, direction, direction.split("-")[1])

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
        translation = self.partial / f"{direction}.txt"
        lines = [
            " | ".join(
                [
                    command("grep", "-a", "^D-", self.generated(direction)),
                    command("sort", "-t-", "-k2,2n"),
                    command("cut", "-f3-", output=translation),
                ]
            )
        ]
        sacrebleu = ["sacrebleu", self.reference(direction), "-i", translation]
        sacrebleu += arguments(self.dataset.sacrebleu)
        if self.with_spbleu:
            more = ["--metrics", "bleu", "--tokenize", scores.SPBLEU_TOKENIZER]
            output = self.partial / f"{direction}.spbleu.json"
            lines.append(command(*sacrebleu, *more, output=output))
        partial = self.partial / f"{direction}.json.tmp"
        lines.append(command(*sacrebleu, output=partial))
        lines.append(command("mv", partial, self.partial / f"{direction}.json"))
        return lines

    @property
    def with_spbleu(self) -> bool:
        """Whether BLEU of sentencepiece tokens is computed, too: if its model is there."""
        own = str(self.dataset.sacrebleu.get("tokenize", ""))
        return not own.startswith("flores") and tokenizer_file(scores.SPBLEU_TOKENIZER) is not None

    def resume(self) -> dict[str, scores.Score]:
        """The scores that this evaluation has so far; the remains of another one are deleted."""
        if self._is_of_this(self.complete) and not self.partial.exists():
            if len(scored := self.scored(self.complete)) == len(self.directions):
                return scored
        if not self._is_of_this(self.partial):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            write_whole(self.partial / FILE, json.dumps(self._key, indent=2) + "\n")
        return self.scored(self.partial)

    def scored(self, folder: Path) -> dict[str, scores.Score]:
        """The scores in a folder, by direction."""
        found = {}
        for direction in self.directions:
            with suppress(OSError, ValueError, LookupError, TypeError):  # missing or incomplete
                found[direction] = scores.read_score(folder, direction)
        return found

    def save(self, scored: dict[str, scores.Score], folder: Path) -> None:
        """Write ``scores.json``, in the data set's order."""
        ordered = {d: scored[d] for d in self.directions if d in scored}
        settings = [*arguments(self.dataset.generate), *self.extra]
        scores.write(folder, ordered, self.checkpoint.name, settings)

    def finish(self, scored: dict[str, scores.Score]) -> None:
        """Replace an earlier evaluation; if the disk is full, that one stays."""
        self.save(scored, self.folder)
        for log in self.partial.glob("process-*.log"):
            log.unlink()
        (self.partial / scores.FILE).unlink(missing_ok=True)
        shutil.rmtree(self.complete, ignore_errors=True)
        os.replace(self.partial, self.complete)

    def _is_of_this(self, folder: Path) -> bool:
        try:
            return read_json(folder / FILE) == self._key
        except UsageError:
            return False

    @property
    def _key(self) -> dict:
        """What the translations and scores depend on."""
        texts = [text(d) for d in self.directions for text in (self.source, self.reference)]
        return {
            "checkpoint": _file_state(self.checkpoint),
            "texts": hashlib.sha256(" ".join(map(_file_state, texts)).encode()).hexdigest(),
            "flags": [*arguments(self.dataset.task | self.dataset.generate), *self.extra],
            "sacrebleu": [version("sacrebleu"), *arguments(self.dataset.sacrebleu)],
        }


def _file_state(file: Path) -> str:
    """Name, size and time of a file: they change with its content, which may have gigabytes."""
    found = file.stat()
    return f"{file.name} {found.st_size} {found.st_mtime_ns}"


def evaluate(dataset: Dataset, method: str, flags: Sequence[str]) -> None:
    """Translate and score every direction that has test data, and write ``scores.json``.

    ``flags`` go to ``fairseq-generate``. The step ``translate`` does the work; a dry run prints the same
    work as commands for each direction.
    """
    evaluation = plan(dataset, method, flags)
    scorer = scores.scorer()
    for direction in sorted(set(dataset.directions) - set(evaluation.directions)):
        report(f"{direction} has no test data in {Folders(dataset.name).raw} and is left out")
    run(_consolidated(evaluation))
    tokenizer = dataset.sacrebleu.get("tokenize", "")
    if tokenizer.startswith("flores"):
        comment = f"# the model of sacreBLEU's {tokenizer} tokenizer, which is fetched once"
        run([comment, step("tokenizer", tokenizer)])
    if not dry_run():
        comment = f"# {dataset.name} {method}: translate and score"
        run([comment, step("translate", dataset.name, method, *flags)])
    else:
        for direction in evaluation.directions:
            generation = command("fairseq-generate", *evaluation.generation(direction))
            comment = f"# {dataset.name} {direction}: translate and score"
            run([comment, generation, *evaluation.scoring(direction)])
    if scorer is not None:
        _score_by_comet(evaluation, scorer)


def plan(dataset: Dataset, method: str, flags: Sequence[str]) -> Evaluation:
    """The evaluation of a method's run with the seed ``SEED``.

    Raises:
        UsageError: there is no such method, no checkpoint of it, or no text to translate.
    """
    method_flags(method, dataset)  # raises for an unknown method
    folders = Folders(dataset.name)
    folder = folders.run(run_name(dataset, method))
    checkpoint = folder / f"checkpoint_{dataset.checkpoint}.pt"
    sharded = list(rank_files(checkpoint).values())
    if not dry_run() and not checkpoint.exists() and not sharded:
        raise UsageError(
            f"{checkpoint} is missing: run scripts/train.sh {dataset.name} {method} first"
        )
    if sharded and (not checkpoint.exists() or _newer(sharded[0], checkpoint)):
        checkpoint = folder / "consolidated" / checkpoint.name
    return Evaluation(dataset, folder, checkpoint, _directions(dataset, folders.raw), tuple(flags))


def _directions(dataset: Dataset, raw: Path) -> tuple[str, ...]:
    if not raw.exists():
        if dry_run():
            return dataset.directions
        raise UsageError(f"{raw} is missing: run scripts/prepare.sh {dataset.name} first")
    tested = check(dataset, raw, needed=())
    directions = tuple(d for d in dataset.directions if dataset.pair_of(d) in tested)
    if not directions:
        raise UsageError(f"{raw} has no test data (test.eng-xxx.eng and so on)")
    return directions


def _consolidated(evaluation: Evaluation) -> Iterator[str]:
    """The command that makes one checkpoint of several files of experts, unless it is up to date."""
    whole = evaluation.checkpoint
    parts = whole.parents[1] / whole.name
    if whole.parent.name != "consolidated":
        return
    if whole.exists() and not any(_newer(p, whole) for p in rank_files(parts).values()):
        return
    yield "# the experts of all processes in one checkpoint"
    yield command("smoe", "consolidate", parts, "--output", whole, "--force")


def _newer(one: Path, other: Path) -> bool:
    return one.stat().st_mtime > other.stat().st_mtime


def _score_by_comet(evaluation: Evaluation, scorer: scores.Scorer) -> None:
    done = evaluation.complete
    texts = {
        d: scores.Texts(evaluation.source(d), done / f"{d}.txt", evaluation.reference(d))
        for d in evaluation.directions
    }
    if dry_run():
        run(scorer.command(each, done / f"{d}.comet.json") for d, each in texts.items())
        return
    scorer.score(texts, done)
    scored = evaluation.scored(done)
    evaluation.save(scored, evaluation.folder)
    for direction, score in scored.items():
        print(f"# {direction}: {scores.COMET} {score.others[scores.COMET][0]:.2f}", flush=True)


def translate(dataset: Dataset, method: str, flags: Sequence[str]) -> None:
    """The step of ``scripts/evaluate.sh`` that translates and scores the directions that are not done.

    The longest test set comes first. A direction is scored while others are translated.

    Raises:
        UsageError: a translation or its scoring failed, or another process evaluates this run.
    """
    evaluation = plan(dataset, method, flags)
    files.lock_folder(evaluation.folder, files.EVALUATION)
    scored = evaluation.resume()
    for direction, score in scored.items():
        _print_score(direction, score, "as it was")
    left = [direction for direction in evaluation.directions if direction not in scored]
    if left:
        left.sort(key=lambda d: -evaluation.source(d).stat().st_size)
        count = len(evaluation.directions)
        where = generate.place(evaluation.checkpoint, count, len(left), evaluation.extra)
        print(f"# {where}: {len(left)} of {count} directions, the longest first", flush=True)
        _translate(evaluation, left, where, scored)
    if evaluation.partial.exists():
        evaluation.finish(scored)


def _translate(
    evaluation: Evaluation,
    left: list[str],
    where: generate.Place,
    scored: dict[str, scores.Score],
) -> None:
    from tqdm import tqdm

    jobs = {direction: evaluation.generation(direction) for direction in left}
    progress = _Progress(evaluation, left)
    futures: dict[Future, str] = {}

    def take_scores(every: bool = False) -> None:
        for future in [f for f in futures if every or f.done()]:
            direction = futures.pop(future)
            scored[direction] = future.result()
            evaluation.save(scored, evaluation.partial)
            with tqdm.external_write_mode(sys.stdout):
                count = f"{len(scored)} of {len(evaluation.directions)}"
                _print_score(direction, scored[direction], count)

    terminal, start = sys.stderr.isatty(), time.monotonic()
    shown = start
    with (
        ThreadPoolExecutor(max_workers=2) as scoring,
        closing(generate.translated(where, evaluation.partial, jobs)) as translated,
        tqdm(total=progress.sentences, unit=" sentences", disable=not terminal) as bar,
    ):
        for direction in translated:
            if direction is not None:
                futures[scoring.submit(_score, evaluation, direction)] = direction
                progress.done.append(direction)
            if terminal:
                bar.update(progress.count() - bar.n)
            elif (now := time.monotonic()) - shown >= NEWS_SECONDS:
                shown, count = now, progress.count()
                if count > progress.sentences / 20:  # before that, most time went into loading
                    rest = duration((now - start) * (progress.sentences - count) / count)
                    print(
                        f"  {count:,} of {progress.sentences:,} sentences | {rest} left", flush=True
                    )
            take_scores()
        take_scores(every=True)


def _score(evaluation: Evaluation, direction: str) -> scores.Score:
    """Run the commands of `Evaluation.scoring`; raises UsageError if one fails."""
    for line in evaluation.scoring(direction):
        run_quietly(line)
    return scores.read_score(evaluation.partial, direction)


class _Progress:
    """Counts translated sentences: all of directions in ``done``, those written of other directions."""

    def __init__(self, evaluation: Evaluation, directions: list[str]):
        self.evaluation = evaluation
        self.total = {d: _count(evaluation.source(d), b"\n") for d in directions}
        self.sentences = sum(self.total.values())
        self.done: list[str] = []

    def count(self) -> int:
        found = sum(self.total[direction] for direction in self.done)
        for direction in self.total.keys() - self.done:
            file = self.evaluation.generated(direction)
            if file.exists():
                found += min(self.total[direction], _count(file, b"\nS-") + 1)
        return found


def _count(file: Path, words: bytes) -> int:
    return file.read_bytes().count(words)


def _print_score(direction: str, score: scores.Score, count: str) -> None:
    print(f"# {direction}: {score} ({count})", flush=True)
    if score.has_odd_length:
        report(
            f"the translations of {direction} are {score.length_ratio:.2f} times as long as the references "
            "(expected 0.8 to 1.2): look at them and, where experts have a limit, at the dropped choices by "
            "position and at capacity_gap in train.log (docs/analysis.md)"
        )
