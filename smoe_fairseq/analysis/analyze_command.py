"""``smoe analyze``: where the capacity goes, as numbers, pictures and a report."""

import importlib.util
import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import refuse_existing
from smoe_fairseq.system.numbers import positive
from smoe_fairseq.system.quiet import quietly

TOO_FEW = 10


def add_arguments(parser: ArgumentParser) -> None:
    """Data, checkpoint, what to run over and where to write."""
    parser.add_argument("data", metavar="DATA", help="binarised data, as fairseq-train takes it")
    parser.add_argument("--path", type=Path, required=True, metavar="CHECKPOINT")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new folder for the results")
    parser.add_argument(
        "--gen-subset", default="valid", help="train, valid or test; default: valid"
    )
    parser.add_argument(
        "--lang-pairs", metavar="PAIRS", help="such as en-de,de-en; default: all of the checkpoint"
    )
    parser.add_argument(
        "--sentences", type=positive, metavar="N", help="a random sample of N per direction"
    )
    parser.add_argument(
        "--sentence",
        metavar="TEXT",
        help="show the capacity that this one sentence's tokens request, instead of a subset's; "
        "with --output also as a picture",
    )
    parser.add_argument(
        "--min-count",
        type=positive,
        default=TOO_FEW,
        metavar="N",
        help="occurrences of a token that is to be among those of lowest or highest requested "
        f"capacity; default: {TOO_FEW}",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="fairseq's log of the training; default: train.log beside the checkpoint, if there",
    )
    parser.add_argument(
        "--exit-bias",
        type=_numbers,
        metavar="B,B,...",
        help="also translate the subset with each of these --smoe-exit-bias, such as 0,0.5,1,2, and draw "
        "BLEU and time over them; negative ones as in --exit-bias=-1,0",
    )
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a batch")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")


def run(args: Namespace) -> None:
    """Writes the results to ``--output``, or prints one sentence's."""
    if args.sentence is None and args.output is None:
        raise UsageError("--output is missing: name a folder for the results")
    if args.sentence is not None and args.exit_bias:
        raise UsageError(
            "--exit-bias with --sentence: biases are compared over a subset; leave one out"
        )
    if args.output is not None:
        refuse_existing(args.output, f"--output {args.output}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("smoe analyze draws with matplotlib: pip install matplotlib")
    with quietly():
        from smoe_fairseq.analysis import analyze, inputs

        model, task, directions = inputs.load_sparse_model(
            args.path, args.data, args.lang_pairs, args.cpu
        )
        if args.sentence is None:
            text = analyze.analyze_subset(model, task, directions, args)
        else:
            text = analyze.analyze_sentence(
                model, task, directions, args.sentence, args.output, sys.stdout
            )
    print(text)


def _numbers(text: str) -> list[float]:
    try:
        values = sorted({float(part) for part in text.split(",")})
        if all(map(math.isfinite, values)):
            return values
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text}: expected numbers joined by commas, such as 0,0.5,1,2")
