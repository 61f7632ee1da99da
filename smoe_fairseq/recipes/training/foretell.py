"""What ``scripts/train.sh`` says before it starts: what is trained, what that takes, and what takes less."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.recipes.folders import Folders, shard_names
from smoe_fairseq.recipes.launch import Launch
from smoe_fairseq.settings.dataset import Dataset

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
    from smoe_fairseq.system.quiet import quietly

    with quietly():
        for line in _lines(dataset, processes, on_machine, words):
            print(line)


def _lines(
    dataset: Dataset, processes: int, on_machine: int, words: Sequence[str]
) -> Iterator[str]:
    import fairseq  # noqa: F401  (registers the plugin's model)

    from smoe_fairseq.analysis.cost import count
    from smoe_fairseq.analysis.forecast import LENGTH, Run
    from smoe_fairseq.analysis.meta_model import build_meta_model
    from smoe_fairseq.analysis.process_cost import mebibytes, process_cost
    from smoe_fairseq.analysis.remedy import first_that_fits
    from smoe_fairseq.analysis.run_flags import parse_run

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
        from smoe_fairseq.system.memory import machine_memory

        return machine_memory()
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory
