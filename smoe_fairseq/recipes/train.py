"""``scripts/train.sh``."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes import identity, processes
from smoe_fairseq.recipes.config import Dataset, Flags, arguments, has_strata, method_flags
from smoe_fairseq.recipes.processes import (
    Folders,
    Launch,
    command,
    dry_run,
    launch,
    report,
    run,
    shard_names,
    user_dir,
)
from smoe_fairseq.training import screen

PRECISIONS = ("bf16", "fp16", "fp32")
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of these under Windows, of AMD
_FLAGS = ("--fp16", "--bf16", "--amp", "--memory-efficient-fp16", "--memory-efficient-bf16")


def precision_flags(flags: Flags, place: Launch, extra: Sequence[str]) -> tuple[Flags, list[str]]:
    """The flags that take the place of ``fp16`` among a recipe's, and what to say of them.

    Args:
        extra: the user's own; one of them that sets the precision stays the only one.

    Raises:
        UsageError: ``PRECISION`` is none of `PRECISIONS`.
    """
    asked = os.environ.get("PRECISION") or None
    if asked not in (None, *PRECISIONS):
        raise UsageError(f"PRECISION={asked}: choose one of {', '.join(PRECISIONS)}")
    if own := [flag for flag in _FLAGS if flag in extra]:
        return {"fp16": False}, [f"# number type: {own[0]}, as given behind the method"]
    if asked is None and not flags.get("fp16"):
        return {}, [
            "# number type: fp32, since neither the data set nor PRECISION asks for another"
        ]
    if place.cpu and asked != "bf16":
        why = "as PRECISION asks" if asked == "fp32" else "since the CPU has no fp16"
        return {"fp16": False}, [f"# number type: fp32, {why}"]
    chosen = asked or ("bf16" if has_bf16() else "fp16")
    if asked:
        why = "as PRECISION asks"
    elif chosen == "bf16":
        why = "which the GPU has, for the paper's fp16; PRECISION=fp16 trains in that"
    else:
        why = "the paper's, since there is no GPU here that has bf16; PRECISION=bf16 is for one that has"
    notes = [f"# number type: {chosen}, {why}"]
    result = {name: chosen == name for name in ("fp16", "bf16")}
    if chosen == "fp16" and "--expert-parallel" in extra:
        result["fp16-no-flatten-grads"] = True
        notes.append("# with sharded experts, fp16 gradients are not flattened")
    return result, notes


def has_bf16() -> bool:
    """Whether this machine's GPU computes bf16 products itself; torch also says so of those that emulate."""
    if not any(os.path.exists(device) for device in _DEVICES):
        return False  # without the second that torch takes to say so

    import torch

    if not torch.cuda.is_available():
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)


# What ``scripts/train.sh`` says before it starts: what is trained, what that takes, and what takes
# less.

SECONDS = 120  # that training waits for it at most
# What else takes memory. Of a GPU: its context and gaps between blocks, as a share of all. On a CPU: a
# process by itself, and gaps that malloc leaves, as a share of the tensors; as measured (docs/cost.md).
GPU_SHARE = 0.1
CPU_PROCESS, CPU_GAPS = 400 * 2**20, 1 / 3
_WARNING = "warning: "
_FAILED = "# what this takes of memory is not known:"


