"""What a run is: its batch, and the flags that another start has to agree with."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smoe_fairseq import files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.processes import report

TOLERANCE = 0.02  # of what was asked for


@dataclass(frozen=True)
class Batch:
    """``processes`` times ``max_tokens`` times ``update_freq`` tokens per update, for ``wanted``.

    ``max_tokens`` is fairseq's: of one forward pass on one GPU, counted on the longer side.
    """

    name: str
    wanted: int
    processes: int
    max_tokens: int
    update_freq: int

    @property
    def tokens(self) -> int:
        """Per update over all processes."""
        return self.processes * self.max_tokens * self.update_freq

    @property
    def kept(self) -> bool:
        """Whether ``tokens`` are as many as wanted."""
        return abs(self.tokens - self.wanted) <= TOLERANCE * self.wanted

    def __str__(self) -> str:
        plural = "es" if self.processes > 1 else ""
        return (
            f"{self.tokens:,} tokens per update = {self.processes} process{plural} x "
            f"{self.max_tokens:,} (--max-tokens) x {self.update_freq} (--update-freq); asked for "
            f"(BATCH={self.name}): {self.wanted:,}"
        )


def choices(dataset: Dataset) -> str:
    """What ``BATCH`` may be, for people."""
    return (
        ", ".join(f"{name} ({size:,})" for name, size in _sizes(dataset).items()) + " or a number"
    )


def plan(dataset: Dataset, processes: int, extra: Sequence[str]) -> Batch:
    """The batch that ``BATCH`` asks for: one of the data set's by name (paper), or a number of tokens.

    ``--max-tokens`` and ``--update-freq`` among the ``extra`` flags are kept. A single forward pass is
    never made so small that the longest sentence does not fit in.
    """
    sizes = _sizes(dataset)
    name = os.environ.get("BATCH") or "paper"
    if name not in sizes and not (name.isdecimal() and int(name)):
        raise UsageError(f"BATCH={name}: {dataset.name} has {choices(dataset)} of tokens")
    wanted = sizes.get(name) or int(name)
    per_update = wanted / processes
    frequency = _given(extra, "--update-freq")
    if tokens := _given(extra, "--max-tokens"):
        frequency = frequency or max(1, round(per_update / tokens))
    else:
        longest = dataset.train.get("max-source-positions", 1)
        most = max(longest, dataset.batch["max-tokens"])
        frequency = frequency or -int(-per_update // most)
        tokens = min(most, max(longest, int(per_update / frequency)))
    return Batch(name, wanted, processes, tokens, frequency)


def _sizes(dataset: Dataset) -> dict[str, int]:
    return {name: size for name, size in dataset.batch.items() if name != "max-tokens"}


def _given(words: Sequence[str], flag: str) -> int | None:
    """The number after a flag's last occurrence, ``--flag 8`` or ``--flag=8``."""
    value = None
    for i, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name == flag:
            value = rest if equals else (words[i + 1] if i + 1 < len(words) else "")
    if value is None:
        return None
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{flag} {value}: expected a whole number of at least 1")
    return int(value)


# What a run is: kept in its folder, so that it goes on as what it began as, or not at all.

FILE = "identity.json"
# Seconds in which the others see what run the first of several machines has noted: NFS takes its time.
PATIENCE = 60
_joined: set[Path] = set()  # folders of runs that another machine has begun
_TRAINED = "trained"  # in it, once that is so: how far
_SIZES = ("--max-tokens", "--batch-size")
BATCH = (*_SIZES, "--update-freq")  # kept as what they make together
_LIMITS = ("--max-update", "--max-epoch", "--patience")

