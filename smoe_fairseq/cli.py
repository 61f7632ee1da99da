"""The ``smoe`` command: a table of subcommands, each loaded when it is called."""

import argparse
import functools
import importlib
import sys
from typing import NoReturn

from smoe_fairseq.compat import require_fairseq
from smoe_fairseq.system.errors import ends_with_sentence, of_command
from smoe_fairseq.system.output import writes_all
from smoe_fairseq.system.signals import heeded

# name: (module, one line of help). The module has `add_arguments(parser)` and `run(args)`, which
# returns None or an exit status.
COMMANDS = {
    "path": ("smoe_fairseq.path", "print the package's path, for fairseq's --user-dir"),
    "cost": (
        "smoe_fairseq.analysis.cost_command",
        "parameters, FLOPs per token and requested capacity of a model",
    ),
    "analyze": (
        "smoe_fairseq.analysis.analyze_command",
        "where the capacity goes, by language, token and depth: numbers, pictures and a report",
    ),
    "translate": (
        "smoe_fairseq.translation.translate_command",
        "text in, translations out: a line for each line",
    ),
    "serve": (
        "smoe_fairseq.serving.serve_command",
        "a page in the browser, and JSON for programs, before a trained model",
    ),
    "consolidate": (
        "smoe_fairseq.checkpoint.consolidate_command",
        "one ordinary checkpoint of the files that an --expert-parallel run has saved",
    ),
    "reshard": (
        "smoe_fairseq.checkpoint.reshard_command",
        "the checkpoint for another number of processes, optimizer state included",
    ),
    "average": (
        "smoe_fairseq.checkpoint.average_command",
        "one checkpoint whose weights are the mean of several",
    ),
    "upcycle": (
        "smoe_fairseq.conversion.upcycle_command",
        "an MoE checkpoint to train on, its experts copies of a dense model's FFNs",
    ),
    "export": (
        "smoe_fairseq.conversion.export_command",
        "a checkpoint for other tools: fairseq's own transformer, or safetensors",
    ),
    "import": (
        "smoe_fairseq.conversion.import_command",
        "a checkpoint of fairseq's MoE branch or of the SMoE paper's code as one of ours",
    ),
    "prune": (
        "smoe_fairseq.conversion.prune_command",
        "a checkpoint without the experts that some directions use little",
    ),
    "table": (
        "smoe_fairseq.recipes.tables.table",
        "the scores of a data set's runs, beside the paper's",
    ),
}


class _Parser(argparse.ArgumentParser):
    """What is wrong is a sentence, and not the last line below all flags of a command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help says more\n")


@heeded()
@functools.partial(ends_with_sentence, sentence=of_command)
@writes_all
def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="smoe", description="Tools of smoe_fairseq.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = argv[0] if argv else None
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == named:
            require_fairseq()
            command = importlib.import_module(module)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args) or 0


if __name__ == "__main__":
    sys.exit(main())
