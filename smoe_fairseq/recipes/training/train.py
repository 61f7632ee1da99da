"""``scripts/train.sh``: one ``fairseq-train`` command, on all GPUs of this machine by default."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from smoe_fairseq.checkpoints.content import is_cut_off
from smoe_fairseq.compat.checkpoint_names import newest_checkpoint, saved
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import open_plain
from smoe_fairseq.plugins import imported
from smoe_fairseq.recipes import pretrained
from smoe_fairseq.recipes.data.prepare import changed_setting
from smoe_fairseq.recipes.datasets import Dataset, naming_settings
from smoe_fairseq.recipes.folders import Folders, package_folder, run_name, seed_of
from smoe_fairseq.recipes.methods import PRETRAINED, has_strata, method_flags
from smoe_fairseq.recipes.processes import CommandError, command, run, warn
from smoe_fairseq.recipes.program_flags import Flags, arguments, flag_values, parse_flags, value_of
from smoe_fairseq.recipes.training import identity, picture
from smoe_fairseq.recipes.training.batch import (
    batch_choices,
    longest_sentence,
    most_positions,
    plan_batch,
    without_flags,
)
from smoe_fairseq.recipes.training.forecast import forecast
from smoe_fairseq.recipes.training.launcher import Launch, check_port, plan_launch
from smoe_fairseq.recipes.training.precision import precision_flags
from smoe_fairseq.recipes.training.reshard import reshard_lines
from smoe_fairseq.training import screen

LOG = "train.log"
CRITERION = "smoe_label_smoothed_cross_entropy"
STARTED_LINE = b"Start iterating over samples"  # of fairseq, before the first update
# Processes that prepare batches for a GPU. One (fairseq's default) is slower with 16,384 tokens than an
# H200 that trains a base model on them.
GPU_WORKERS = 2
SCREEN_SECONDS = {True: 1, False: 30}  # between two lines, at a terminal and elsewhere
_OF_VALIDATE = {  # flags, and the keys of `validate` that set them
    "validate-interval-updates": "every",
    "save-interval-updates": "every",
    "patience": "patience",
    "validate-sentences": "sentences",
    "validate-beam": "beam",
    "best-checkpoint-metric": "metric",
    "maximize-best-checkpoint-metric": "metric",
}
# What a run is to forget of the checkpoint that it begins with, and not of its own.
_RESETS = ("reset-optimizer", "reset-lr-scheduler", "reset-dataloader", "reset-meters")
_MAXIMIZED = ("chrf", "bleu")  # as metrics of the best checkpoint
# Required flags, each with an example. fairseq-train reports some of them late, and has bad defaults for
# others (a learning rate of 0.25, endless training).
REQUIRED_FLAGS = {
    ("--arch",): "smoe_transformer_base",
    ("--lr",): "0.0008",
    ("--max-tokens", "--batch-size"): "4096",
    ("--max-update", "--max-epoch"): "50000",
}


def train(dataset: Dataset, method: str, flags: Sequence[str], force_resume: bool = False) -> None:
    """Train a method, or resume it; ``flags`` of fairseq-train override those of the recipe."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("torchrun: a recipe starts it itself; expected --gpus instead")
    folders = Folders(dataset)
    if not dataset.settings.dry_run or pretrained.source_of(dataset):  # whose sizes are needed
        folders.check_prepared()
        if changed := changed_setting(dataset):
            warn(f"{folders.binary} was prepared with other {changed}, and is trained on as it is")
    launch, words, notes = plan(dataset, method, flags)
    given = flag_values(words)
    sizes = given.get("--smoe-strata", "")
    if method.startswith("smoe-") and sizes.isdecimal():
        warn(f"{method} has one stratum of {sizes} experts; smoe-4-4 has two of 4")
    folder = Path(given["--save-dir"])
    words = _keeping(folder, words, flags)
    restored = given.get("--restore-file")
    if newer := _newer_than_restored(folder, restored):
        words = [*without_flags(words, _RESETS), "--restore-file", "checkpoint_last.pt"]
        warn(f"training resumes from {newer}, newer than --restore-file: delete it otherwise")
    start, upcycle = [], []  # in the command, and before it
    if started := pretrained.started(dataset, words):
        start, upcycle = _start(dataset, words, folder)
        started += start
    claimed = [*words, *started]
    lasts = () if restored and not newer else folder.glob("checkpoint_last*.pt")
    for last in filter(is_cut_off, lasts):
        raise UsageError(f"{last} is cut off: delete it to resume from the newest other one")
    if not restored and (newest := newest_checkpoint(folder)):
        words, start = without_flags(words, {"finetune-from-model"}), []  # fairseq refuses both
        words += ["--restore-file", str(newest)]
        warn(f"{folder} has no checkpoint_last.pt: training resumes from {newest.name}")
    sections = (f"methods.{method}", "train", "task")
    if not any(folder.glob("checkpoint_last*.pt")):  # a resumed run had its forecast earlier
        with naming_settings(dataset, sections, flags):
            comments, warnings = forecast(dataset, launch, words)
        notes += comments
        for warning in warnings:
            warn(warning)
    # With SLURM, this one recipe starts all machines.
    machines = launch.nodes if launch.launcher == "torchrun" else 1
    if machines > 1:
        met = ":".join(map(str, launch.endpoint))
        wait = f"# the {machines} machines wait for one another at {met} for up to ten minutes"
        notes += [f"{wait}; MASTER_ADDR is the first one's address, on all of them"]
    if not dataset.settings.dry_run:
        run_identity = (method, folders.binary, claimed, launch.processes)
        try:
            unfinished = identity.claim(*run_identity, force_resume, machines)
        except UsageError:  # of other flags: perhaps one is mistyped
            with naming_settings(dataset, sections, flags), quietly():
                parse_flags("fairseq-train", words)
            raise
        if not unfinished:
            limits = [*identity.limits(flag_values(words))] or ["--max-update"]
            ended = " (the one that was reached)" * (len(limits) > 1)
            advice = f"give a larger {' or '.join(limits)}{ended} to continue, or another --seed"
            print(f"{folder} is trained already, to the requested limits: {advice}")
            return
        if launch.uses_master_port and folder not in identity.joined:
            check_port(launch)
    _run_lines(dataset, launch, words, start, notes, upcycle)


