"""``scripts/evaluate.sh``."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from smoe_fairseq import files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import rank_files, write_whole
from smoe_fairseq.recipes import generate, processes, scores
from smoe_fairseq.recipes.config import Dataset, arguments, method_flags
from smoe_fairseq.recipes.download import tokenizer_file
from smoe_fairseq.recipes.processes import (
    Folders,
    command,
    dry_run,
    environment,
    pipe,
    quietly_run,
    report,
    run,
    tested_text,
)
from smoe_fairseq.recipes.raw import check
from smoe_fairseq.recipes.train import data_arguments
from smoe_fairseq.training.screen import duration

FILE = "evaluation.json"
NEWS_SECONDS = 30  # between two lines on how far it is, where there is no terminal
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


# ``scripts/evaluate.sh``: translate the test sets and score them with sacreBLEU.


def evaluate(dataset: Dataset, method: str, extra: Sequence[str]) -> None:
    """Scores every direction that has test data and writes ``scores.json`` when all are done.

    ``extra`` flags go to ``fairseq-generate``. A dry run prints a command for each direction; what is run
    does the same in fewer processes (translate.py).
    """
    evaluation = plan(dataset, method, extra)
    for direction in sorted(set(dataset.directions) - set(evaluation.directions)):
        report(f"{direction} has no test data in {Folders(dataset.name).raw} and is left out")
    run(_consolidated(evaluation))
    run(_tokenizer(dataset))
    if dry_run():
        for direction in evaluation.directions:
            run(_commands(evaluation, direction))
    else:
        words = ("python", "-m", "smoe_fairseq.recipes", "translate", dataset.name, method, *extra)
        run([f"# {dataset.name} {method}: translate and score", command(*words)])


def plan(dataset: Dataset, method: str, extra: Sequence[str]) -> Evaluation:
    """What is to be evaluated, of the run that ``SEED`` chooses.

    Raises:
        UsageError: there is no such method, no checkpoint of it, or no text to translate.
    """
    method_flags(method, dataset)  # An unknown method is named as such.
    folders = Folders(dataset.name)
    folder = folders.run(processes.run_name(dataset, method))
    checkpoint = folder / f"checkpoint_{dataset.checkpoint}.pt"
    sharded = list(rank_files(checkpoint).values())
    if not dry_run() and not checkpoint.exists() and not sharded:
        raise UsageError(
            f"{checkpoint} is missing: run scripts/train.sh {dataset.name} {method} first"
        )
    if sharded and (not checkpoint.exists() or _newer(sharded[0], checkpoint)):
        checkpoint = folder / "consolidated" / checkpoint.name
    return Evaluation(dataset, folder, checkpoint, _directions(dataset, folders.raw), tuple(extra))


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
    """Where the experts are in several files: once, one file with all of them."""
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


def _tokenizer(dataset: Dataset) -> Iterator[str]:
    name = dataset.sacrebleu.get("tokenize", "")
    if name.startswith("flores"):
        yield f"# the model of sacreBLEU's {name} tokenizer, which is fetched once"
        yield command("python", "-m", "smoe_fairseq.recipes", "tokenizer", name)


def _commands(evaluation: Evaluation, direction: str) -> Iterator[str]:
    yield f"# {evaluation.dataset.name} {direction}: translate and score"
    yield command("fairseq-generate", *evaluation.generation(direction))
    yield from evaluation.scoring(direction)


# Step of ``scripts/evaluate.sh``: translates and scores all directions, those that are done but
# once.


def translate(evaluation: Evaluation) -> None:
    """Every process loads the model once and takes the longest of the directions that are left.

    A direction is scored when it is done, beside the translation of others. After an interruption what is
    done is not done again.

    Raises:
        UsageError: a translation or its scoring failed, or another process evaluates this run.
    """
    files.take(evaluation.folder, files.EVALUATION)
    scored = evaluation.resume()
    for direction, score in scored.items():
        _show(direction, score, "as it was")
    left = [direction for direction in evaluation.directions if direction not in scored]
    if left:
        left.sort(key=lambda d: -evaluation.source(d).stat().st_size)
        where = generate.place(
            evaluation.checkpoint, len(evaluation.directions), len(left), evaluation.extra
        )
        print(
            f"# {where}: {len(left)} of {len(evaluation.directions)} directions, the longest first",
            flush=True,
        )
        with (
            generate.Pool(where, evaluation.partial) as processes,
            ThreadPoolExecutor(max_workers=2) as scoring,
        ):
            _translate(evaluation, left, processes, scoring, scored)
    if evaluation.partial.exists():
        evaluation.finish(scored)


def _translate(
    evaluation: Evaluation,
    left: list[str],
    processes: generate.Pool,
    scoring: ThreadPoolExecutor,
    scored: dict[str, scores.Score],
) -> None:
    from tqdm import tqdm

    jobs = [generate.Job(direction, evaluation.generation(direction)) for direction in left]
    progress = _Progress(evaluation, left)
    futures: dict[Future, str] = {}

    def take_scores(every: bool = False) -> None:
        for future in [f for f in futures if every or f.done()]:
            direction = futures.pop(future)
            scored[direction] = future.result()
            evaluation.save(scored, evaluation.partial)
            with tqdm.external_write_mode(sys.stdout):
                count = f"{len(scored)} of {len(evaluation.directions)}"
                _show(direction, scored[direction], count)

    terminal, start = sys.stderr.isatty(), time.monotonic()
    shown = start
    with tqdm(total=progress.sentences, unit=" sentences", disable=not terminal) as bar:
        for job in processes.finished(jobs):
            if job is not None:
                futures[scoring.submit(_score, evaluation, job.direction)] = job.direction
                progress.done.append(job.direction)
            if terminal:
                bar.update(progress.count() - bar.n)
            elif (now := time.monotonic()) - shown >= NEWS_SECONDS:
                shown, count = now, progress.count()
                if count > progress.sentences / 20:  # before, it is mostly the time of loading
                    left = duration((now - start) * (progress.sentences - count) / count)
                    print(
                        f"  {count:,} of {progress.sentences:,} sentences | {left} left", flush=True
                    )
            take_scores()
        take_scores(every=True)


def _score(evaluation: Evaluation, direction: str) -> scores.Score:
    for line in evaluation.scoring(direction):
        quietly_run(line, environment())
    return scores.read_score(evaluation.partial, direction)


class _Progress:
    """How many sentences are translated: all of the directions in ``done``, and of others what is written."""

    def __init__(self, evaluation: Evaluation, directions: list[str]):
        self.evaluation = evaluation
        self.total = {d: _count(evaluation.source(d), b"\n") for d in directions}
        self.sentences = sum(self.total.values())
        self.done: list[str] = []

    def count(self) -> int:
        done = sum(self.total[direction] for direction in self.done)
        return done + sum(self._written())

    def _written(self) -> Iterator[int]:
        for direction in self.total.keys() - self.done:
            file = self.evaluation.generated(direction)
            if file.exists():
                yield min(self.total[direction], _count(file, b"\nS-") + 1)


def _count(file, words: bytes) -> int:
    return file.read_bytes().count(words)


def _show(direction: str, score: scores.Score, count: str) -> None:
    print(f"# {direction}: {score} ({count})", flush=True)
    if score.has_odd_length:
        report(
            f"the translations of {direction} are {score.length_ratio:.2f} times as long as the references "
            "(expected 0.8 to 1.2): look at them and, where experts have a limit, at the dropped choices by "
            "position and at capacity_gap in train.log (docs/analysis.md)"
        )
