"""``scripts/train.sh``: one ``fairseq-train`` command."""

from collections.abc import Iterator, Sequence

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset, arguments, method_flags
from smoe_fairseq.recipes.folders import Folders, user_dir
from smoe_fairseq.recipes.shell import command, dry_run, run


def train(dataset: Dataset, method: str, extra: Sequence[str]) -> None:
    """Trains a method, or resumes from its last checkpoint; ``extra`` flags have the last word."""
    flags = dataset.train | method_flags(method, dataset)
    folders = Folders(dataset.name)
    if not dry_run() and not folders.binary.exists():
        raise UsageError(
            f"{folders.binary} is missing: run scripts/prepare.sh {dataset.name} first"
        )
    run(_commands(dataset, method, flags, extra))


def data_arguments(dataset: Dataset) -> list[str]:
    """What training and generation have to agree on: data, plugin, task and language tokens."""
    words = [str(Folders(dataset.name).binary), "--user-dir", user_dir(), *arguments(dataset.task)]
    words += ["--langs", ",".join(dataset.languages)]
    return words + ["--lang-pairs", ",".join(dataset.directions)]


def _commands(dataset: Dataset, method: str, flags, extra: Sequence[str]) -> Iterator[str]:
    folder = Folders(dataset.name).run(method)
    yield f"# {dataset.name} {method}: train; resumes from checkpoint_last.pt if there is one"
    yield command("mkdir", "-p", folder)
    yield command(
        *("fairseq-train", *data_arguments(dataset), *arguments(flags)),
        *("--save-dir", folder, "--log-file", folder / "train.log", *extra),
    )
