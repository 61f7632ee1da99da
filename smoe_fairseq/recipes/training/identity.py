"""The identity of a run: its method, dictionary and flags. Resuming with another one is refused."""

import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from smoe_fairseq import files, locks
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.forms import IDENTITY, read_json
from smoe_fairseq.recipes.folders import PREPARED
from smoe_fairseq.recipes.pretrained import MODEL, STARTED
from smoe_fairseq.recipes.processes import warn
from smoe_fairseq.recipes.program_flags import flag_values, is_number
from smoe_fairseq.recipes.training.batch import SIZES, TOLERANCE
from smoe_fairseq.recipes.training.precision import OTHERS

FILE = "identity.json"  # in the run's folder
TIMEOUT_SECONDS = 60  # until other machines see the first one's file, which NFS may delay
joined: set[Path] = set()  # folders of runs that another machine started
# Keys in the file.
_RANKS = "ranks"
TEXT = "text"  # a digest of the training text, if it is known
_RESTORED = "restored"  # the fingerprint of --restore-file
_TRAINED = "trained"  # the values of `_LIMITS` when training has ended
_BEFORE = "before"  # the identity before --force-resume or a longer training changed it
_SAVED = "saved"  # in `_BEFORE`: what the last checkpoint was
_SIZES = tuple(f"--{name}" for name in SIZES)
_WHOLE = "{} x --update-freq x processes ="  # the name of a size of all processes
_PRECISION = {f"--{name}" for name in ("fp16", "bf16", "fp16-no-flatten-grads", *OTHERS)}
SELECTION = "selection"  # the values of `_SELECTING`, of the last start
_SELECTING = ("--best-checkpoint-metric", "--maximize-best-checkpoint-metric", "--valid-subset")
_SELECTING += ("--max-valid-steps", "--combine-valid-subsets", "--save-interval-updates")
_SELECTING += ("--validate-interval", "--validate-interval-updates")
_SELECTING += ("--validate-sentences", "--validate-beam")
# Not compared between runs of a study: the seed and what depends on the machine.
NOT_OF_A_STUDY = {*_PRECISION, "--seed", "processes", "--fixed-dictionary"}
_LIMITS = ("--max-update", "--max-epoch", "--patience")

