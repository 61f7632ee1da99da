"""Patches of fairseq's commands, options and models: what runs before and around training."""

import argparse
import functools
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

from smoe_fairseq.errors import (
    UsageError,
    end_parsing,
    ends_with_sentence,
    nearest,
    one_line,
    show_trace,
)

from .replacing import patches, replace

logger = logging.getLogger(__name__)


# Lets fairseq's dataclasses hold instances of each other as defaults.
#
# For fairseq 0.12.2 on Python 3.11 and later. There ``@dataclass`` refuses a default value without
# ``__hash__`` ("mutable default ... is not allowed"), which every plain dataclass instance is, and
# ``fairseq.dataclass.configs.FairseqConfig`` is made of such defaults, so ``import fairseq`` fails. fairseq
# never changes these defaults in place; giving its dataclasses, and those that plugins derive from them, a
# hash is all it takes.


@patches("dataclasses")
def hash_dataclasses(dataclasses: ModuleType) -> None:
    original = dataclasses.dataclass

    @functools.wraps(original)
    def dataclass(cls=None, /, **options):
        if cls is None:
            return lambda decorated: dataclass(decorated, **options)
        of_fairseq = any(c.__module__.partition(".")[0] == "fairseq" for c in cls.__mro__)
        if of_fairseq and not options.get("frozen"):
            options.setdefault("unsafe_hash", True)
        return original(cls, **options)

    # torch 2.6 reads the names of the options there (torch/distributed/tensor/placement_types.py).
    dataclass.__kwdefaults__ = original.__kwdefaults__
    dataclasses.dataclass = dataclass


# Drops warnings about how fairseq calls torch.jit and hydra, some forty lines at every command's start.
#
# For fairseq 0.12.2 on torch 2.14 and hydra 1.1, and later. They name old functions and headers inside
# fairseq, which work all the same, and a user can do nothing about them. Errors, and warnings from anywhere
# else, are untouched.


@patches("torch.jit")
def quiet_jit(jit: ModuleType) -> None:
    message = r"`torch\.jit\.script` is (deprecated|not supported)"
    warnings.filterwarnings("ignore", message, FutureWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"fairscale\.")


