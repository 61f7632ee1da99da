"""The forecast of ``scripts/train.sh``: the model's size, the memory it takes, and flags that take less."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.data.text_files import count_lines
from smoe_fairseq.recipes.folders import Folders, shard_names
from smoe_fairseq.recipes.training.launcher import Launch

SECONDS = 120  # timeout of the forecast
# Memory beside the tensors, as measured (docs/cost.md). On a GPU: its context and gaps between blocks, as
# a share of all. On a CPU: the bytes of a process, and gaps that malloc leaves, as a share of the tensors.
GPU_SHARE = 0.1
CPU_PROCESS, CPU_GAPS = 400 * 2**20, 1 / 3
_WARNING = "warning: "


def forecast(dataset: Dataset, place: Launch, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Comments and warnings about a run of ``fairseq-train WORDS``; none with ``FORECAST=0``.

    A separate process makes it: fairseq and torch would stay in this one's memory during training, and an
    error in a forecast should not stop training.
    """
    if os.environ.get("FORECAST") == "0":
        return [], []
    program = [sys.executable, "-W", "ignore", "-m", "smoe_fairseq.recipes", "foretell"]
    counts = [str(place.processes), str(max(1, place.gpus))]
    try:
        done = subprocess.run(
            [*program, dataset.name, *counts, "--", *(["--cpu"] if place.cpu else []), *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
        reason = ""
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
            reason = reason or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"reckoning took longer than {SECONDS} s"
    except OSError as error:
        reason = error.strerror
    if reason:
        return [f"# what this takes of memory is not known: {reason}"], []
    lines = done.stdout.splitlines()
    warnings = [x.removeprefix(_WARNING) for x in lines if x.startswith(_WARNING)]
    return [line for line in lines if line.startswith("# ")], warnings


def print_forecast(dataset: Dataset, processes: int, on_machine: int, flags: Sequence[str]) -> None:
    """Print comments, and lines that begin with ``warning: ``.

    Args:
        on_machine: how many of the processes share this machine.
    """
    from smoe_fairseq.errors import quietly

    with quietly():
        for line in _lines(dataset, processes, on_machine, flags):
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
    room = total * (1 - GPU_SHARE)
    if flags.cpu:
        room = (total / on_machine - CPU_PROCESS) / (1 + CPU_GAPS)
    if held.peak <= room:
        return
    place = "this machine's memory" if flags.cpu else "the GPU's memory"
    among = f", among {on_machine} processes" if flags.cpu and on_machine > 1 else ""
    remedy = "no flag makes it fit, only a smaller model or more memory"
    if found := first_that_fits(run, room):
        remedy = f"add {found[0]}, which takes {mebibytes(found[1])}"
    yield (
        f"{_WARNING}training will not fit into {place}: it takes {mebibytes(held.peak)}, and of the "
        f"{mebibytes(total)} there{among}, {mebibytes(max(room, 0))} are left for it beside torch itself and "
        f"gaps between blocks; {remedy}"
    )


def vocabulary(dataset: Dataset) -> int:
    """Entries of the dictionary, special and language tokens included; an estimate until there is one."""
    from fairseq.data import Dictionary

    files = sorted(Folders(dataset.name).binary.glob("**/dict*.txt"))
    words = count_lines(files[0]) if files else dataset.subwords["vocab-size"]
    return words + len(Dictionary()) + len(dataset.languages)


def longest_sentence(folder: Path, shards: int) -> int | None:
    """Tokens of the longest training sentence on either side of the first shard, with the language token.

    None without a readable index.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    longest = []
    for file in sorted((folder / shard_names(shards)[0]).glob("train.*.idx")):
        try:
            index = MMapIndexedDataset.Index(str(file))  # its sizes are gone when it is
            longest.append(int(index.sizes.max()))
        except Exception:  # of another format, or cut off: training says so
            return None
    return max(longest) + 1 if longest else None


def _memory(cpu: bool) -> int | None:
    """Bytes of the machine or, unless ``cpu``, of its first GPU; None if unknown."""
    if cpu:
        return machine_memory()
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory
