"""``scripts/train.sh``: one ``fairseq-train`` command, on as many GPUs as there are."""

from collections.abc import Sequence

from smoe_fairseq.recipes import seeds
from smoe_fairseq.recipes.folders import Folders, user_dir
from smoe_fairseq.recipes.launch import launch
from smoe_fairseq.recipes.shell import command, dry_run, report, run
from smoe_fairseq.recipes.training import batch, identity, rendezvous
from smoe_fairseq.recipes.training.foretell import foretold
from smoe_fairseq.recipes.training.precision import precision_flags
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.settings.method import has_strata, method_flags
from smoe_fairseq.system.errors import UsageError

FORCE = "--force-resume"
# What fairseq-train asks for late, or has a default for that nobody means: a rate of 0.25, and no end.
NEEDED = {
    ("--arch", "-a"): "smoe_transformer_base",
    ("--lr",): "0.0008",
    ("--max-tokens", "--batch-size"): "4096",
    ("--max-update", "--max-epoch"): "50000",
}


def train(dataset: Dataset, method: str, extra: Sequence[str]) -> None:
    """Trains a method, or resumes from its last checkpoint; ``extra`` flags have the last word.

    Beside those of fairseq-train there is ``--force-resume``: go on with other flags than before.
    """
    force = FORCE in extra
    extra = [word for word in extra if word != FORCE]
    flags = dataset.train | method_flags(method, dataset) | {"seed": seeds.seed_of(dataset)}
    folders = Folders(dataset.name)
    if not dry_run() and not folders.binary.exists():
        raise UsageError(
            f"{folders.binary} is missing: run scripts/prepare.sh {dataset.name} first"
        )
    place = launch(extra)
    flags |= place.flags()
    notes = []
    if place.cpu and place.gpus:
        each = "process computes" if place.processes == 1 else "processes compute"
        notes.append(f"# {place.processes} {each} on the CPU")
    elif dry_run() and place.launcher == "torchrun":
        notes.append("# a machine without a GPU adds --cpu --distributed-backend gloo, less fp16")
    if dataset.batch:
        planned = batch.plan(dataset, place.processes, extra)
        flags |= {"max-tokens": planned.max_tokens, "update-freq": planned.update_freq}
        notes += [f"# {planned}", f"# BATCH: {batch.choices(dataset)}"]
        if not planned.kept:
            report(f"the batch is not of the size asked for: {planned}")
        if planned.name == "release" and has_strata(flags) and "smoe-norm" not in flags:
            notes.append(
                "# --smoe-norm released computes as the released code does (docs/reproduce.md)"
            )
    chosen, said = precision_flags(flags, place, extra)
    flags |= chosen
    notes += said
    folder = folders.run(seeds.run_name(dataset, method))
    words = [*data_arguments(dataset), *arguments(flags)]
    words += ["--save-dir", str(folder), "--log-file", str(folder / "train.log"), *extra]
    _check_complete(dataset, words)
    if not dry_run():
        if place.meets_at_port:
            rendezvous.check_port()
        machines = (
            place.nodes if place.launcher == "torchrun" else 1
        )  # SLURM's start is one for all
        own = (method, folders.binary, words, place.processes)
        if not identity.claim(*own, force, machines):
            print(
                f"{folder} is trained already, as far as asked for: give a larger --max-update to go on, or "
                "another SEED for another run"
            )
            return
    # A run that goes on has been told of, and one that is refused need not be.
    if not any(folder.glob("checkpoint_last*.pt")):
        said, warnings = foretold(dataset, place, words)
        notes += said
        for warning in warnings:
            report(warning)
    lines = [
        f"# {dataset.name} {folder.name}: train; resumes from checkpoint_last.pt if there is one",
        *notes,
        command("mkdir", "-p", folder),
        command(*place.words("fairseq-train"), *words),
    ]
    try:
        run(lines)
    except SystemExit as ended:
        # Of another run, whose torchrun answers: ours has waited for its own machines in vain. A status of
        # 128 and above is that of a signal.
        if place.meets_at_port and ended.code < 128:
            rendezvous.raise_if_taken()
        if ended.code > 128 and any(folder.glob("checkpoint_last*.pt")):
            report(f"interrupted: the same command goes on from {folder}/checkpoint_last.pt")
        raise
    if not dry_run():
        identity.finish(words)


def _check_complete(dataset: Dataset, words: Sequence[str]) -> None:
    there = {word.partition("=")[0] for word in words}
    for (flag, *others), example in NEEDED.items():
        if not there & {flag, *others}:
            raise UsageError(
                f"{flag} is missing: expected it behind the method, or in `train` of "
                f"configs/datasets/{dataset.name}.yaml, such as `{flag.lstrip('-')}: {example}`"
            )


def data_arguments(dataset: Dataset) -> list[str]:
    """What training and generation have to agree on: data, plugin, task and language tokens."""
    # Text that was binarised by others is in one part; of text of one's own the shards are there by now.
    shards = 1 if dataset.raw.get("binarised") else dataset.shards
    data = Folders(dataset.name).binary_path(shards)
    words = [data, "--user-dir", user_dir(), *arguments(dataset.task)]
    words += ["--langs", ",".join(dataset.languages)]
    return words + ["--lang-pairs", ",".join(dataset.directions)]