@patches("fairseq.dataclass.utils:convert_namespace_to_omegaconf")
def quiet_hydra(original, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return original(args)


# This package is one plugin, by whatever name of its folder (a link) ``--user-dir`` has it.
#
# For fairseq 0.12.2 on any Python, which imports it once more and cannot register a model twice.


@patches("fairseq.utils:import_user_module")
def import_by_own_name(original, args):
    folder, own = getattr(args, "user_dir", None), os.path.dirname(os.path.dirname(__file__))
    if folder and os.path.exists(folder) and os.path.samefile(folder, own):
        args = Namespace(user_dir=own)
    original(args)


# Lets ``fairseq-hydra-train common.user_dir=... model=...`` choose what a plugin registers.
#
# For fairseq 0.12.2 on any hydra. It imports the plugin only after hydra has composed the config, when
# ``model=`` and ``criterion=`` had to be known already; here it is imported first.


@patches("fairseq.dataclass.initialize:hydra_init")
def import_user_dir_first(original, *others, **options):
    from fairseq.utils import import_user_module

    for word in sys.argv[1:]:
        name, _, value = word.lstrip("+").partition("=")
        if name == "common.user_dir" and value:
            import_user_module(Namespace(user_dir=value))
    return original(*others, **options)


# One line for bad input of a fairseq command, where Python would print a stack trace.
#
# For whatever bad input raises in fairseq itself and in this package (`smoe_fairseq.errors.one_line`);
# ``SMOE_DEBUG=1`` shows the stack trace. In any other program (a notebook, a script that calls
# ``train.main``) these are exceptions like others.


@patches("fairseq.distributed.utils")
def end_commands_with_sentence(utils: ModuleType) -> None:
    """Most commands do their work in ``call_main``; others, and reading the options, have the hook."""
    for name in ("call_main", "distributed_main"):
        replace(utils, name, _in_command)
    previous = sys.excepthook

    def print_sentence(kind, error, trace):
        words = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
        if words is None or not is_fairseq_command():
            previous(kind, error, trace)
        else:
            show_trace(error)
            print(f"error: {words}", file=sys.stderr)

    sys.excepthook = print_sentence


def _in_command(function: Callable, *arguments, **options):
    with ends_with_sentence() if is_fairseq_command() else nullcontext():
        return function(*arguments, **options)


def is_fairseq_command() -> bool:
    """Whether the program of this process is one of fairseq's, by whatever it was started."""
    main = sys.modules["__main__"]
    folder, file = os.path.split(getattr(main, "__file__", None) or "")
    spec = getattr(main, "__spec__", None)
    names = (file, os.path.basename(folder), spec.name if spec else "")
    return any(name.startswith(("fairseq-", "fairseq_cli")) for name in names)


# Lets ``--bf16`` train on the GPU or the CPU.
#
# For fairseq 0.12.2 on any Python. Its command line takes ``--bf16`` as a request for a TPU and stops with
# "'NoneType' object has no attribute 'xla_device'" where torch_xla is not installed. Here ``--bf16`` asks
# for a TPU only where torch_xla is installed, or where the user wrote ``--tpu``.


@patches("fairseq.options:parse_args_and_arch")
def keep_bf16_off_tpu(original, parser, input_args=None, *others, **options):
    from fairseq.utils import xm

    parsed = original(parser, input_args, *others, **options)
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    words = sys.argv[1:] if input_args is None else input_args
    if getattr(args, "bf16", False) and xm is None and "--tpu" not in words:
        args.tpu = False
    return parsed


# One line for a flag that is mistyped, with the one that it is nearly like.
#
# For fairseq 0.12.2 on any Python, which prints all its flags first.


@patches("fairseq.options:get_parser")
def end_parsing_with_line(original, *arguments, **options):
    parser = original(*arguments, **options)
    parser.error = functools.partial(end_parsing, parser)
    return parser


# ``fairseq-validate`` without ``--task`` validates with the task that the checkpoint was trained with.
#
# For fairseq 0.12.2 on any Python, which has no default there and ends in ``KeyError: None``. The task of
# the command line decides which flags there are; what is validated is the checkpoint's task in any case.


def _set_task(parser: argparse.ArgumentParser, given: Namespace) -> None:
    """The parser's default for ``--task``, where it has none and no task is given."""
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu
    from fairseq.tasks import TASK_REGISTRY

    has_task = any(action.dest == "task" for action in parser._actions)
    if given.task or given.help or not has_task or parser.get_default("task"):
        return
    if not given.path:
        raise UsageError("--path is missing: expected the checkpoint to validate")
    saved = load_checkpoint_to_cpu(given.path)["cfg"].task
    task = getattr(saved, "_name", None) or getattr(saved, "task", None)
    if task is None:
        raise UsageError(f"{given.path} does not say of what task it is: expected --task")
    if task not in TASK_REGISTRY:
        raise UsageError(_lacking("task", task))
    parser.set_defaults(task=task)


@patches("fairseq.options:parse_args_and_arch")
def take_task_of_checkpoint(original, parser, input_args=None, *others, **options):
    """And look at the ``--arch`` that is given, both before arguments are parsed."""
    from fairseq.utils import import_user_module

    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (["--user-dir"], ["--task"], ["--path"], ["--arch", "-a"]):
        words.add_argument(*flags, nargs="?")
    words.add_argument("-h", "--help", action="store_true")
    given, _ = words.parse_known_args(input_args)
    import_user_module(given)
    _set_task(parser, given)
    _check_arch(given)
    return original(parser, input_args, *others, **options)


# One sentence for a checkpoint whose model or task fairseq does not have, as without ``--user-dir``.
#
# For fairseq 0.12.2 on any Python. It ends in ``KeyError: '_name'`` while it puts its own message together,
# or in an AssertionError with all settings of the task.


_OURS = "smoe_"


@patches("fairseq.models:build_model")
def name_unknown_model(original, cfg, *others, **options):
    """Of commands that build the checkpoint's model."""
    if sentence := _problem(getattr(cfg, "_name", None) or getattr(cfg, "arch", None)):
        raise UsageError(sentence)
    return original(cfg, *others, **options)


@patches("fairseq.tasks:setup_task")
def name_unknown_task(original, cfg, **options):
    from fairseq.tasks import TASK_REGISTRY

    name = getattr(cfg, "task", None) or getattr(cfg, "_name", None)
    if isinstance(name, str) and name not in TASK_REGISTRY:
        raise UsageError(_lacking("task", name))
    return original(cfg, **options)


def _check_arch(given: Namespace) -> None:
    """Of ``fairseq-train --arch``, whose own answer is a list of some two hundred."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    if sentence := _problem(given.arch):
        near = nearest(given.arch, ARCH_MODEL_REGISTRY, cutoff=0)
        lacks_ours = given.arch.startswith(_OURS) and not near.startswith(_OURS)
        raise UsageError(
            f"--arch {given.arch}: {sentence if lacks_ours else f'did you mean {near}?'}"
        )


def _problem(name: str | None) -> str | None:
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

    if not name or name in ARCH_MODEL_REGISTRY or name in MODEL_DATACLASS_REGISTRY:
        return None
    return _lacking("model", name)


def _lacking(kind: str, name: str) -> str:
    if not is_fairseq_command():
        flag = "arch" if kind == "model" else kind
        return f"--{flag} {name}: of another plugin; fairseq's commands have it with --user-dir"
    where = "the plugin that it is from"
    if str(name).startswith(_OURS):
        where = "$(smoe path), or your own plugin with `import smoe_fairseq` in its __init__.py"
    return f"--user-dir is missing or another, since fairseq has no {kind} {name}: expected {where}"


# A model of ``translation_multi_simple_epoch`` translates by fairseq's interface for Python, too.
#
# For fairseq 0.12.2 on any Python. ``GeneratorHubInterface`` gives every task's ``build_generator`` an
# argument that this one's lacks, so any translation ends in a TypeError; it is None unless it is asked for.


@patches(
    "fairseq.tasks.translation_multi_simple_epoch:TranslationMultiSimpleEpochTask.build_generator"
)
def take_prefix_function(original, *arguments, prefix_allowed_tokens_fn=None, **options):
    if prefix_allowed_tokens_fn is not None:
        raise NotImplementedError("prefix_allowed_tokens_fn")
    return original(*arguments, **options)


# Keeps fairseq's stock encoder layer off torch's fused inference kernel.
#
# For fairseq 0.12.2 on torch 1.13 and later. A post-norm layer that has been loaded from a checkpoint calls
# ``torch._transformer_encoder_layer_fwd`` in evaluation, with the arguments of an older torch: today a
# batch with padding stops with "Mask Type should be defined". Without the kernel the layer computes the
# same function by its ordinary code.


@patches("fairseq.modules.transformer_layer:TransformerEncoderLayerBase._load_from_state_dict")
def avoid_fast_path(original, layer, *arguments):
    original(layer, *arguments)
    layer.load_to_BT = False  # fairseq's own switch, which loading has just turned on


# Keeps the routing metrics of each block and stratum off the console's lines.
#
# For fairseq 0.12.2 on any Python. Its progress bars print every metric, and a large model has a hundred of
# these, named ``encoder.layer.1/...``; TensorBoard, Weights & Biases and lines in JSON have them all.


@patches("fairseq.logging.progress_bar:BaseProgressBar._format_stats")
def keep_lines_short(original, bar, stats):
    sides = ("encoder.", "decoder.")
    return original(bar, {k: v for k, v in stats.items() if not ("/" in k and k.startswith(sides))})