def _keeping(folder: Path, words: list[str], flags: Sequence[str]) -> list[str]:
    """``words``, by which a run keeps as many checkpoints of updates as it has, unless ``flags`` say it.

    Where those of epochs are to be kept, they are saved.
    """
    values, flag = flag_values(words), "--keep-interval-updates"
    if "--keep-last-epochs" in values:
        words = without_flags(words, {"no-epoch-checkpoints"})
    number = sum(updates > 0 for _, updates in saved(folder.glob("checkpoint*.pt")).values())
    now = values.get(flag, "")
    if flag in flag_values(flags) or not (now.isdecimal() and 0 < int(now) < number):
        return words
    return [*without_flags(words, {flag.removeprefix("--")}), flag, str(number)]


def _newer_than_restored(folder: Path, given: str | None) -> Path | None:
    """The run's last checkpoint, if a run that began with the given file, or one after it, saved that."""
    lasts = folder.glob("checkpoint_last*.pt")
    last = max(lasts, key=lambda path: path.stat().st_mtime_ns, default=None)
    if given is None or last is None or not Path(given).is_file():
        return None
    is_newer = last.stat().st_mtime_ns > Path(given).stat().st_mtime_ns
    return last if is_newer or identity.began_with(folder, Path(given)) else None


def _run_lines(
    dataset: Dataset,
    launch: Launch,
    words: list[str],
    start: list[str],
    notes: list[str],
    upcycle: list[str],
) -> None:
    """Run or print the commands of a training, and draw its picture.

    ``words`` and ``start`` are for ``fairseq-train``, the latter only to begin a run; ``upcycle`` has the
    commands that give experts to the pretrained model before; ``notes`` are comments to print.
    """
    values = flag_values(words)
    folder = Path(values["--save-dir"])
    line = command(*launch.words("fairseq-train"), *words, *start)
    sharded = "--expert-parallel" in values and values.get("--moe-freq") != "0"
    lines = [
        f"# {dataset.name} {folder.name}: train; resumes from checkpoint_last.pt if there is one",
        *notes,
        *reshard_lines(folder, launch.processes if sharded else 1),
        command("mkdir", "-p", folder),
        *([] if identity.is_saved(folder) else upcycle),
        line,
    ]
    if folder in identity.joined:
        lines = lines[-1:]  # the first machine prepares the folder
    if not dataset.settings.dry_run:
        lines.insert(-1, f"# the log is {values['--log-file']}")
        folder.mkdir(parents=True, exist_ok=True)
        begin_log(folder / LOG, line)
    _run(lines, folder, launch, Path(values["--log-file"]))
    if not dataset.settings.dry_run:
        if not identity.is_saved(folder) and "--no-save" not in values:
            ended = "training has ended before its first checkpoint"
            raise UsageError(f"{folder}: {ended}: see {values['--log-file']}")
        identity.finish(words)
        (folder / pretrained.UPCYCLED).unlink(missing_ok=True)
        if folder not in identity.joined:
            try:
                picture_file = picture.draw(folder, Path(values["--log-file"]))
                result = f"{picture_file} shows losses and learning rate"
            except UsageError as error:
                result = f"no picture of the training: {error}"
            print(f"# {result}", flush=True)


