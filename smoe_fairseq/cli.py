"""The ``smoe`` command: a table of subcommands, each loaded when it is called."""

import atexit
import gc
import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import smoe_fairseq
from smoe_fairseq.compat import require_fairseq
from smoe_fairseq.ending import exit_on_signals, flush_stdout
from smoe_fairseq.errors import ends_with_sentence, nearest, quietly
from smoe_fairseq.host_memory import let_threads_sleep
from smoe_fairseq.plugins import import_named_plugins
from smoe_fairseq.recipes.commands import RECIPES, CommandParser, add_arguments

# NAME: (module, one line of help). The module has `add_NAME_arguments(parser)` and `run_NAME(args)`,
# which returns None or an exit status. The recipes have a table of their own (recipes/commands.py).
COMMANDS = {
    "path": ("smoe_fairseq.cli", "print the package's path, for fairseq's --user-dir"),
    "cost": (
        "smoe_fairseq.recipes.cost",
        "count a model's parameters and FLOPs per token, and forecast the memory of training",
    ),
    "analyze": (
        "smoe_fairseq.analysis.command",
        "report the requested capacity of a trained model by language, token and layer",
    ),
    "translate": ("smoe_fairseq.translate.command", "translate text, line by line"),
    "serve": (
        "smoe_fairseq.serve.server",
        "serve a trained model over HTTP: a web page, and JSON for programs",
    ),
    "consolidate": (
        "smoe_fairseq.checkpoints.sets",
        "merge the files of an --expert-parallel run into one ordinary checkpoint",
    ),
    "reshard": (
        "smoe_fairseq.checkpoints.sets",
        "rewrite a checkpoint for another number of ranks, with its optimizer state",
    ),
    "average": ("smoe_fairseq.checkpoints.average", "average the weights of several checkpoints"),
    "upcycle": (
        "smoe_fairseq.checkpoints.upcycle",
        "turn a dense checkpoint into an MoE checkpoint whose experts are copies of its FFNs",
    ),
    "export": (
        "smoe_fairseq.checkpoints.export",
        "convert a checkpoint for other tools: fairseq, CTranslate2, transformers, safetensors",
    ),
    "import": (
        "smoe_fairseq.checkpoints.imports",
        "convert a checkpoint of fairseq's MoE branch, the SMoE paper's code or transformers",
    ),
    "prune": ("smoe_fairseq.analysis.prune", "remove the experts that some directions use little"),
    "subwords": (
        "smoe_fairseq.recipes.data.subwords",
        "learn subwords from text, and split text into them",
    ),
}


@exit_on_signals()
@ends_with_sentence()
@flush_stdout()
def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    atexit.register(_freeze)
    let_threads_sleep()
    argv = sys.argv[1:] if argv is None else argv
    parser = CommandParser(prog="smoe", description="Tools of smoe_fairseq.")
    parser.add_argument(
        "--version", action="version", version=f"smoe-fairseq {smoe_fairseq.__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    selected = argv[0] if argv else None
    if selected in (*COMMANDS, *RECIPES):
        require_fairseq()
        import_named_plugins()
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == selected:
            with quietly(), _without_garbage_collection():
                command = importlib.import_module(module)
            getattr(command, f"add_{name}_arguments")(subparser)
            subparser.set_defaults(run=getattr(command, f"run_{name}"))
    for name, (_, summary, _) in RECIPES.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == selected:
            add_arguments(subparser, name)
    near = nearest(str(selected), subparsers.choices, 0.6)
    if near and selected not in subparsers.choices:
        parser.error(f"unknown command {selected}; did you mean {near}?")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        subparsers.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args.run(args) or 0


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Import without searching for garbage among modules, which takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        _freeze()
        gc.enable()


def _freeze() -> None:
    """Keep Python from searching all of torch's objects for garbage, which takes a second as it exits.

    Not with triton (which torch imports with its compiler): nanobind would list its objects as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def add_path_arguments(parser: ArgumentParser) -> None:
    """There are none."""


def run_path(args: Namespace) -> None:
    print(Path(__file__).resolve().parent)


if __name__ == "__main__":
    sys.exit(main())