# Flags that may differ when a run is resumed. All others are part of what is trained. So is the precision
# (--fp16, --bf16, --amp and their variants): rounding is part of the result, and the optimizer's state of
# one does not load into another. How loss scaling behaves may change: that is the remedy where it fails.
_FREE = {
    # how long, and what is told of it
    *("--max-update", "--max-epoch", "--stop-time-hours", "--patience"),
    *("--log-interval", "--log-format", "--log-file", "--no-progress-bar", "--tensorboard-logdir"),
    *("--wandb-project", "--azureml-logging", "--aim-repo", "--aim-run-hash", "--profile"),
    # what is saved, where, and what is taken over at this start
    *("--save-dir", "--save-interval", "--save-interval-updates", "--no-save", "--restore-file"),
    *("--no-epoch-checkpoints", "--no-last-checkpoints", "--no-save-optimizer-state"),
    *("--best-checkpoint-metric", "--maximize-best-checkpoint-metric"),
    *("--write-checkpoints-asynchronously", "--suppress-crashes"),
    *("--reset-optimizer", "--reset-dataloader", "--reset-lr-scheduler", "--reset-meters"),
    # validation
    *("--disable-validation", "--valid-subset", "--ignore-unused-valid-subsets"),
    *("--combine-valid-subsets", "--max-tokens-valid", "--batch-size-valid", "--max-valid-steps"),
    *("--fixed-validation-seed", "--skip-invalid-size-inputs-valid-test"),
    # where it runs and what that costs, with the same result up to rounding
    *("--cpu", "--tpu", "--device-id", "--local_rank", "--nprocs-per-node", "--ddp-backend"),
    *("--ddp-comm-hook", "--bucket-cap-mb", "--find-unused-parameters", "--fast-stat-sync"),
    *("--broadcast-buffers", "--heartbeat-timeout", "--gradient-as-bucket-view", "--zero-sharding"),
    *("--expert-parallel", "--checkpoint-activations", "--offload-activations"),
    *("--min-params-to-wrap", "--empty-cache-freq", "--all-gather-list-size", "--user-dir"),
    *("--num-workers", "--num-workers-valid", "--data-buffer-size"),
    *("--fp16-init-scale", "--fp16-scale-window", "--fp16-scale-tolerance", "--min-loss-scale"),
    "--threshold-loss-scale",
}
_FREE_PREFIXES = ("--keep-", "--validate-", "--distributed-", "--eval-bleu")
_OTHER_NAMES = {
    **{"-a": "--arch", "-s": "--source-lang", "-t": "--target-lang"},
    **{"--max-sentences": "--batch-size", "--learning-rate": "--lr"},
    "--relu-dropout": "--activation-dropout",
}


def claim(
    method: str,
    data: Path,
    words: Sequence[str],
    processes: int,
    force: bool = False,
    machines: int = 1,
) -> bool:
    """Takes ``--save-dir`` for this process and, where it holds a run, makes sure that it is this one.

    Args:
        data: the folder of the dictionaries.
        words: the arguments of ``fairseq-train``; of a flag that is repeated the last one counts.
        force: whether the run goes on with other flags than before, which are said.
        machines: how many call this for one run. The first that comes takes the folder, the others join it.

    Returns:
        Whether there is anything to train: not where it has been trained as far as it is to be.

    Raises:
        UsageError: another run is being trained there, or what is there was started as another.
    """
    given = given_flags(words)
    if "--no-save" in given:
        return True
    folder = Path(given["--save-dir"])
    flags = what_is_trained(given)
    own = {
        "method": method,
        "dictionary": _dictionary(data),
        "flags": _with_whole_batch(flags, processes),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from None
    file = folder / FILE
    # Two locks: training takes its own only when it has read data and built a model, and one that was
    # started by hand, or has outlived its recipe, has only that.
    try:
        files.take(folder, files.RECIPE)
    except files.InUse:
        if machines == 1:
            raise
        _join(folder, own, data)
        return not _is_saved(folder) or _is_unfinished(_read(file), given)
    files.check_free(folder)
    if not (_is_saved(folder) and file.exists()):
        write_whole(file, json.dumps(own, indent=2) + "\n")
        return True
    was = _read(file)
    difference = _difference(was, own, data)
    if not difference:  # what it was started with stays
        return _is_unfinished(was, given)
    if not (force and _difference(was, own | {"flags": was["flags"]}, data) is None):
        otherwise = "set RUN_DIR to another folder for a new run"
        if force:
            raise UsageError(f"{folder} {difference}, which --force-resume is not for: {otherwise}")
        raise UsageError(
            f"{folder} {difference}: repeat what it was started with, {otherwise}, or add --force-resume "
            "to go on with this one"
        )
    report(f"{folder} {difference}, and goes on so, as --force-resume asks for")
    write_whole(file, json.dumps(own, indent=2) + "\n")
    return True


def _join(folder: Path, own: dict, data: Path) -> None:
    """Waits until the machine that has the folder has noted that it is this run; raises if it does not."""
    difference = "does not say of which run it is"
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(UsageError):
            if (folder / FILE).exists():
                difference = _difference(_read(folder / FILE), own, data)
        if difference is None:
            _joined.add(folder)
            return
        time.sleep(0.1)
    raise UsageError(f"{folder} is in use by another machine, and {difference}")


def _is_saved(folder: Path) -> bool:
    return any(folder.glob("checkpoint*.pt"))


def _is_unfinished(was: dict, given: dict[str, str]) -> bool:
    return was.get(_TRAINED) is None or was[_TRAINED] != limits(given)


def finish(words: Sequence[str]) -> None:
    """Notes that the run has been trained as far as it was to be, so that it is not started for nothing."""
    given = given_flags(words)
    folder = Path(given["--save-dir"])
    file = folder / FILE
    if folder in _joined:
        return  # the machine that has the folder will say so
    if "--no-save" not in given and file.exists() and "--stop-time-hours" not in given:
        content = _read(file) | {_TRAINED: limits(given)}
        write_whole(file, json.dumps(content, indent=2) + "\n")


def limits(given: dict[str, str]) -> dict[str, str]:
    """Of these flags those that say how long is trained."""
    return {name: given[name] for name in _LIMITS if name in given}


def what_is_trained(flags: dict[str, str]) -> dict[str, str]:
    """Without those that may differ when a run is resumed."""
    return {n: v for n, v in flags.items() if n not in _FREE and not n.startswith(_FREE_PREFIXES)}


def given_flags(words: Sequence[str]) -> dict[str, str]:
    """All flags, with what follows the last occurrence of each."""
    given: dict[str, list[str]] = {}
    values: list[str] = []  # in front of the first flag: the data's folder, which may be moved
    for word in words:
        if word[:1] == "-" and not _is_number(word):
            name, equals, value = word.partition("=")
            name = _OTHER_NAMES.get(name, name)
            given.pop(name, None)
            values = given[name] = [value] if equals else []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in given.items()}


