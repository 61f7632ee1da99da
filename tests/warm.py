"""Processes that programs and ranks are forked from: they have made the imports, which takes seconds.

A child runs what a client (programs.py) asks for, with the client's arguments, environment, folder and
open files. Beyond imports of other packages nothing is there before it starts, neither of fairseq's commands
nor, but where it is asked for, of the plugin; and at its end it is gone: no run can tell what others did.

The first process has imported torch; others are forked from it, and import more.
"""

import argparse
import atexit
import copy
import functools
import gc
import importlib.util
import inspect
import logging
import os
import runpy
import sys
import threading
import types
import warnings
from pathlib import Path

from forking import serve

PLUGIN = Path(__file__).parents[1] / "smoe_fairseq"


# What is done before programs are forked; each is called in a process of its own


def import_torch(listener: int) -> None:
    """What takes long of what fairseq imports, and nothing of fairseq."""
    import hydra.core.plugins
    import numpy
    import torch._dynamo  # which every optimizer imports
    import torch.utils.tensorboard  # noqa: F401

    hydra.core.plugins.Plugins.instance()
    # Python's own generator is seeded anew in each process by itself.
    os.register_at_fork(after_in_child=numpy.random.seed)
    run(serve(listener))


def import_fairseq(listener: int) -> None:
    """What all commands of fairseq import."""
    import fairseq.trainer  # noqa: F401
    import pytest  # noqa: F401  (for functions of test files)
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    quicken_hydra()
    convert_namespace_to_omegaconf(argparse.Namespace())
    # One of fairseq's tasks sets up the log, which a command does before it imports fairseq.
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    run(serve(listener))


def quicken_hydra() -> None:
    """Lets it parse each setting once, and read its store of configs, of which it copies what it takes."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse_once = functools.cache(OverridesParser.create().parse_rule)
    OverridesParser.parse_rule = lambda self, *words: copy.copy(parse_once(*words))
    ConfigStore.__deepcopy__ = lambda self, memo: self
    inspect.stack.__defaults__ = (0,)  # of callers it wants the files' names, not their lines


def import_plugin(listener: int) -> None:
    """The plugin too, as ``--user-dir`` does before anything else."""
    import fairseq.dataclass.utils
    import fairseq.options
    import fairseq.utils

    fairseq.utils.import_user_module(argparse.Namespace(user_dir=str(PLUGIN)))
    parser, words = fairseq.options.get_training_parser(), "data --arch smoe_transformer_tiny"
    args = fairseq.options.parse_args_and_arch(parser, words.split())
    fairseq.dataclass.utils.convert_namespace_to_omegaconf(args)
    run(serve(listener))


def import_smoe(listener: int) -> None:
    """What all commands of ``smoe`` import, too."""
    from smoe_fairseq import cli

    for module, _ in cli.COMMANDS.values():
        importlib.import_module(module)
    logging.basicConfig(level=logging.INFO)  # as one of fairseq's tasks does, which they import
    run(serve(listener))


def import_recipes(listener: int) -> None:
    """What recipes and their steps import, but sacreBLEU, which looks at the environment."""
    import scipy.stats  # noqa: F401
    import tabulate  # noqa: F401

    import smoe_fairseq.recipes.data.prepare
    import smoe_fairseq.recipes.training.train  # noqa: F401

    assert "sacrebleu" not in sys.modules
    run(serve(listener))


# What is done in their children


def run(request: dict | None) -> None:
    if request is None:
        return
    enter(request)
    if request["function"] is None:
        run_program(request["arguments"])
        return
    file, name = request["function"]
    sys.path[0] = str(Path(file).parent)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(*request["arguments"], *request["held"])


def enter(request: dict) -> None:
    """The client's environment and folder."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for setting in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(setting)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():  # which torch has read at its import
        sys.modules["torch"].set_num_threads(int(threads))


def run_program(words: list[str]) -> None:
    """A program by its path, or what follows ``python``: ``-c`` and what it is to do, ``-m`` and a module."""
    words = words[words[0] == "-P" :]
    if words[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).parent)
        sys.argv = words
        # Also while an error is printed.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


def status_of(function, *arguments) -> int:
    """Calls the function; the exit status, and the last words, that Python would end with."""
    try:
        function(*arguments)
        return 0
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def end(status: int) -> None:
    """As Python ends, but for taking apart all modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()  # until `serve`, since imports leave no garbage
    end(status_of(import_torch, int(sys.argv[1])))
