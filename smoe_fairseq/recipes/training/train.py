"""``scripts/train.sh``: one ``fairseq-train`` command, on as many GPUs as there are."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import open_plain
from smoe_fairseq.recipes.config import (
    Dataset,
    Flags,
    arguments,
    dataset_file,
    flag_values,
    has_strata,
    method_flags,
    naming_settings,
)
from smoe_fairseq.recipes.folders import Folders, package_folder, run_name, seed_of
from smoe_fairseq.recipes.processes import command, dry_run, run, warn
from smoe_fairseq.recipes.training import identity, picture
from smoe_fairseq.recipes.training.batch import (
    batch_choices,
    longest_sentence,
    most_positions,
    plan_batch,
    without_sizes,
)
from smoe_fairseq.recipes.training.forecast import forecast
from smoe_fairseq.recipes.training.launcher import Launch, check_port, launch
from smoe_fairseq.recipes.training.precision import precision_flags
from smoe_fairseq.recipes.training.reshard import reshard_lines
from smoe_fairseq.training import screen

LOG = "train.log"
BEGUN = b"Start iterating over samples"  # fairseq's line before the first update
# Processes that prepare batches for a GPU: one takes longer for 16,384 tokens than an H200 does to train
# a base model on them. fairseq's default is 1.
GPU_WORKERS = 2
SCREEN_SECONDS = {True: 1, False: 30}  # between two lines, at a terminal and elsewhere
# Required here, with an example each: fairseq-train misses some of them late, and has useless defaults for
# others (a learning rate of 0.25, training without end).
NEEDED = {
    ("--arch",): "smoe_transformer_base",
    ("--lr",): "0.0008",
    ("--max-tokens", "--batch-size"): "4096",
    ("--max-update", "--max-epoch"): "50000",
}


def train(dataset: Dataset, method: str, flags: Sequence[str], force_resume: bool = False) -> None:
    """Train a method, or resume from its last checkpoint.

    Args:
        flags: of fairseq-train; they override those of the recipe.
        force_resume: resume a run although its flags differ from before.
    """
    folders = Folders(dataset.name)
    if not dry_run():
        folders.check_prepared(dataset.pairs)
    place, words, notes = plan(dataset, method, flags)
    given, folder = flag_values(flags), Path(flag_values(words)["--save-dir"])
    restored = given.keys() & {"--restore-file", "--finetune-from-model"}
    if not restored and (newest := _newest(folder)):
        words += ["--restore-file", str(newest)]
        warn(f"{folder} has no checkpoint_last.pt: training goes on from {newest.name}")
    if not any(folder.glob("checkpoint_last*.pt")):  # a resumed run had its forecast before
        with naming_settings(dataset, (f"methods.{method}", "train", "task"), flags):
            said, warnings = forecast(dataset, place, words)
        notes += said
        for warning in warnings:
            warn(warning)
    if not dry_run():
        if place.uses_master_port:
            check_port()
        # With SLURM, one recipe starts all machines.
        machines = place.nodes if place.launcher == "torchrun" else 1
        run_of = (method, folders.binary, words, place.processes)
        if not identity.claim(*run_of, force_resume, machines):
            advice = "give a larger --max-update to go on, or another SEED for another run"
            print(f"{folder} is trained already, as far as asked for: {advice}")
            return
    line = command(*place.words("fairseq-train"), *words)
    used = flag_values(words)
    sharded = "--expert-parallel" in used and used.get("--moe-freq") != "0"
    lines = [
        f"# {dataset.name} {folder.name}: train; resumes from checkpoint_last.pt if there is one",
        *notes,
        *reshard_lines(folder, place.processes if sharded else 1),
        command("mkdir", "-p", folder),
        line,
    ]
    if identity.is_joined(folder):
        lines = lines[-1:]  # the machine that holds the folder prepares it
    if not dry_run():
        lines.insert(-1, f"# the log is {folder / LOG}")
        folder.mkdir(parents=True, exist_ok=True)
        begin_log(folder / LOG, line)
    _run(lines, folder, place, Path(used["--log-file"]))
    if not dry_run():
        identity.finish(words)
        if not identity.is_joined(folder) and (drawn := picture.draw(folder, folder / LOG)):
            print(f"# {drawn} shows losses and learning rate", flush=True)


def plan(
    dataset: Dataset, method: str, flags: Sequence[str]
) -> tuple[Launch, list[str], list[str]]:
    """Where a method is trained, the words of ``fairseq-train``, and comments on them.

    Raises:
        UsageError: a flag or setting cannot be used, or one is missing.
    """
    place, extra = launch(flags), list(flags)
    folder = flag_values(extra).get("--save-dir")
    folder = Path(folder or Folders(dataset.name).run(run_name(dataset, method)))
    recipe = dataset.train | validation_flags(dataset) | method_flags(method, dataset)
    recipe |= {"seed": seed_of(dataset)}
    recipe, extra, notes = _adapt_flags(dataset, recipe, place, extra, folder)
    words = [*data_arguments(dataset), *arguments(recipe)]
    words += ["--save-dir", str(folder), "--log-file", str(folder / LOG), *extra]
    _check_complete(dataset, words)
    return place, words, notes


def _newest(folder: Path) -> Path | None:
    """The checkpoint with the most updates, in a folder whose ``checkpoint_last.pt`` is missing; else None.

    Training from the start would replace it.
    """
    found = {}
    for file in folder.glob("checkpoint*.pt"):
        name = re.fullmatch(r"(checkpoint(_last|_best|_?\d+(_(\d+))?))(-\w+-?\d+)*\.pt", file.name)
        if name and name[2] == "_last":
            return None
        if name:
            found[int(name[4] or 0), file.stat().st_mtime] = folder / f"{name[1]}.pt"
    return found[max(found)] if found else None


def begin_log(file: Path, line: str) -> None:
    """Append the command to a run's log; raises UsageError where that cannot be written."""
    try:
        with open_plain(file, append=True) as log:
            log.write(f"$ {line}\n".encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None


def validation_flags(dataset: Dataset) -> Flags:
    """The flags of fairseq-train for ``validate`` of a data set: validation by translations."""
    if not (given := dataset.validate):
        return {}
    flags = {
        "validate-sentences": given.get("sentences", 200),
        "validate-beam": given.get("beam"),
        "best-checkpoint-metric": given.get("metric", "chrf"),
        "maximize-best-checkpoint-metric": True,
        **dict.fromkeys(("validate-interval-updates", "save-interval-updates"), given.get("every")),
        "patience": given.get("patience"),
    }
    return {name: value for name, value in flags.items() if value is not None}


def _adapt_flags(
    dataset: Dataset, recipe: Flags, place: Launch, extra: Sequence[str], folder: Path
) -> tuple[Flags, list[str], list[str]]:
    """The recipe's and the user's flags, with those for this launch, batch and precision; and comments."""
    flags, extra, notes = recipe | place.flags(), list(extra), []
    if not place.cpu:
        flags.setdefault("num-workers", GPU_WORKERS)
    if place.cpu and place.gpus:
        each = "process computes" if place.processes == 1 else "processes compute"
        notes.append(f"# {place.processes} {each} on the CPU")
    elif dry_run() and place.launcher == "torchrun":
        notes.append("# a machine without a GPU adds --cpu --distributed-backend gloo, less fp16")
    resumed = identity.flags_of(folder) if identity.is_saved(folder) else {}
    longest = longest_sentence(Folders(dataset.name).binary)
    longest = longest or flags.get("max-source-positions") or 1
    earlier = identity.batch_of_earlier(folder)
    least = min(longest, most_positions(flags, extra))
    batch = plan_batch(dataset, flags, place.processes, extra, least, earlier)
    if batch and (batch.name or batch.ranks > 1 or batch.wanted == earlier):
        sizes = batch.flags()
        flags, extra = flags | sizes, extra if batch.name else without_sizes(extra, sizes)
        notes.append(f"# {batch}")
        if batch.name and dataset.batch:
            notes.append(f"# BATCH: {batch_choices(dataset)}")
        if not batch.kept:
            warn(f"the batch is not of the size asked for: {batch}")
        if batch.name == "release" and has_strata(flags) and "smoe-norm" not in flags:
            notes.append("# --smoe-norm released computes as the released code (docs/reproduce.md)")
    # Among the flags of a data set, `fp16` and `bf16` are earlier names of `precision: auto` and `bf16`.
    flags.pop("fp16", None)
    requested = "bf16" if flags.pop("bf16", False) else dataset.precision
    precision, said = precision_flags(requested, place, [*arguments(flags), *extra], resumed)
    return flags | precision, extra, notes + said


def _run(lines: Sequence[str], folder: Path, place: Launch, log: Path) -> None:
    """`run` for the lines that train; if training began and ended early, say how to go on."""
    logged = log.stat().st_size if log.is_file() else 0
    try:
        run(lines, screen_variables())
    except (SystemExit, UsageError) as ended:
        stopped = isinstance(ended, UsageError) or ended.code >= 128  # by a signal
        if place.uses_master_port and not stopped:
            # Perhaps another run's torchrun has the port, and ours waited for its machines in vain.
            check_port(torchrun=False)
        if not stopped and not (log.is_file() and BEGUN in log.read_bytes()[logged:]):
            raise
        how = f"without {folder}/checkpoint_last.pt the same command starts again"
        last = any(folder.glob("checkpoint_last*.pt"))
        if saved := folder / "checkpoint_last.pt" if last else _newest(folder):
            how = f"the same command goes on from {saved}"
            if not stopped:
                how = f"once the cause is mended, {how}"
        if isinstance(ended, UsageError):
            raise UsageError(f"{ended}; {how}") from None
        warn(f"training has ended early; {how}")
        raise


def data_arguments(dataset: Dataset) -> list[str]:
    """The arguments that training and generation share: data, plugin, task and language tokens."""
    # Text that its authors binarised is one shard.
    shards = 1 if dataset.raw.get("binarised") else dataset.shards
    data = Folders(dataset.name).binary_path(shards)
    words = [data, "--user-dir", package_folder(), *arguments(dataset.task)]
    words += ["--langs", ",".join(dataset.languages)]
    return words + ["--lang-pairs", ",".join(dataset.directions)]


def screen_variables() -> dict[str, str]:
    """Have fairseq-train print a line every few seconds and log the rest; nothing if LOGLEVEL is set."""
    if os.environ.get("LOGLEVEL"):
        return {}
    seconds = SCREEN_SECONDS[sys.stdout.isatty()]
    return {"LOGLEVEL": "WARNING", screen.VARIABLE: str(seconds)}


def _check_complete(dataset: Dataset, words: Sequence[str]) -> None:
    there = flag_values(words).keys()
    for flags, example in NEEDED.items():
        if not there & set(flags):
            line = f"`{flags[0].lstrip('-')}: {example}`"
            places = f"behind the method, or in `train` of {dataset_file(dataset.name)}"
            raise UsageError(f"{flags[0]} is missing: expected it {places}, such as {line}")