# Flags that may differ when a run is resumed. Precision (--fp16, --bf16, --amp and their variants) may not:
# the optimizer state of one does not load into another.
_FREE = {
    # how long to train, and what is logged
    *("--max-update", "--max-epoch", "--stop-time-hours", "--patience"),
    *("--log-interval", "--log-format", "--log-file", "--no-progress-bar", "--tensorboard-logdir"),
    *("--wandb-project", "--azureml-logging", "--aim-repo", "--aim-run-hash", "--profile"),
    # what is saved and where, and what is restored
    *("--save-dir", "--save-interval", "--save-interval-updates", "--restore-file"),
    *("--save-interval-minutes", "--no-save"),
    *("--no-epoch-checkpoints", "--no-last-checkpoints", "--no-save-optimizer-state"),
    *("--best-checkpoint-metric", "--maximize-best-checkpoint-metric"),
    *("--write-checkpoints-asynchronously", "--suppress-crashes"),
    *("--reset-optimizer", "--reset-dataloader", "--reset-lr-scheduler", "--reset-meters"),
    # validation
    *("--disable-validation", "--valid-subset", "--ignore-unused-valid-subsets"),
    *("--combine-valid-subsets", "--max-tokens-valid", "--batch-size-valid", "--max-valid-steps"),
    *("--fixed-validation-seed", "--skip-invalid-size-inputs-valid-test"),
    # devices, memory and speed, which change the result only by rounding
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


def claim(
    method: str,
    data: Path,
    words: Sequence[str],
    processes: int,
    force: bool = False,
    machines: int = 1,
) -> bool:
    """Lock ``--save-dir`` for this process; if it contains a run, check that it is the same.

    ``data`` has the dictionaries, ``words`` are those of ``fairseq-train``. With ``force``, other flags only
    cause a warning. The first of the ``machines`` of a run locks the folder, the others join it. Returns
    False if the run has been trained to the limits in ``words``.

    Raises:
        UsageError: another process trains there, or the folder contains another run.
    """
    flags = flag_values(words)
    if "--no-save" in flags:
        return True
    folder, own = Path(flags["--save-dir"]), of(method, data, words, processes)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    try:
        locks.lock_folder(folder, locks.RECIPE)
    except locks.InUse:
        if machines == 1:
            raise
        _join(folder, own, data)
        return not is_saved(folder) or _is_unfinished(_read(file), flags)
    # fairseq-train has its own lock, but acquires it only after loading the data.
    locks.check_free(folder)
    if is_saved(folder) and file.exists():
        saved = _read(file)
        if not (difference := _difference(saved, own, data)):
            unfinished, now = _is_unfinished(saved, flags), saved
            if unfinished:
                now = {name: value for name, value in saved.items() if name != _TRAINED}
                now |= {name: own[name] for name in {_RESTORED, SELECTION} & own.keys()}
            if now != saved:  # once this training saves
                now = {**now, _BEFORE: {**saved, _SAVED: _last_save(folder)}}
            if now != _read(file, begun=True):  # --force-resume ended before it saved
                _write(file, now)
            return unfinished
        otherwise = "choose another --run-dir for a new run"
        langs = {name: own["flags"][name] for name in {"--langs"} & own["flags"].keys()}
        fixed = own | {"flags": saved["flags"] | langs, TEXT: None}
        # In the method, dictionaries, or the order of language tokens.
        if _difference(saved, fixed, data):
            end = ", which --force-resume is not for" * force
            raise UsageError(f"{folder} {difference}{end}: {otherwise}")
        if not force:
            advice = f"give the same text and flags, {otherwise}, or add --force-resume"
            raise UsageError(f"{folder} {difference}: {advice} to continue with the new ones")
        if not _is_unfinished(saved, flags):
            return False
        warn(f"{folder} {difference}; --force-resume resumes it with the new ones")
        own[_BEFORE] = {**saved, _SAVED: _last_save(folder)}
    elif is_saved(folder):
        warn(f"{file} is missing: the run is resumed as {method}, with the flags given now")
    _write(file, own)
    return True


def of(method: str, data: Path, words: Sequence[str], processes: int) -> dict:
    """The identity of a run by ``words``; the arguments are those of `claim`."""
    given = flag_values(words)
    flags = _with_whole_batch(fixed_flags(given), processes)
    own = {"method": method, "dictionary": _dictionary(data), "flags": flags, _RANKS: processes}
    own[SELECTION] = selection(given)
    if text := _text(data):
        own[TEXT] = text
    if (restored := Path(given.get("--restore-file", ""))).is_file():
        own[_RESTORED] = fingerprint(restored)
    return own


def other_settings(saved: dict, words: Sequence[str], processes: int, data: Path) -> str | None:
    """How the `record` of a run that was trained elsewhere differs from a run by ``words``, as `check` says.

    The seed and the precision, which depends on the machine, are not compared.
    """
    own = of(saved["method"], data, words, processes)
    del own[_RANKS]  # which a study does not keep
    own[_TRAINED] = limits(flag_values(words))
    if not saved["dictionary"] or not data.exists():
        own["dictionary"] = saved["dictionary"]
    left_out = NOT_OF_A_STUDY | _of_start(saved["flags"])
    for each in (saved, own):
        flags = each["flags"] | each[_TRAINED]
        each["flags"] = {name: value for name, value in flags.items() if name not in left_out}
    return _difference(saved, own, data)


def other_text(records: Mapping[Path, dict], data: Path) -> dict[Path, str]:
    """How text and dictionaries of runs that were trained elsewhere differ from those in ``data``."""
    own = {"method": "", "dictionary": _dictionary(data), "flags": {}, TEXT: _text(data)}
    found = {}
    for run, saved in records.items():
        known = {key: saved[key] for key in ("dictionary", TEXT) if saved.get(key)}
        if difference := _difference(own | known, own, data):
            found[run] = difference
    return found


def differing(records: Mapping[str, dict], left_out: Collection[str] = ()) -> list[str]:
    """The text, flags and limits of ended trainings in which runs differ: "moe has --lr 1, dense --lr 2".

    ``records`` are from `record`. Seeds, flags in ``left_out``, and runs without a record are not compared.
    """
    saved = {run: each for run, each in records.items() if each}
    unended = [run for run, each in saved.items() if _TRAINED not in each]
    found = [f"the training of {' and '.join(unended)} has not ended"] if unended else []
    for key, what in ((TEXT, "training text"), ("dictionary", "dictionaries")):
        kinds = {each[key]: run for run, each in saved.items() if each.get(key)}
        found += [f"{' and '.join(kinds.values())} have different {what}"] * (len(kinds) > 1)
    flags = {run: each["flags"] | each.get(_TRAINED, {}) for run, each in saved.items()}
    names = dict.fromkeys(name for own in flags.values() for name in own)
    left_out = {*left_out, "--seed", *(_LIMITS if unended else ()), *_of_start(names)}
    for name in (name for name in names if name not in left_out):
        (first, one), *others = ((run, own.get(name)) for run, own in flags.items())
        if other := next((o for o in others if not _equal(name, one or "", o[1] or "")), None):
            flag = name.partition(" x ")[0]  # of `_with_whole_batch`: of all processes
            whole = " per update" * (flag != name)
            both = ((first, one), other)
            shown = (f"no {flag}" if v is None else f"{flag} {v}{whole}".strip() for _, v in both)
            found.append(" and ".join(f"{run} has {v}" for (run, _), v in zip(both, shown)))
    return found


def _of_start(flags: Collection[str]) -> set[str]:
    """The flags with paths of each run, where `STARTED` tells the model from which it began."""
    return {"--finetune-from-model", "--fixed-dictionary"} if STARTED in flags else set()


def record(run: Path) -> dict:
    """The identity of a run, for `other_settings`; without content if its folder has none."""
    return _read(run / FILE) if (run / FILE).exists() else {}


def _join(folder: Path, own: dict, data: Path) -> None:
    """Wait, for `TIMEOUT_SECONDS`, until the machine that holds the folder has written this identity."""
    difference = "does not say of which run it is"
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        with suppress(UsageError):
            if (folder / FILE).exists():
                difference = _difference(_read(folder / FILE, begun=True), own, data)
        if difference is None:
            joined.add(folder)
            return
        time.sleep(0.1)
    raise UsageError(f"{folder} is in use by another machine, and {difference}")


def check(folder: Path, method: str, seed: int | None, data: Path) -> None:
    """Raise UsageError if a folder contains a run of another method, dictionary or (unless None) seed."""
    if saved := record(folder):
        flags = saved["flags"] | ({} if seed is None else {"--seed": str(seed)})
        own = {"method": method, "dictionary": _dictionary(data), "flags": flags}
        if difference := _difference(saved, own, data):
            raise UsageError(f"{folder} {difference}: expected the folder of this run")


def finish(words: Sequence[str]) -> None:
    """Record that the run is trained to the limits in ``words``, so that another start does nothing."""
    flags = flag_values(words)
    folder = Path(flags["--save-dir"])
    if folder in joined or "--no-save" in flags or "--stop-time-hours" in flags:
        return  # for a joined folder, the machine that holds it writes
    if saved := record(folder):
        _write(folder / FILE, saved | {_TRAINED: limits(flags)})


def is_saved(folder: Path) -> bool:
    """Whether the folder contains a checkpoint."""
    return any(folder.glob("checkpoint*.pt"))


def _is_unfinished(saved: dict, flags: dict[str, str]) -> bool:
    """Whether a limit is larger than that of the training that has ended, or there is another one."""
    trained, given = saved.get(_TRAINED), limits(flags)
    if trained is None or trained.keys() != given.keys():
        return True
    return any(_number(given[name]) > _number(trained[name]) for name in given)


def _number(limit: str) -> float:
    number = float(limit) if is_number(limit) else 0
    return number if number > 0 else math.inf  # 0: no limit


def limits(flags: dict[str, str]) -> dict[str, str]:
    """The flags that limit how long to train."""
    return {name: flags[name] for name in _LIMITS if name in flags}


def selection(flags: dict[str, str]) -> dict[str, str]:
    """The flags that decide which checkpoint is the best."""
    return {name: flags[name] for name in _SELECTING if name in flags}


def fixed_flags(flags: dict[str, str]) -> dict[str, str]:
    """The flags that may not differ when a run is resumed."""
    fixed = (name for name in flags if name not in _FREE and not name.startswith(_FREE_PREFIXES))
    return {name: flags[name] for name in fixed}


def _with_whole_batch(flags: dict[str, str], processes: int) -> dict[str, str]:
    """The flags with the batch as one number, which does not depend on how processes share it."""
    frequency = flags.get("--update-freq", "1")
    if not frequency.isdecimal():
        return {**flags, "processes": str(processes)}
    whole = {name: value for name, value in flags.items() if name != "--update-freq"}
    for name in _SIZES:
        if whole.get(name, "").isdecimal():
            size = int(whole.pop(name)) * int(frequency) * processes
            whole[_WHOLE.format(name)] = str(size)
    return whole


def _dictionary(data: Path) -> str:
    """A checksum of all dictionaries: their order defines the token numbers."""
    digest = hashlib.sha256()
    for file in sorted(data.glob("**/dict*.txt")):
        digest.update(f"{file.relative_to(data)}\n".encode())
        digest.update(files.read_plain(file))
    return digest.hexdigest()


def _text(data: Path) -> str | None:
    """A digest of the training text that was prepared; None if that is not recorded."""
    with suppress(UsageError, KeyError):
        texts = read_json(data / PREPARED, {"content": {str: {str: str}}})["content"]["raw/"]
        if own := sorted(each for each in texts.items() if each[0].startswith("train.")):
            return hashlib.sha256(json.dumps(own).encode()).hexdigest()
    return None


def _write(file: Path, content: dict) -> None:
    write_whole(file, json.dumps(content, indent=2) + "\n")


def _last_save(folder: Path) -> str:
    """What its checkpoints are."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("checkpoint*.pt")):
        with suppress(FileNotFoundError):  # training goes on
            digest.update(fingerprint(file).encode())
    return digest.hexdigest()


def _read(file: Path, begun: bool = False) -> dict:
    """The identity of the last checkpoint; ``begun``: of the last start, which may not have saved one."""
    same = "the flags given now are those that the run was started with"
    content = read_json(file, IDENTITY, f"delete it if {same}, or set --run-dir to another folder")
    before = content.pop(_BEFORE, None)
    if before is None or begun or before.pop(_SAVED, None) != _last_save(file.parent):
        return content
    return before


def began_with(folder: Path, restored: Path) -> bool:
    """Whether a run has begun, or continued last, with a checkpoint that was given then."""
    return record(folder).get(_RESTORED) == fingerprint(restored)


def start_of(folder: Path) -> str | None:
    """The fingerprint of the pretrained model from which a run began; None if it began from none."""
    return record(folder).get("flags", {}).get(STARTED)


def _difference(saved: dict, own: dict, data: Path) -> str | None:
    """All differences, as the end of a sentence about the folder; None without any."""
    parts = []
    if saved["method"] != own["method"]:
        parts.append(f"as {saved['method']}, not as {own['method']}")
    elif saved["dictionary"] != own["dictionary"]:
        missing = ", which is missing" * (not data.exists())
        parts.append(f"with other dictionaries than those that are in {data} now{missing}")
    else:
        if None not in (was := saved.get(TEXT), now := own.get(TEXT)) and was != now:
            parts.append(f"with other training text than that in {data} now")
        tokens, sentences = map(_WHOLE.format, _SIZES)
        # Other ranks round how many sentences a batch of tokens may have.
        is_rounded = tokens in own["flags"] and saved.get(_RANKS) != own.get(_RANKS)
        paths = _of_start(own["flags"].keys() & saved["flags"].keys())
        for name in (name for name in {**own["flags"], **saved["flags"]} if name not in paths):
            before, after = (identity["flags"].get(name) for identity in (saved, own))
            old, new = (f"{name} {value}".strip() for value in (before, after))
            most = 0.5 if is_rounded and name == sentences else TOLERANCE
            if before is None:
                parts.append(f"without {new}, which is given now")
            elif after is None:
                parts.append(f"with {old}, which is not given now")
            elif name == STARTED and before != after:
                parts.append(f"from another model than {data / MODEL} is now")
            elif not _equal(name, before, after, most):
                parts.append(f"with {old}, not with {new}")
    return f"was started {'; and '.join(parts)}" if parts else None


def _equal(name: str, before: str, after: str, tolerance: float = TOLERANCE) -> bool:
    if before == after or not (is_number(before) and is_number(after)):
        return before == after
    # With another number of processes the batch may differ a little.
    most = max(float(before), float(after)) if name.endswith("=") else 0
    return abs(float(before) - float(after)) <= tolerance * most