def _with_whole_batch(flags: dict[str, str], processes: int) -> dict[str, str]:
    """One number for a batch that is divided over processes and passes in one way or another."""
    frequency = flags.get("--update-freq", "1")
    if not frequency.isdecimal():
        return {**flags, "processes": str(processes)}
    whole = {name: value for name, value in flags.items() if name != "--update-freq"}
    for name in _SIZES:
        if whole.get(name, "").isdecimal():
            size = int(whole.pop(name)) * int(frequency) * processes
            whole[f"{name} x --update-freq x processes ="] = str(size)
    return whole


def _dictionary(data: Path) -> str:
    """A checksum of all dictionaries: the order of a dictionary's words is what its numbers mean."""
    digest = hashlib.sha256()
    for file in sorted(data.glob("**/dict*.txt")):
        digest.update(f"{file.relative_to(data)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict:
    try:
        found = json.loads(file.read_text("utf-8"))
        if {name: type(found[name]) for name in ("method", "dictionary", "flags")} == {
            **{"method": str, "dictionary": str, "flags": dict}
        }:
            return found
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(
        f"{file} does not say what run this is: delete it if the flags given now are those that the "
        "run was started with, or set RUN_DIR to another folder"
    )


def _difference(was: dict, now: dict, data: Path) -> str | None:
    """The first one, as the end of a sentence about the folder."""
    if was["method"] != now["method"]:
        return f"was started as {was['method']}, not as {now['method']}"
    if was["dictionary"] != now["dictionary"]:
        return f"was started with other dictionaries than those that are in {data} now"
    for name in {**now["flags"], **was["flags"]}:
        before, after = (flags["flags"].get(name) for flags in (was, now))
        if not _same(name, before, after):
            shown = [f"{name} {value}".strip() for value in (before, after)]
            if before is None:
                return f"was started without {shown[1]}, which is given now"
            if after is None:
                return f"was started with {shown[0]}, which is not given now"
            return f"was started with {shown[0]}, not with {shown[1]}"
    return None


def _same(name: str, before: str | None, after: str | None) -> bool:
    if before == after or before is None or after is None:
        return before == after
    if not (_is_number(before) and _is_number(after)):
        return False
    # Another number of processes does not always divide a batch into the same whole.
    tolerance = TOLERANCE if name.endswith("=") else 0
    return abs(float(before) - float(after)) <= tolerance * float(before)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
