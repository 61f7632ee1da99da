"""Step of ``scripts/evaluate.sh``: translates and scores all directions, those that are done but once."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from smoe_fairseq.recipes.child import quietly_run
from smoe_fairseq.recipes.evaluating import pool, scores
from smoe_fairseq.recipes.evaluating.evaluation import Evaluation
from smoe_fairseq.recipes.shell import environment, report
from smoe_fairseq.system import lock


def translate(evaluation: Evaluation) -> None:
    """Every process loads the model once and takes the longest of the directions that are left.

    A direction is scored when it is done, beside the translation of others. After an interruption what is
    done is not done again.

    Raises:
        UsageError: a translation or its scoring failed, or another process evaluates this run.
    """
    lock.take(evaluation.folder, lock.EVALUATION)
    scored = evaluation.resume()
    for direction, score in scored.items():
        _show(direction, score, "as it was")
    left = [direction for direction in evaluation.directions if direction not in scored]
    if left:
        left.sort(key=lambda d: -evaluation.source(d).stat().st_size)
        where = pool.place(
            evaluation.checkpoint, len(evaluation.directions), len(left), evaluation.extra
        )
        print(
            f"# {where}: {len(left)} of {len(evaluation.directions)} directions, the longest first",
            flush=True,
        )
        with (
            pool.Pool(where, evaluation.partial) as processes,
            ThreadPoolExecutor(max_workers=2) as scoring,
        ):
            _translate(evaluation, left, processes, scoring, scored)
    if evaluation.partial.exists():
        evaluation.finish(scored)


def _translate(
    evaluation: Evaluation,
    left: list[str],
    processes: pool.Pool,
    scoring: ThreadPoolExecutor,
    scored: dict[str, scores.Score],
) -> None:
    from tqdm import tqdm

    jobs = [pool.Job(direction, evaluation.generation(direction)) for direction in left]
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

    terminal = sys.stderr.isatty()
    with tqdm(total=progress.sentences, unit=" sentences", disable=not terminal) as bar:
        for job in processes.finished(jobs):
            if job is not None:
                futures[scoring.submit(_score, evaluation, job.direction)] = job.direction
                progress.done.append(job.direction)
            if terminal:
                bar.update(progress.count() - bar.n)
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
