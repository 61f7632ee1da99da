"""``smoe cost``: parameters, forward FLOPs per token and requested capacity."""

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from smoe_fairseq.analysis.cost import (
    ARCHITECTURES,
    CONTEXT,
    READING,
    Cost,
    add_model_arguments,
    add_run_arguments,
    build_meta_model,
    count,
    is_language_model,
    parse_model,
    parse_run,
)
from smoe_fairseq.analysis.inputs import load
from smoe_fairseq.analysis.processes import aligned, fits, print_process_costs, process_costs
from smoe_fairseq.analysis.record import requested_capacity
from smoe_fairseq.checkpoints.model import saved_options
from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.errors import UsageError, naming_file, quietly
from smoe_fairseq.flags import add_flag, at_least, flag_of
from smoe_fairseq.models.memory import LENGTH, Run
from smoe_fairseq.recipes.datasets import Dataset, load_dataset
from smoe_fairseq.recipes.methods import method_flags, tables
from smoe_fairseq.recipes.program_flags import arguments, words_of
from smoe_fairseq.translate.load import checkpoint_of

WITH_COSTS = ("m4", "m15")
BASELINE = "moe"  # the row from which FLOPs of other rows are subtracted
VOCABULARY = 32_000
SUBSET = "valid"


def system_cost(
    dataset: Dataset, method: str, vocabulary: int, flags: dict | None = None, **measured
) -> Cost:
    """The cost of a method's model for a data set; raises UsageError for an unknown method.

    All ``flags`` of a run replace the method's; some override them. ``measured`` are further arguments of
    `count`.
    """
    words = words_of(flags or {})
    if "--arch" not in words:
        words = [*arguments(dataset.train | method_flags(method, dataset)), *words]
    model = build_meta_model(parse_model(words), vocabulary)
    return count(model, **measured)


def compare(table: str, context: int = CONTEXT) -> list[dict[str, Any]]:
    """One entry per row of table "m4" or "m15", in millions: ours, the paper's, and the differences.

    ``flops_over_moe`` are a row's FLOPs less those of the vanilla MoE's row; a printed difference of
    two whole numbers may be off by less than 1.
    """
    dataset, rows = load_dataset(table), tables()[table]["rows"]
    size = dataset.subwords["vocab-size"]
    counted = {method: system_cost(dataset, method, size, context=context) for method in rows}
    base, paper_base = counted[BASELINE].flops_per_token / 1e6, rows[BASELINE]["flops_per_token"]
    entries = []
    for method, cost in counted.items():
        parameters, flops = cost.parameters / 1e6, cost.flops_per_token / 1e6
        printed = rows[method]
        entries.append(
            {
                "method": method,
                "parameters": parameters,
                "paper_parameters": printed["parameters"],
                "parameters_percent": 100 * (parameters / printed["parameters"] - 1),
                "flops": flops,
                "paper_flops": printed["flops_per_token"],
                "flops_difference": flops - printed["flops_per_token"],
                "flops_over_moe": flops - base,
                "paper_flops_over_moe": printed["flops_per_token"] - paper_base,
            }
        )
    return entries


def expected_cost(checkpoint: Path, context: int) -> Cost:
    """The cost of a checkpoint's model under uniform routing; raises UsageError unless the model is ours."""
    args, weights = saved_model(checkpoint)
    with naming_file(checkpoint):
        vocabulary = len(weights["decoder.embed_tokens.weight"])
        outputs = vocabulary
        if is_language_model(args):
            outputs = len(weights["decoder.output_projection.weight"])
        model = build_meta_model(args, vocabulary, None if outputs == vocabulary else outputs)
        model.upgrade_state_dict(weights)  # older ones may have fewer layer norms
        return count(model, context)


def saved_model(checkpoint: Path) -> tuple[Namespace, dict]:
    """A checkpoint's options, as from `parse_model`, and its weights; raises as `expected_cost`."""
    state = open_checkpoint(checkpoint)
    values = saved_options(checkpoint, state)
    arch = values.get("arch") or values.get("_name")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"{checkpoint} holds a model of architecture {arch}: expected {known}")
    return Namespace(**values | {"arch": arch}), state["model"]


