"""``smoe analyze``."""

import csv
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from torch import nn

import smoe_fairseq
from smoe_fairseq.analysis import inputs, report, results, sentence, training_log
from smoe_fairseq.analysis.capacity import check_capacity
from smoe_fairseq.analysis.figures import draw_sentence, save, warn_of_missing
from smoe_fairseq.analysis.record import collect
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import refuse_existing, whole_folder
from smoe_fairseq.flags import add_flag, decoded, positive, with_value
from smoe_fairseq.modules import Strata

EXAMPLE_TOKENS = 16  # approximate length of the report's example


def analyze_subset(
    model: nn.Module, task, directions: list[str], subset: inputs.Subset, args: Namespace
) -> str:
    """Write numbers, pictures and report to ``args.output``; returns a line for the user."""
    series = _series(args)
    totals = results.Results(
        run={},
        dictionaries={side: inputs.dictionary_of(task, side) for side in inputs.sides(task)},
        ranks=results.ranks(task, directions),
        sizes=results.sizes(task, directions),
        capacity=check_capacity(model, task, directions, subset),
        languages={name: inputs.languages(task, name) for name in directions},
    )
    samples = {name: inputs.Samples(model, task, name, subset) for name in directions}
    with whole_folder(args.output, called=f"--output {args.output}") as folder:
        with open(folder / "tokens.csv", "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            for name in directions:
                totals.add(name, blocks := collect(samples[name]))
                table.writerows(results.token_rows(totals, name, blocks))
        totals.run.update(_description(args, model, totals, samples))
        results.write(folder, totals)
    try:
        example = directions[-1], _example(model, task, directions[-1], args)
        report.write(args.output, totals, args.path.resolve(), example, series, args.min_count)
    except Exception as error:  # the numbers, which may have taken hours, are kept
        reason = " ".join(str(error).split()) or type(error).__name__
        lost = "has all numbers, but the report could not be drawn"
        raise UsageError(f"{args.output} {lost}: {reason}") from error
    return f"{args.output / 'report.html'}: the report; its folder has numbers and pictures"


def analyze_sentence(model: nn.Module, task, direction: str, text: str, folder: Path | None) -> str:
    """The output for one sentence in one direction, for a terminal; with ``folder`` also as a picture."""
    sides = sentence.run_sentence(model, task, direction, text, inputs.folders(task)[0])
    if folder is not None:
        with whole_folder(folder, called=f"--output {folder}") as partial:
            warn_of_missing(save(draw_sentence(sides), partial / "sentence"))
    heading = "" if inputs.is_language_model(task) else f"{direction}\n"
    return heading + sentence.show(sides, sentence.wants_colour(sys.stdout))


def _series(args: Namespace) -> dict:
    log = args.log or args.path.with_name("train.log")
    if args.log is None and not log.exists():
        return {}
    try:
        series = training_log.read(log)
    except UsageError as error:
        raise UsageError(f"--log {error}") from None
    if args.log is not None and not series:
        raise UsageError(f"--log {log} has no routing metrics: expected the log of fairseq-train")
    # A single line of the run's own log shows no course.
    return series if args.log or max(map(len, series.values()), default=0) > 1 else {}


def _description(args: Namespace, model: nn.Module, totals: results.Results, samples: dict):
    """The content of ``run.json``."""
    return {
        "smoe_fairseq": smoe_fairseq.__version__,
        "data": args.data,
        "checkpoint": str(args.path),
        "updates": model.num_updates,
        "subset": args.gen_subset,
        "strata": {block.name: _strata_text(block.strata) for block in totals.blocks},
        "device": next(model.parameters()).device.type,
        "sample": args.sentences,
        "sentences": {name: each.seen for name, each in samples.items()},
        "too_long": {name: each.too_long for name, each in samples.items()},
        "min_count": args.min_count,
        "nll_loss": totals.capacity and round(totals.capacity.nll_loss, 6),
        "capacity_nll_loss": totals.capacity and round(totals.capacity.limited_nll_loss, 6),
    }


def _strata_text(strata: Strata) -> str:
    return f"{strata} in a chain of {strata.chain}" if strata.chain > 1 else str(strata)


def _example(model: nn.Module, task, direction: str, args: Namespace) -> list:
    """A sentence pair of medium length; for a language model the beginning of a sample."""
    dataset = next(inputs.datasets(task, direction, args.gen_subset))
    indices = range(min(len(dataset), 1000))
    example = min(indices, key=lambda i: abs(dataset.num_tokens(i) - EXAMPLE_TOKENS))
    sample = dataset.collater([dataset[example]])["net_input"]
    # A language model's sample may be long, and earlier tokens do not depend on later ones.
    if inputs.is_language_model(task):
        sample["src_tokens"] = sample["src_tokens"][:, :EXAMPLE_TOKENS]
    return sentence.run_pair(model, task, inputs.on_device(model, sample))


MIN_COUNT = 10


def add_analyze_arguments(parser: ArgumentParser) -> None:
    inputs.add_input_arguments(parser, "directions")
    add, shown = partial(add_flag, parser), "requested capacity"
    run = "folder of a run, or a checkpoint"
    parser.add_argument("--path", type=Path, required=True, metavar="RUN", help=run)
    add("--output", "DIR", "folder for the results; must not exist", Path)
    instead = "instead of a subset; with --output also as a picture"
    add("--sentence", "TEXT", f"show the {shown} of this sentence's tokens, {instead}", decoded)
    lists = f"out of the lists of lowest and highest {shown}"
    add("--min-count", "N", f"leave tokens with fewer occurrences {lists}", positive, MIN_COUNT)
    usual = "default: train.log next to the checkpoint, if it exists"
    add("--log", "FILE", f"fairseq's log of the training; {usual}", Path)


def run_analyze(args: Namespace) -> None:
    """Write the results to ``--output``, or print those of one sentence."""
    if args.sentence is None and args.output is None:
        raise UsageError("--output is missing: name a folder for the results")
    if args.output is not None:
        refuse_existing(args.output, f"--output {args.output}")
    of_a_subset = {"log": None, "sentences": None, "gen_subset": "valid", "min_count": MIN_COUNT}
    for name, default in of_a_subset.items():
        if args.sentence is not None and (value := getattr(args, name)) != default:
            raise UsageError(f"{with_value(name, value)}: expected no --sentence beside it")
    with quietly():
        model, task, directions, subset = inputs.load_inputs(args)
        if args.sentence is not None and args.lang_pairs and len(directions) > 1:
            raise UsageError(f"--lang-pairs {args.lang_pairs}: expected one pair for --sentence")
        if args.sentence is None:
            text = analyze_subset(model, task, directions, subset, args)
        else:
            text = analyze_sentence(model, task, directions[0], args.sentence, args.output)
    print(text)
