"""The forecast of ``scripts/train.sh``: the model's size, its memory, and how many tokens fit."""

from collections.abc import Sequence

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import Folders, vocab_size
from smoe_fairseq.recipes.program_flags import flag_values, parse_flags
from smoe_fairseq.recipes.training.batch import longest_sentence, most_positions
from smoe_fairseq.recipes.training.launcher import Launch


def forecast(dataset: Dataset, launch: Launch, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Comments and warnings about a run of ``fairseq-train WORDS``; none with ``FORECAST=0``.

    If a forecast fails, a comment says so; training reports the cause.

    Raises:
        UsageError: a flag is unknown to fairseq-train, or such a model is impossible.
    """
    if not dataset.settings.forecast:
        return [], []
    with quietly():
        parse_flags("fairseq-train", words)
    try:
        with quietly():
            return _forecast(dataset, launch, [*(["--cpu"] if launch.cpu else []), *words])
    except Exception as error:
        from smoe_fairseq.models.memory import NotForecastError  # imports fairseq

        impossible = isinstance(error, UsageError) and str(error).startswith("--")
        if impossible and not isinstance(error, NotForecastError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        return [f"# the memory of this run is not known: {reason}"], []


def _forecast(dataset: Dataset, launch: Launch, words: list[str]) -> tuple[list[str], list[str]]:
    import fairseq  # noqa: F401  (registers the plugin's model; slow)

    from smoe_fairseq.analysis.cost import build_meta_model, count, parse_run
    from smoe_fairseq.analysis.processes import mebibytes, process_cost
    from smoe_fairseq.models import memory

    flags, ranks = parse_run(words), launch.processes
    length = longest_sentence(Folders(dataset).binary)
    known = "the longest" if length else "assumed"
    length = length or memory.LENGTH
    values = flag_values(words)
    if "--max-tokens" not in values and (sentences := values.get("--batch-size", "")).isdecimal():
        flags.max_tokens = int(sentences) * length
    length = min(length, flags.max_tokens, most_positions({}, words))
    vocabulary = vocab_size(dataset) + 1 + len(dataset.languages)  # <pad> and language tokens
    run = memory.Run(build_meta_model(flags, vocabulary), flags, ranks, length)
    cost = count(run.model)
    needs = process_cost(run)
    held, total = needs.held, _memory(flags.cpu)
    each = "training needs" if ranks == 1 else f"each of {ranks} ranks needs"
    comments = [
        f"# {cost.parameters / 1e6:,.1f}M parameters, {cost.active_parameters / 1e6:,.1f}M of them active; "
        f"{cost.flops_per_token / 1e6:,.0f}M FLOPs per token in a forward pass",
        f"# {each} {mebibytes(held.peak)} of memory{f' of {mebibytes(total)}' if total else ''} at the "
        f"peak: weights {mebibytes(held.weights)}, gradients {mebibytes(held.gradients)}, optimizer "
        f"{mebibytes(held.optimizer)}, activations {mebibytes(held.activations)} for "
        f"{flags.max_tokens:,} tokens in sentences of {run.length} ({known})",
    ]
    if ranks > 1:
        parts = ("gradients", "tokens", "parameters")
        sent = [f"{mebibytes(n)} of {p}" for p in parts if (n := getattr(needs, p))]
        comments.append(f"# and sends {' and '.join(sent)} per update")
    if total is None:
        return comments, []
    room = memory.gpu_room(total)
    if flags.cpu:
        room = (total / max(1, launch.gpus) - memory.CPU_PROCESS) / (1 + memory.CPU_GAPS)
    fit = memory.tokens_that_fit(run, room)
    comments.append(f"# up to {fit:,} tokens (--max-tokens) fit")
    if held.peak <= room:
        return comments, []
    device = "this machine's memory" if flags.cpu else "the GPU's memory"
    takes = f"it needs {mebibytes(held.peak)}"
    if fit < length:
        less = "a smaller model, --memory-efficient-bf16, or --expert-parallel on several GPUs"
        advice = f", whatever the batch; {less} needs less memory"
    else:
        tokens, parts = memory.same_batch(flags.max_tokens, flags.update_freq, fit)
        advice = f"; with --max-tokens {tokens} --update-freq {parts} it fits"
    return comments, [f"training will not fit into {device}, {mebibytes(total)}: {takes}{advice}"]


def _memory(cpu: bool) -> int | None:
    """Bytes of the machine or, unless ``cpu``, of its first GPU; None if unknown."""
    if cpu:
        return machine_memory()
    import torch

    available = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).total_memory if available else None
