"""The flags of ``fairseq-train`` that decide what a run takes, read without fairseq's own parser.

That would want a folder of data, and takes as long as the forecast.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY

from smoe_fairseq.analysis.meta_model import add_model_arguments
from smoe_fairseq.system.errors import UsageError

TOKENS = 4096


def add_run_arguments(parser) -> None:
    """Those beside the model's, with fairseq's defaults, or the recipes' where fairseq has none."""

    def number(flag: str, text: str, **options):
        parser.add_argument(flag, type=int, metavar="N", help=text, **options)

    def choice(flag: str, text: str, default: str, choices):
        text = f"{text}; default: {default}"
        parser.add_argument(flag, default=default, choices=choices, metavar="NAME", help=text)

    number("--max-tokens", f"of a batch; default: {TOKENS}", default=TOKENS)
    number("--batch-size", "sentences of a batch, at most")
    number("--update-freq", "batches per update; default: 1", default=1)
    for flag in ("fp16", "bf16", "memory-efficient-fp16", "memory-efficient-bf16"):
        parser.add_argument(f"--{flag}", action="store_true", help=f"train in {flag[-4:]}")
    parser.add_argument("--fp16-no-flatten-grads", action="store_true", help="with --fp16")
    parser.add_argument("--amp", action="store_true", help="refused: only a GPU can say")
    choice("--optimizer", "with its own default settings", "adam", OPTIMIZER_REGISTRY)
    choice("--criterion", "likewise", "smoe_label_smoothed_cross_entropy", CRITERION_REGISTRY)
    choice("--zero-sharding", "os: the optimizer's state is shared out", "none", ("none", "os"))
    parser.add_argument("--ddp-backend", default="pytorch_ddp", metavar="NAME")
    parser.add_argument("--cpu", action="store_true", help="as a CPU computes, not a GPU")


class _Parser(ArgumentParser):
    def __init__(self):
        super().__init__(allow_abbrev=False, add_help=False, conflict_handler="resolve")

    def error(self, message: str):
        raise UsageError(message)


def parse_run(words: Sequence[str]) -> Namespace:
    """These flags, the model's, the optimizer's and the criterion's of a command line of ``fairseq-train``.

    Raises:
        UsageError: a value that none of them takes.
    """
    parser = _Parser()
    add_model_arguments(parser)
    add_run_arguments(parser)
    flags = parser.parse_known_args(list(words))[0]
    for registered in (OPTIMIZER_REGISTRY[flags.optimizer], CRITERION_REGISTRY[flags.criterion]):
        registered.add_args(parser)
    return parser.parse_known_args(list(words))[0]


def options_of(registered: type, flags: Namespace) -> Namespace:
    """What an optimizer or criterion of fairseq's is built with: ``flags``, and its defaults for the rest."""
    parser = _Parser()
    registered.add_args(parser)
    return Namespace(**vars(parser.parse_args([])) | vars(flags))
