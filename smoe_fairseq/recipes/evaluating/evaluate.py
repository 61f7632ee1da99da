"""``scripts/evaluate.sh``: translate the test sets and score them with sacreBLEU."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.checkpoint.names import rank_files
from smoe_fairseq.recipes import seeds
from smoe_fairseq.recipes.evaluating.evaluation import Evaluation
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.preparing.raw import check
from smoe_fairseq.recipes.shell import command, dry_run, report, run
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.method import method_flags
from smoe_fairseq.system.errors import UsageError


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
    folder = folders.run(seeds.run_name(dataset, method))
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