def _start(dataset: Dataset, words: Sequence[str], folder: Path) -> tuple[list[str], list[str]]:
    """The flag that starts from the pretrained model, and the command that gives it experts before."""
    model = Folders(dataset).binary / pretrained.MODEL
    if (experts := pretrained.upcycled_flags(dataset, words)) is None:
        return ["--finetune-from-model", str(model)], []
    upcycled, seed = folder / pretrained.UPCYCLED, flag_values(words).get("--seed", "1")
    output = ("--output", upcycled, "--force", "--seed", seed)
    upcycle = command("smoe", "upcycle", model, *output, *experts)
    return ["--finetune-from-model", str(upcycled)], [upcycle]


def plan(
    dataset: Dataset, method: str, flags: Sequence[str]
) -> tuple[Launch, list[str], list[str]]:
    """The launch of a method's training, the words of ``fairseq-train``, and comments on them."""
    if method == PRETRAINED:
        raise UsageError(f"{method} is the model before training; expected a method, such as dense")
    typed, of_method = flag_values(flags), method_flags(method, dataset)
    own = dataset.train | of_method

    def number(flag: str) -> int:
        value = str(typed.get(f"--{flag}", own.get(flag)))
        return int(value) if value.isdecimal() else 0

    folder = Path(typed.get("--save-dir") or Folders(dataset).runs / run_name(dataset, method))
    # By the loss at the end of each epoch, this schedule lowers the rate.
    is_plateau = typed.get("--lr-scheduler", own.get("lr-scheduler")) == "reduce_lr_on_plateau"
    validation = validation_flags(dataset, 1 if is_plateau else number("max-epoch"))
    recipe = dataset.train | validation | of_method | {"seed": seed_of(dataset)}
    recipe = {flag: value for flag, value in recipe.items() if value is not None}
    metric = typed.get("--best-checkpoint-metric", of_method.get("best-checkpoint-metric"))
    if metric and "maximize-best-checkpoint-metric" in validation.keys() - of_method.keys():
        recipe["maximize-best-checkpoint-metric"] = metric in _MAXIMIZED
    if typed.get("--criterion", recipe.get("criterion")) != CRITERION:
        recipe.pop("save-interval-minutes", None)  # a flag of ours
    updates, interval = number("max-update"), number("log-interval")
    every, saves = number("validate-interval-updates"), number("save-interval-updates")
    if "--save-interval-updates" in typed:
        every = every or validation.get("validate-interval-updates", 0)
        if saves and every % saves and "--disable-validation" not in typed:
            best = f"a divisor of --validate-interval-updates {every}, to save the best checkpoint"
            raise UsageError(f"--save-interval-updates {saves}: expected {best}")
    elif "--validate-interval-updates" in typed and every:  # the best of all is saved
        recipe["save-interval-updates"] = every if not saves or every % saves else saves
    if 0 < updates < 10 * interval:
        recipe["log-interval"] = max(1, updates // 10)
    launch = plan_launch(dataset.settings, [*arguments(recipe), *flags])
    recipe, extra, notes = _adapt_flags(dataset, recipe, launch, flags, folder)
    words = [*data_arguments(dataset), *arguments(recipe)]
    words += ["--save-dir", str(folder), "--log-file", str(folder / LOG), *extra]
    _check_complete(dataset, words)
    if dataset.start:
        pretrained.check_options(dataset, words)
        notes.insert(0, f"# fine-tunes {dataset.start['source']}")
    return launch, words, notes


def begin_log(file: Path, line: str) -> None:
    """Append the command to a run's log; raises UsageError if it cannot be written.

    The log of a run whose checkpoints are gone is moved to the end of ``train.log.old``.
    """
    anew = not identity.is_saved(file.parent) and file.parent not in identity.joined
    try:
        if anew and file.is_file() and not file.is_symlink():
            with open_plain(file.with_name(f"{file.name}.old"), append=True) as old:
                old.write(file.read_bytes())
            file.unlink()
        with open_plain(file, append=True) as log:
            log.write(f"$ {line}\n".encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None


def validation_flags(dataset: Dataset, epochs: int = 0) -> Flags:
    """The flags of fairseq-train for the data set's ``validate``: by translations, or by the loss.

    Args:
        epochs: validate after so many epochs, too, where ``every`` counts updates; 0: never.

    Raises:
        UsageError: the file sets one of them otherwise in ``train``.
    """
    settings = dataset.validation
    if settings.get("metric") == "loss":
        settings = {k: v for k, v in settings.items() if k not in ("sentences", "beam")}
        own = dataset.own("validate")
        if extra := [key for key in ("sentences", "beam") if own.get(key) is not None]:
            fault = "has no effect with `metric: loss`, which translates nothing"
            raise UsageError(f"{dataset.file}: `validate.{extra[0]}` {fault}")
    flags = {flag: settings[key] for flag, key in _OF_VALIDATE.items() if key in settings}
    if "metric" in settings:
        flags["maximize-best-checkpoint-metric"] = settings["metric"] in _MAXIMIZED
    own = dataset.own("train")
    for flag, value in flags.items():
        if (given := own.get(flag)) is not None and str(given) != str(value):
            key = _OF_VALIDATE[flag]
            expected = f"expected it as `validate: {{{key}: ...}}`, by which it is {value}"
            raise UsageError(f"{dataset.file}: `train.{flag}` is {given}; {expected}")
    if "every" in settings:  # not at the end of epochs, too, which `patience` would count
        flags["validate-interval"] = value_of(dataset.train, "validate-interval", epochs or 10**6)
    return flags


def _adapt_flags(
    dataset: Dataset, recipe: Flags, launch: Launch, extra: Sequence[str], folder: Path
) -> tuple[Flags, list[str], list[str]]:
    """The recipe's and the user's flags, adapted to launch, batch and precision; and comments."""
    flags, extra, notes = recipe | launch.flags(), list(extra), []
    flags |= {name: recipe[name] for name in recipe.keys() & {"ddp-backend"}}
    if not launch.cpu:
        flags.setdefault("num-workers", GPU_WORKERS)
    if launch.cpu and launch.gpus:
        each = "rank computes" if launch.processes == 1 else "ranks compute"
        notes.append(f"# {launch.processes} {each} on the CPU")
    elif launch.settings.dry_run and launch.launcher == "torchrun":
        notes.append("# on a machine without a GPU, --cpu --distributed-backend gloo replaces fp16")
    resumed = identity.record(folder).get("flags") if identity.is_saved(folder) else None
    longest = longest_sentence(Folders(dataset).binary)
    longest = longest or flags.get("max-source-positions") or 1
    least = min(longest, most_positions(flags, extra))
    batch = plan_batch(dataset, flags, launch.processes, extra, least)
    if batch and (batch.name or batch.ranks > 1):
        sizes = batch.flags()
        flags, extra = flags | sizes, extra if batch.name else without_flags(extra, sizes)
        notes.append(f"# {batch}")
        if batch.name and dataset.batch:
            notes.append(f"# --batch: {batch_choices(dataset)}")
        if not batch.is_close:
            warn(f"the batch differs from the requested size: {batch}")
        if batch.name == "release" and has_strata(flags) and "smoe-norm" not in flags:
            notes.append("# --smoe-norm released computes as the released code (docs/reproduce.md)")
    own = {n for n in ("fp16", "bf16", "amp") if dataset.own("train").get(n)} - {dataset.precision}
    if dataset.own("precision") and own:
        raise UsageError(f"{dataset.file}: `precision` and `train.{min(own)}`: expected one")
    # `fp16` and `bf16` in `train` of a data set are `precision: auto` and `precision: bf16`.
    flags.pop("fp16", None)
    requested = "bf16" if flags.pop("bf16", False) else dataset.precision
    words = [*arguments(flags), *extra]
    precision, why = precision_flags(requested, launch, words, resumed)
    return flags | precision, extra, notes + why


def _run(lines: Sequence[str], folder: Path, launch: Launch, log: Path) -> None:
    """`run` the lines; if training started and ended early, say how to resume it."""
    logged = log.stat().st_size if log.is_file() else 0
    try:
        run(lines, launch.settings, screen_variables())
    except (SystemExit, CommandError) as ended:
        stopped = isinstance(ended, CommandError) or ended.code >= 128  # by a signal
        if not stopped and not (log.is_file() and STARTED_LINE in log.read_bytes()[logged:]):
            raise
        how = f"the same command begins again, as {folder}/checkpoint_last.pt is missing"
        last = any(folder.glob("checkpoint_last*.pt"))
        if saved := folder / "checkpoint_last.pt" if last else newest_checkpoint(folder):
            how = f"the same command resumes from {saved}"
            if not stopped:
                how = f"once the cause is fixed, {how}"
        if isinstance(ended, CommandError):
            raise UsageError(f"{ended}; {how}") from None
        warn(f"training has ended early; {how}")
        raise


def data_arguments(dataset: Dataset, directions: Sequence[str] = ()) -> list[str]:
    """The arguments that training and generation share: data, plugin, task and language tokens.

    Args:
        directions: by default those that are trained.
    """
    data = Folders(dataset).binary_path()
    plugins = os.pathsep.join([package_folder(), *imported])
    words = [data, "--user-dir", plugins, *arguments(dataset.task)]
    languages = dataset.languages
    if dataset.start:  # all that the model knows, so that it can translate them after training, too
        languages = dataset.start["languages"]
        words += ["--fixed-dictionary", str(Folders(dataset).binary / "dict.txt")]
    words += ["--langs", ",".join(languages)]
    return words + ["--lang-pairs", ",".join(directions or dataset.directions)]


def screen_variables() -> dict[str, str]:
    """Variables by which fairseq-train prints only a line every few seconds; none if LOGLEVEL is set."""
    if os.environ.get("LOGLEVEL"):
        return {}
    seconds = SCREEN_SECONDS[sys.stdout.isatty()]
    return {"LOGLEVEL": "WARNING", screen.VARIABLE: str(seconds)}


def _check_complete(dataset: Dataset, words: Sequence[str]) -> None:
    present = flag_values(words).keys()
    for flags, example in REQUIRED_FLAGS.items():
        if not present & set(flags):
            places = f"behind the method, or in `train` of {dataset.file}"
            raise UsageError(f"{flags[0]} is missing: expected it {places}, such as {example}")
