"""``smoe upcycle``: an MoE model to train on, made of a dense one."""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import field, fields, make_dataclass
from pathlib import Path

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

with quietly():
    import torch
    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from smoe_fairseq.checkpoint.names import files_read
    from smoe_fairseq.checkpoint.write import check_output
    from smoe_fairseq.conversion.model_settings import of_experts
    from smoe_fairseq.conversion.upcycle import upcycle
    from smoe_fairseq.conversion.written import write_converted
    from smoe_fairseq.models.config import SMoETransformerConfig, flag


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="DENSE.pt", help="dense, pre-norm; ours or fairseq's"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="added to the experts' weights: its standard deviation over theirs; default: 0, all are alike",
    )
    parser.add_argument("--seed", type=int, default=1, help="of gates and noise; default: 1")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    experts = make_dataclass(
        "Experts",
        [
            (f.name, f.type, field(default=f.default, metadata=f.metadata))
            for f in fields(SMoETransformerConfig)
            if of_experts(f.name) and f.name != "expert_parallel"
        ],
        bases=(FairseqDataclass,),
    )
    group = parser.add_argument_group("experts, as for fairseq-train")
    gen_parser_from_dataclass(group, experts(), delete_default=True)


def run(args: Namespace) -> None:
    """Writes FILE, and says how to train it on."""
    if not (args.noise >= 0 and math.isfinite(args.noise)):
        raise UsageError(f"--noise {args.noise}: expected 0 or a positive number, such as 0.01")
    check_output(files_read(args.path), [args.output], args.force)
    given = {
        name: v
        for name, v in vars(args).items()
        if of_experts(name) and not (v is None or v is False)
    }
    with quietly():
        torch.manual_seed(args.seed)
        state = upcycle(args.path, given, args.noise)
        write_converted(state, args.output)
    layers = sum(name.endswith(".moe.experts.w1") for name in state["model"])
    words = " ".join(_shown(name, value) for name, value in given.items())
    print(
        f"{args.output}: {layers} MoE layers, whose experts are copies of the FFNs of {args.path}"
    )
    print(
        f"train it on with its dictionaries: fairseq-train DATA --user-dir $(smoe path) --arch "
        f"smoe_transformer SIZES {words} --finetune-from-model {args.output}"
    )


def _shown(name: str, value) -> str:
    return flag(name) if value is True else f"{flag(name)} {value}"
