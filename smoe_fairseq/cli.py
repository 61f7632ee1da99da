"""The ``smoe`` command: a table of subcommands, each loaded when it is called."""

import argparse
import importlib
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NoReturn

from smoe_fairseq.compat import require_fairseq
from smoe_fairseq.errors import ends_with_sentence, heeded, printable, quietly, writes_all
from smoe_fairseq.recipes.commands import RECIPES, add_arguments

# NAME: (module, one line of help). The module has `add_NAME_arguments(parser)` and `run_NAME(args)`,
# which returns None or an exit status. The recipes have a table of their own (recipes/commands.py).
COMMANDS = {
    "path": ("smoe_fairseq.cli", "print the package's path, for fairseq's --user-dir"),
    "cost": (
        "smoe_fairseq.analysis.cost_command",
        "parameters, FLOPs per token and requested capacity of a model",
    ),
    "analyze": (
        "smoe_fairseq.analysis.command",
        "where the capacity goes, by language, token and depth: numbers, pictures and a report",
    ),
    "translate": (
        "smoe_fairseq.translate.command",
        "text in, translations out: a line for each line",
    ),
    "shortlist": (
        "smoe_fairseq.translate.shortlist",
        "the target tokens that each source token may need, for a faster translation",
    ),
    "serve": (
        "smoe_fairseq.serve.app",
        "a page in the browser, and JSON for programs, before a trained model",
    ),
    "consolidate": (
        "smoe_fairseq.checkpoints.sets",
        "one ordinary checkpoint of the files that an --expert-parallel run has saved",
    ),
    "reshard": (
        "smoe_fairseq.checkpoints.sets",
        "the checkpoint for another number of processes, optimizer state included",
    ),
    "average": (
        "smoe_fairseq.checkpoints.average",
        "one checkpoint whose weights are the mean of several",
    ),
    "upcycle": (
        "smoe_fairseq.checkpoints.upcycle",
        "an MoE checkpoint to train on, its experts copies of a dense model's FFNs",
    ),
    "export": (
        "smoe_fairseq.checkpoints.export",
        "a checkpoint for other tools: fairseq's own transformer, or safetensors",
    ),
    "import": (
        "smoe_fairseq.checkpoints.foreign",
        "a checkpoint of fairseq's MoE branch or of the SMoE paper's code as one of ours",
    ),
    "prune": (
        "smoe_fairseq.checkpoints.prune",
        "a checkpoint without the experts that some directions use little",
    ),
    "subwords": (
        "smoe_fairseq.recipes.data.subwords",
        "learn subwords from text, and divide text into them",
    ),
}


class _Parser(argparse.ArgumentParser):
    """What is wrong is a sentence, and not the last line below all flags of a command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(message)}; {self.prog} --help says more\n")


@heeded()
@ends_with_sentence
@writes_all
def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="smoe", description="Tools of smoe_fairseq.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = argv[0] if argv else None
    if named in (*COMMANDS, *RECIPES):
        require_fairseq()
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == named:
            with quietly():
                command = importlib.import_module(module)
            getattr(command, f"add_{name}_arguments")(subparser)
            subparser.set_defaults(run=getattr(command, f"run_{name}"))
    for name, (_, summary, _) in RECIPES.items():
        add_arguments(subparsers.add_parser(name, help=summary, description=summary), name)
    args = parser.parse_args(argv)
    return args.run(args) or 0


def add_path_arguments(parser: ArgumentParser) -> None:
    """Takes no arguments."""


def run_path(args: Namespace) -> None:
    """Prints the folder that fairseq takes as ``--user-dir``."""
    print(Path(__file__).resolve().parent)


if __name__ == "__main__":
    sys.exit(main())
