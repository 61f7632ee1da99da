"""``smoe prune``: a checkpoint without the experts that some directions use little."""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.numbers import positive
from smoe_fairseq.system.quiet import quietly

with quietly():
    from smoe_fairseq.analysis import inputs
    from smoe_fairseq.checkpoint.write import check_output
    from smoe_fairseq.conversion.prune import PrunedLayer, check_is_one_file, prune
    from smoe_fairseq.conversion.selection import Layer, keep_loaded, keep_share
    from smoe_fairseq.conversion.use import Use, highest_load, together, use_of
    from smoe_fairseq.conversion.written import write_converted
    from smoe_fairseq.models.moe_layers import moe_blocks
    from smoe_fairseq.modules.gates.hashed import HashGate

OVER = ("layer", "all")
SOFTMAX = (
    "note: these gates' decisions go by probabilities over all experts that they see, so that translations "
    "differ, if little, even without experts that were never chosen"
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="CHECKPOINT")
    parser.add_argument("data", metavar="DATA", help="binarised data, as fairseq-train takes it")
    parser.add_argument(
        "--lang-pairs",
        metavar="PAIRS",
        help="the directions that the model is for, such as en-cs,cs-en; default: all of the checkpoint",
    )
    parser.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="keep this share of the experts, above 0 up to 1: those of highest importance, which is the "
        "rate of first choices x exp(mean confidence of these)",
    )
    parser.add_argument(
        "--over",
        choices=OVER,
        help="what --keep is a share of: the experts of each MoE layer, or of all; default: layer",
    )
    parser.add_argument(
        "--min-load",
        type=float,
        metavar="LOAD",
        help="in place of --keep: remove experts whose load, which is their choices over the mean of "
        "their layer, is above this in no direction; 0 removes those that were never chosen",
    )
    parser.add_argument(
        "--gen-subset",
        default="valid",
        help="train, valid or test: what is counted; default: valid",
    )
    parser.add_argument(
        "--sentences", type=positive, metavar="N", help="a random sample of N per direction"
    )
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a batch")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: Namespace) -> None:
    """Counts, chooses, writes, and says what is left."""
    check_request(args)
    check_is_one_file(args.path)
    check_output([args.path], [args.output], args.force)
    with quietly():
        model, task, directions = inputs.load_sparse_model(
            args.path, args.data, args.lang_pairs, args.cpu
        )
        blocks = moe_blocks(model)
        if any(isinstance(gate, HashGate) for block in blocks.values() for gate in block.gates):
            raise UsageError(
                f"{args.path} has --moe-gate hash, which looks an expert up for every token of the "
                "dictionary, so that each is needed; expected a gate that scores them"
            )
        of_subset = args.gen_subset, args.sentences, args.max_tokens
        uses = list(use_of(model, task, directions, *of_subset))
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = {name: Layer.of(block) for name, block in blocks.items()}
    del model, blocks
    use = together(uses)
    if args.keep is not None:
        importance = {name: layer.importance for name, layer in use.items()}
        kept = keep_share(layers, importance, args.keep, args.over == "all")
    else:
        kept = keep_loaded(layers, highest_load(uses), args.min_load)
    pruned = {name: PrunedLayer.of(layers[name], kept[name]) for name in layers}
    state = prune(args.path, pruned)
    write_converted(state, args.output)
    print(f"choices counted over {args.gen_subset} of {', '.join(directions)}")
    print(table(pruned, use))
    left = sum(state["model"][name].numel() for name in parameters)
    if any(layer.weighs_all and pruned[name].removed for name, layer in layers.items()):
        print(SOFTMAX)
    print(summary(args, pruned, sum(parameters.values()), left))


def check_request(args: Namespace) -> None:
    """Raise UsageError unless it is clear how much is to stay."""
    if (args.keep is None) == (args.min_load is None):
        raise UsageError(
            f"{'neither --keep nor' if args.keep is None else '--keep with'} --min-load: expected one of "
            "the two, a share of the experts to keep or the load of those to remove"
        )
    if args.keep is not None and not 0 < args.keep <= 1:
        raise UsageError(f"--keep {args.keep:g}: expected a share above 0, up to 1, such as 0.5")
    if args.min_load is not None and not 0 <= args.min_load < math.inf:
        raise UsageError(f"--min-load {args.min_load:g}: expected a number of at least 0")
    if args.min_load is not None and args.over is not None:
        raise UsageError(f"--over {args.over} with --min-load: expected it with --keep")


def table(pruned: Mapping[str, PrunedLayer], use: Mapping[str, Use]) -> str:
    """A row for each layer: strata, experts, and what share of the choices were of those removed."""
    rows = [("layer", "strata", "", "kept", "removed", "their choices")]
    for name, layer in pruned.items():
        choices = use[name].choices
        lost = choices[layer.removed].sum() / max(choices.sum(), 1)
        rows.append(
            (
                name.replace(".", " "),
                str(layer.before),
                str(layer.after),
                _numbers(layer.experts),
                _numbers(layer.removed),
                f"{lost:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _numbers(experts: list[int]) -> str:
    return " ".join(map(str, experts)) or "-"


def summary(args: Namespace, pruned: Mapping[str, PrunedLayer], before: int, after: int) -> str:
    experts = sum(len(layer.experts) for layer in pruned.values())
    of_all = sum(layer.before.num_experts for layer in pruned.values())
    sizes = [f"{path.stat().st_size / 1e6:.1f} MB" for path in (args.output, args.path)]
    return (
        f"{experts} of {of_all} experts, {after:,} of {before:,} parameters ({after / before:.1%})\n"
        f"{args.output}: {sizes[0]}; {args.path} has {sizes[1]}, with what training keeps beside the weights"
    )
