"""``python -P -m smoe_fairseq.recipes``: called by ``scripts/``; also runs the steps that recipes print."""

import os
import sys

from smoe_fairseq.ending import end_with_parent, exit_on_signals, flush_stdout
from smoe_fairseq.errors import ends_with_sentence
from smoe_fairseq.host_memory import let_threads_sleep
from smoe_fairseq.plugins import import_named_plugins
from smoe_fairseq.recipes.commands import RECIPES, STEPS, CommandParser, add_arguments
from smoe_fairseq.recipes.processes import STARTED_BY_RECIPE


@exit_on_signals()
@ends_with_sentence()
@flush_stdout()
def main() -> int:
    """Run one recipe or one step of it."""
    if os.environ.get(STARTED_BY_RECIPE):  # so the other recipe's end also ends this one
        end_with_parent()
    let_threads_sleep()
    import_named_plugins()
    parser = CommandParser(prog="smoe_fairseq.recipes", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="RECIPE")
    for name, (_, text, _) in (RECIPES | STEPS).items():
        prog = None if name in STEPS else f"scripts/{name}.sh"
        command = commands.add_parser(name, help=text, description=text, prog=prog)
        if name in sys.argv[1:2]:
            add_arguments(command, name)
    args = parser.parse_args()
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