def add_cost_arguments(parser: ArgumentParser) -> None:
    """Add flags for a model, a table of the paper, or a checkpoint."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = READING.format(context=CONTEXT)
    what, add = parser.add_mutually_exclusive_group(), partial(add_flag, parser)
    rows = "compute all rows of a table of the paper"
    what.add_argument("--paper", choices=WITH_COSTS, help=rows)
    add_flag(what, "--path", "RUN", "use the model of this run or checkpoint", Path)
    data = "with --path: binarised data on which to measure the requested capacity"
    parser.add_argument("data", nargs="?", type=Path, metavar="DATA", help=data)
    add("--gen-subset", None, "subset of DATA", default=SUBSET)
    add("--vocab-size", None, "size of the dictionary", int, VOCABULARY)
    add("--context", None, "positions that a token attends to", int, CONTEXT)
    each = "also show the bytes that each of N ranks holds and sends"
    add("--world-size", "N", f"{each}, with replicated and with sharded experts", int)
    fit = "also show how many tokens fit on a GPU with this memory"
    add("--gpu-memory", "GIB", f"{fit}, in training and translation", at_least(float, 0))
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_model_arguments(parser)
    training = parser.add_argument_group("training, with --world-size, as for fairseq-train")
    add_run_arguments(training)
    length = "tokens per sentence, for the memory of attention"
    add_flag(training, "--sentence-length", "N", length, int, LENGTH)


def run_cost(args: Namespace) -> None:
    """Print a model's cost, or a table of the paper next to our numbers."""
    if args.context < 0:
        raise UsageError(f"--context {args.context}: expected a number of positions, 0 or more")
    if args.data and not args.path:
        raise UsageError(f"{args.data}: expected --path CHECKPOINT with DATA")
    measured, processes, fitting = None, {}, {}
    _refuse_unused(args)
    with quietly():
        if args.paper:
            return _print_paper(compare(args.paper, args.context), args)
        if args.path:
            args.path = checkpoint_of(args.path)
            uniform = expected_cost(args.path, args.context)
            if args.data:
                model, task = load(args.path, args.data)
                capacity = requested_capacity(model, task, args.gen_subset)
                measured = count(model, args.context, capacity)
        else:
            run = _planned_run(args)
            uniform = count(run.model, args.context)
            if args.world_size is not None:
                try:
                    processes = process_costs(run)
                except ValueError as error:
                    raise UsageError(f"--world-size {args.world_size}: {error}") from None
            if args.gpu_memory is not None:
                fitting = fits(run, args.gpu_memory)
    if args.json:
        content = _plain(uniform) | ({"measured": _plain(measured)} if measured else {})
        if processes:
            content["processes"] = {name: cost.as_dict() for name, cost in processes.items()}
        if fitting:
            content["fits"] = fitting
        print(json.dumps(content | {"context": args.context}, indent=2))
        return
    _print_cost(uniform, "uniform routing")
    if measured:
        _print_cost(measured, f"measured on {args.gen_subset}")
    if processes:
        print_process_costs(processes, run)
    if fitting:
        print(f"\ntokens that fit on a GPU of {args.gpu_memory:g} GiB, per forward pass")
        for name, tokens in fitting.items():
            name = "training" if name == "replicated" and not args.world_size else name
            print(f"{name:12}{tokens:>12,}" if tokens else f"{name:12}{'none':>12}")
    print(f"\n{READING.format(context=args.context)}")


def _refuse_unused(args: Namespace) -> None:
    """Raises UsageError for a flag that changes nothing beside the others."""
    model, run = vars(parse_model([])), vars(parse_run([])) | {"sentence_length": LENGTH}
    training = {name: value for name, value in run.items() if name not in model}
    planned = run | {"world_size": None, "gpu_memory": None, "vocab_size": VOCABULARY}
    processes = args.world_size is not None or args.gpu_memory is not None
    for where, usual, used in (
        ("with --paper or --path", planned, not (args.paper or args.path)),
        ("without --world-size or --gpu-memory", training, processes),
        ("without DATA", {"gen_subset": SUBSET}, args.data),
    ):
        for name, value in usual.items():
            if not used and getattr(args, name, value) != value:
                raise UsageError(f"{flag_of(name)} has no effect {where}")


def _planned_run(args: Namespace) -> Run:
    """The run that the flags describe; raises UsageError for a number below 1."""
    for name in ("world_size", "max_tokens", "update_freq", "sentence_length"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise UsageError(f"{flag_of(name)} {number}: expected a whole number of at least 1")
    ranks = args.world_size or 1
    return Run(build_meta_model(args, args.vocab_size), args, ranks, args.sentence_length)


def _plain(cost: Cost) -> dict:
    return asdict(cost) | {"flops_per_token": cost.flops_per_token}


def _print_cost(cost: Cost, routing: str) -> None:
    rows = [("parameters", cost.parameters), ("  active", cost.active_parameters)]
    rows += [("FLOPs per token", cost.flops_per_token)]
    rows += [(f"  {part}", flops) for part, flops in cost.flops.items()]
    requested = cost.requested_capacity
    shown = "dense" if requested is None else f"{requested:.3f}  ({routing})"
    print(f"requested capacity   {shown}")
    for name, value in rows:
        print(f"{name:18}{value / 1e6:>12,.3f} M")


def _paper_row(e: dict) -> list[str]:
    over = e["flops_over_moe"] - e["paper_flops_over_moe"]
    return [
        e["method"],
        *(f"{e['parameters']:.1f}", f"{e['paper_parameters']}", f"{e['parameters_percent']:+.2f}"),
        *(f"{e['flops']:.1f}", f"{e['paper_flops']}", f"{e['flops_difference']:+.1f}"),
        *(f"{e['flops_over_moe']:+.1f}", f"{e['paper_flops_over_moe']:+d}", f"{over:+.1f}"),
    ]


def _print_paper(entries: list[dict], args: Namespace) -> None:
    if args.json:
        print(json.dumps(entries, indent=2))
        return
    header = ["in millions\nmethod", "parameters\nours", "\npaper", "\n%"]
    header += ["FLOPs/token\nours", "\npaper", "\ndiff", "over moe\nours", "\npaper", "\ndiff"]
    print(aligned(header, [_paper_row(entry) for entry in entries]))
    print(f"\n{READING.format(context=args.context)}")
