"""``scripts/evaluate.sh``: translate the test sets and score them with sacreBLEU."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.checkpoint.names import rank_files
from smoe_fairseq.recipes import scores, seeds
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.raw import check
from smoe_fairseq.recipes.shell import command, dry_run, pipe, report, run, unfinished
from smoe_fairseq.recipes.train import data_arguments
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.settings.method import method_flags
from smoe_fairseq.system.errors import UsageError


def evaluate(dataset: Dataset, method: str, extra: Sequence[str]) -> None:
    """Scores every direction that has test data and writes ``scores.json`` when all are done.

    Translations are scored against the raw references, not against what binarisation left of them.
    ``extra`` flags go to ``fairseq-generate``.
    """
    method_flags(method, dataset)  # An unknown method is named as such.
    folders = Folders(dataset.name)
    folder = folders.run(seeds.run_name(dataset, method))
    checkpoint = folder / f"checkpoint_{dataset.checkpoint}.pt"
    directions = dataset.directions
    sharded = list(rank_files(checkpoint).values())
    if not dry_run() and not checkpoint.exists() and not sharded:
        raise UsageError(
            f"{checkpoint} is missing: run scripts/train.sh {dataset.name} {method} first"
        )
    if folders.raw.exists():
        tested = check(dataset, folders.raw, needed=())
        directions = tuple(d for d in dataset.directions if dataset.pair_of(d) in tested)
        for direction in sorted(set(dataset.directions) - set(directions)):
            report(f"{direction} has no test data in {folders.raw} and is left out")
    elif not dry_run():
        raise UsageError(f"{folders.raw} is missing: run scripts/prepare.sh {dataset.name} first")
    if not directions:
        raise UsageError(f"{folders.raw} has no test data (test.eng-xxx.eng and so on)")

    if sharded and (not checkpoint.exists() or _newer(sharded[0], checkpoint)):
        whole = folder / "consolidated" / checkpoint.name
        run(_consolidate(checkpoint, whole))
        checkpoint = whole
    run(_tokenizer(dataset))
    with unfinished(folder / "test.partial") as partial:
        run([command("rm", "-rf", partial), command("mkdir", "-p", partial)])
        for direction in directions:
            run(_commands(dataset, direction, checkpoint, partial, extra))
            if not dry_run():
                _show(direction, scores.read_score(partial, direction))
        # Before the translations take their place: on a full disk the old ones stay, with their scores.
        if not dry_run():
            settings = [*arguments(dataset.generate), *extra]
            scores.write(folder, partial, checkpoint, settings, directions)
        run([command("rm", "-rf", folder / "test"), command("mv", partial, folder / "test")])


def _show(direction: str, score: scores.Score) -> None:
    print(f"# {direction}: {score}", flush=True)
    if score.has_odd_length:
        report(
            f"the translations of {direction} are {score.length_ratio:.2f} times as long as the references "
            "(expected 0.8 to 1.2): look at them and, where experts have a limit, at the dropped choices by "
            "position and at capacity_gap in train.log (docs/analysis.md)"
        )


def _newer(one: Path, other: Path) -> bool:
    return one.stat().st_mtime > other.stat().st_mtime


def _consolidate(checkpoint: Path, whole: Path) -> Iterator[str]:
    yield "# the experts of all processes in one checkpoint"
    yield command("smoe", "consolidate", checkpoint, "--output", whole, "--force")


def _tokenizer(dataset: Dataset) -> Iterator[str]:
    name = dataset.sacrebleu.get("tokenize", "")
    if name.startswith("flores"):
        yield f"# the model of sacreBLEU's {name} tokenizer, which is fetched once"
        yield command("python", "-m", "smoe_fairseq.recipes", "tokenizer", name)


def _commands(
    dataset: Dataset, direction: str, checkpoint: Path, folder: Path, extra: Sequence[str]
) -> Iterator[str]:
    source, target = direction.split("-")
    reference = Folders(dataset.name).raw / f"test.{dataset.pair_of(direction)}.{target}"
    generated, translation = folder / direction, folder / f"{direction}.txt"
    yield f"# {dataset.name} {direction}: translate and score"
    yield command(
        *("fairseq-generate", *data_arguments(dataset)),
        *("--source-lang", source, "--target-lang", target, "--gen-subset", "test"),
        *("--path", checkpoint, *arguments(dataset.generate)),
        *("--results-path", generated, *extra),
    )
    yield pipe(
        command("grep", "^D-", generated / "generate-test.txt"),
        command("sort", "-t-", "-k2,2n"),
        command("cut", "-f3-", output=translation),
    )
    yield command(
        *("sacrebleu", reference, "-i", translation, *arguments(dataset.sacrebleu)),
        output=folder / f"{direction}.json",
    )