def foretold(dataset: Dataset, place: Launch, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Comments and warnings about a run of ``fairseq-train WORDS``; none with ``FORECAST=0``.

    From a process of its own: fairseq and torch would stay in memory during training, and whatever goes wrong
    with a forecast is no reason not to train.
    """
    if os.environ.get("FORECAST") == "0":
        return [], []
    program = [sys.executable, "-W", "ignore", "-m", "smoe_fairseq.recipes", "foretell"]
    counts = [str(place.processes), str(max(1, place.gpus))]
    flags = [*(["--cpu"] if place.cpu else []), *words]
    try:
        done = subprocess.run(
            [*program, dataset.name, *counts, "--", *flags],
            **{"capture_output": True, "text": True, "timeout": SECONDS},
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return [f"{_FAILED} reckoning took longer than {SECONDS} s"], []
    except OSError as error:
        return [f"{_FAILED} {error.strerror}"], []
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        return [f"{_FAILED} {reason or f'exit status {done.returncode}'}"], []
    lines = done.stdout.splitlines()
    warnings = [x.removeprefix(_WARNING) for x in lines if x.startswith(_WARNING)]
    return [line for line in lines if line.startswith("# ")], warnings


def tell(dataset: Dataset, processes: int, on_machine: int, words: Sequence[str]) -> None:
    """Prints it: comments, and lines that begin with ``warning: ``.

    Args:
        on_machine: of the processes, those that share this machine.
    """
    from smoe_fairseq.errors import quietly

    with quietly():
        for line in _lines(dataset, processes, on_machine, words):
            print(line)


def _lines(
    dataset: Dataset, processes: int, on_machine: int, words: Sequence[str]
) -> Iterator[str]:
    import fairseq  # noqa: F401  (registers the plugin's model)

    from smoe_fairseq.analysis.cost import build_meta_model, count, parse_run
    from smoe_fairseq.analysis.memory import LENGTH, Run
    from smoe_fairseq.analysis.processes import first_that_fits, mebibytes, process_cost

    flags = parse_run(words)
    length, known = longest_sentence(Folders(dataset.name).binary, dataset.shards), "the longest"
    if length is None:
        length, known = LENGTH, "assumed"
    run = Run(flags, vocabulary(dataset), processes, min(length, flags.max_tokens))
    model = build_meta_model(flags, run.vocabulary)
    cost = count(model)
    tokens = processes * flags.max_tokens * flags.update_freq
    yield (
        f"# {cost.parameters / 1e6:,.1f}M parameters, {cost.active_parameters / 1e6:,.1f}M of them active; "
        f"{cost.flops_per_token / 1e6:,.0f}M FLOPs per token, forward; up to {tokens:,} tokens per update"
    )
    needs = process_cost(run, model)
    held, total = needs.held, _memory(flags.cpu)
    here = "" if total is None else f" of {mebibytes(total)}"
    each = "it takes" if processes == 1 else f"each of {processes} processes takes"
    yield (
        f"# {each} {mebibytes(held.peak)}{here} at the peak: weights {mebibytes(held.weights)}, "
        f"gradients {mebibytes(held.gradients)}, optimizer {mebibytes(held.optimizer)}, activations "
        f"{mebibytes(held.activations)} for {flags.max_tokens:,} tokens in sentences of {run.length} "
        f"({known})"
    )
    if processes > 1:
        parts = ("gradients", "tokens", "parameters")
        sent = [f"{mebibytes(n)} of {p}" for p in parts if (n := getattr(needs, p))]
        yield f"# and sends {' and '.join(sent)} per update"
    if total is None:
        return
    room = _room(total, on_machine) if flags.cpu else total * (1 - GPU_SHARE)
    if held.peak <= room:
        return
    place = "this machine's memory" if flags.cpu else "the GPU's memory"
    among = f", among {on_machine} processes" if flags.cpu and on_machine > 1 else ""
    remedy = first_that_fits(run, room)
    yield (
        f"{_WARNING}training will not fit into {place}: it takes {mebibytes(held.peak)}, and of the "
        f"{mebibytes(total)} there{among}, {mebibytes(max(room, 0))} are left for it beside torch itself and "
        "gaps between blocks; "
        + (
            f"add {remedy[0]}, which takes {mebibytes(remedy[1])}"
            if remedy
            else "no flag makes it fit, only a smaller model or more memory"
        )
    )


def _room(total: int, processes: int) -> float:
    """Bytes of tensors that each of so many processes can have of a machine's memory."""
    return (total / processes - CPU_PROCESS) / (1 + CPU_GAPS)


def vocabulary(dataset: Dataset) -> int:
    """Entries of the dictionary with special ones and language tokens; as asked for while there is none."""
    from fairseq.data import Dictionary

    files = sorted(Folders(dataset.name).binary.glob("**/dict*.txt"))
    words = dataset.subwords["vocab-size"]
    if files:
        with open(files[0], encoding="utf-8") as lines:
            words = sum(1 for _ in lines)
    return words + len(Dictionary()) + len(dataset.languages)


def longest_sentence(folder: Path, shards: int) -> int | None:
    """Tokens of the longest training sentence on either side, its language token included.

    Of the first shard alone, which is a sample; None where there is no index that tells.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    longest = []
    for file in sorted((folder / shard_names(shards)[0]).glob("train.*.idx")):
        try:
            index = MMapIndexedDataset.Index(str(file))  # it takes its sizes along when it goes
            longest.append(int(index.sizes.max()))
        except Exception:  # of another format, or cut off: training says so
            return None
    return max(longest) + 1 if longest else None


def _memory(cpu: bool) -> int | None:
    """Bytes that a GPU or, for CPUs, the machine has; None where that is not told."""
    if cpu:
        from smoe_fairseq.host_memory import machine_memory

        return machine_memory()
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


# ``scripts/train.sh``: one ``fairseq-train`` command, on as many GPUs as there are.

FORCE = "--force-resume"
LOG = "train.log"
SCREEN_SECONDS = {True: 1, False: 30}  # between two lines, by whether there is a terminal
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
    flags = dataset.train | method_flags(method, dataset) | {"seed": processes.seed_of(dataset)}
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
        planned = identity.plan(dataset, place.processes, extra)
        flags |= {"max-tokens": planned.max_tokens, "update-freq": planned.update_freq}
        notes += [f"# {planned}", f"# BATCH: {identity.choices(dataset)}"]
        if not planned.kept:
            report(f"the batch is not of the size asked for: {planned}")
        if planned.name == "release" and has_strata(flags) and "smoe-norm" not in flags:
            notes.append(
                "# --smoe-norm released computes as the released code does (docs/reproduce.md)"
            )
    chosen, said = precision_flags(flags, place, extra)
    flags |= chosen
    notes += said
    folder = folders.run(processes.run_name(dataset, method))
    words = [*data_arguments(dataset), *arguments(flags)]
    words += ["--save-dir", str(folder), "--log-file", str(folder / LOG), *extra]
    _check_complete(dataset, words)
    if not dry_run():
        if place.meets_at_port:
            processes.check_port()
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
    line = command(*place.words("fairseq-train"), *words)
    lines = [
        f"# {dataset.name} {folder.name}: train; resumes from checkpoint_last.pt if there is one",
        *notes,
        command("mkdir", "-p", folder),
        line,
    ]
    if not dry_run():
        lines.insert(-2, f"# the log is {folder / LOG}")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOG, "a", encoding="utf-8") as log:
            print(f"$ {line}", file=log)
    try:
        run(lines, screen_variables())
    except (SystemExit, UsageError) as ended:
        # Of another run, whose torchrun answers: ours has waited for its own machines in vain. A status of
        # 128 and above is that of a signal.
        status = ended.code if isinstance(ended, SystemExit) else 128
        if place.meets_at_port and status < 128:
            processes.raise_if_taken()
        if any(folder.glob("checkpoint_last*.pt")):
            how = f"the same command goes on from {folder}/checkpoint_last.pt"
        else:
            how = "nothing was saved yet, so the same command starts again"
        if isinstance(ended, UsageError):
            raise UsageError(f"{ended}; {how}") from None
        report(f"training has ended early; {how}")
        raise
    if not dry_run():
        identity.finish(words)


def screen_variables() -> dict[str, str]:
    """Has `fairseq-train` show a line every few seconds, and the rest in its log; none with a LOGLEVEL."""
    if os.environ.get("LOGLEVEL"):
        return {}
    seconds = SCREEN_SECONDS[sys.stdout.isatty()]
    return {"LOGLEVEL": "WARNING", screen.VARIABLE: str(seconds)}


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
