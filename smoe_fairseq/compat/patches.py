"""Patches of fairseq's commands, options and models."""

import argparse
import functools
import logging
import os
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
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
# For fairseq 0.12.2 on Python 3.11 and later, where ``@dataclass`` refuses default values without
# ``__hash__`` ("mutable default ... is not allowed"). Plain dataclasses have none, so ``import fairseq``
# fails. fairseq never changes these defaults in place, so its dataclasses, and plugins' of them, get a hash.


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

    # torch 2.6 reads them (torch/distributed/tensor/placement_types.py).
    dataclass.__kwdefaults__ = original.__kwdefaults__
    dataclasses.dataclass = dataclass


# Drops warnings about fairseq's calls of torch.jit and hydra, some forty lines at every command's start.
#
# For fairseq 0.12.2 on torch 2.14 and hydra 1.1, and later. They concern fairseq's code, which still works.


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


# Lets ``--user-dir`` name a link to this package, or several folders, files or modules, as in PATH.
#
# For fairseq 0.12.2 on any Python, which would import the package twice and cannot register a model twice. A
# renamed copy, or another plugin that registers an existing name, is refused by a sentence with its folder.


@patches("fairseq.utils:import_user_module")
def import_by_own_name(original, args):
    folder, package = getattr(args, "user_dir", None), os.path.dirname(os.path.dirname(__file__))
    places = (folder or "").split(os.pathsep)
    try:
        for place in places:
            if place and os.path.exists(place) and os.path.samefile(place, package):
                original(Namespace(user_dir=package))
            elif os.path.isdir(place) or (len(places) == 1 and not place.endswith(".py")):
                original(Namespace(user_dir=place or None))
            else:
                from smoe_fairseq.plugins import import_plugin  # imports the parent, see startup.py

                import_plugin(place)
    except ValueError as error:
        expected = "new names, or smoe_fairseq itself in a checkout"
        if re.search("unknown model type .smoe_", str(error)):
            expected = "`import smoe_fairseq` at the top of its __init__.py"
        elif "duplicate" not in str(error):  # fairseq's words
            raise
        raise UsageError(f"--user-dir {folder}: {error}; expected {expected}") from None


# Lets ``fairseq-hydra-train common.user_dir=... model=...`` select models and criteria of a plugin.
#
# For fairseq 0.12.2 on any hydra. It imports the plugin only after hydra has composed the config, for which
# ``model=`` and ``criterion=`` have to be known; here it is imported first.


@patches("fairseq.dataclass.initialize:hydra_init")
def import_user_dir_first(original, *others, **options):
    from fairseq.utils import import_user_module

    for word in sys.argv[1:]:
        name, _, value = word.lstrip("+").partition("=")
        if name == "common.user_dir" and value:
            import_user_module(Namespace(user_dir=value))
    return original(*others, **options)


# One line instead of a stack trace for bad input of a fairseq command.
#
# For errors of fairseq and of this package (`smoe_fairseq.errors.one_line`); ``SMOE_DEBUG=1`` shows the
# stack trace. Other programs (a notebook, a script that calls ``train.main``) get ordinary exceptions.


@patches("fairseq.distributed.utils")
def end_commands_with_sentence(utils: ModuleType) -> None:
    """Most commands run in ``call_main``; the hook is for the others, and for parsing options."""
    for name in ("call_main", "distributed_main"):
        replace(utils, name, _in_command)
    previous = sys.excepthook

    def print_line(kind, error, trace):
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
        if message is None or not is_fairseq_command():
            previous(kind, error, trace)
        else:
            show_trace(error)
            print(f"error: {message}", file=sys.stderr)

    sys.excepthook = print_line


@patches("hydra._internal.utils:run_and_report")
def end_hydra_with_sentence(original, function):
    """hydra prints a stack trace of its own for a file that it cannot read."""
    return _in_command(function) if is_fairseq_command() else original(function)


def _in_command(function: Callable, *arguments, **options):
    with ends_with_sentence() if is_fairseq_command() else nullcontext():
        return function(*arguments, **options)


def is_fairseq_command() -> bool:
    """Whether this process runs a command of fairseq, however it was started."""
    folder, file = os.path.split(getattr(sys.modules["__main__"], "__file__", None) or "")
    return file.startswith("fairseq-") or os.path.basename(folder) == "fairseq_cli"


# Lets ``--bf16`` train on the GPU or the CPU.
#
# For fairseq 0.12.2 on any Python, where ``--bf16`` implies ``--tpu``, which fails without torch_xla
# ("'NoneType' object has no attribute 'xla_device'"). Here it does so only if that is installed.


@patches("fairseq.options:parse_args_and_arch")
def keep_bf16_off_tpu(original, parser, input_args=None, *others, **options):
    from fairseq.utils import xm

    parsed = original(parser, input_args, *others, **options)
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    words = sys.argv[1:] if input_args is None else input_args
    if getattr(args, "bf16", False) and xm is None and "--tpu" not in words:
        args.tpu = False
    return parsed


# One line for a mistyped flag, with a suggestion. (fairseq prints all its flags first.)


@patches("fairseq.options:get_parser")
def end_parsing_with_line(original, *arguments, **options):
    parser = original(*arguments, **options)
    parser.error = functools.partial(end_parsing, parser)
    return parser


# ``fairseq-validate`` without ``--task`` uses the task of the checkpoint. (fairseq ends in KeyError.)


def _set_task(parser: argparse.ArgumentParser, args: Namespace) -> None:
    """Set the parser's default for ``--task``, if it has none and the flag is missing."""
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu
    from fairseq.tasks import TASK_REGISTRY

    has_task = any(action.dest == "task" for action in parser._actions)
    if args.task or args.help or not has_task or parser.get_default("task"):
        return
    if not args.path:
        raise UsageError("--path is missing: expected the checkpoint to validate")
    saved = load_checkpoint_to_cpu(args.path)["cfg"].task
    task = getattr(saved, "_name", None) or getattr(saved, "task", None)
    if task is None:
        raise UsageError(f"{args.path} does not name its task: expected --task")
    _refuse_unknown("--task", task, TASK_REGISTRY)
    parser.set_defaults(task=task)


@patches("fairseq.options:parse_args_and_arch")
def use_task_of_checkpoint(original, parser, input_args=None, *others, **options):
    """Set ``--task`` and check ``--arch`` before arguments are parsed."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.utils import import_user_module

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (["--user-dir"], ["--task"], ["--path"], ["--arch", "-a"]):
        early.add_argument(*flags, nargs="?")
    early.add_argument("-h", "--help", action="store_true")
    args, _ = early.parse_known_args(input_args)
    import_user_module(args)
    _set_task(parser, args)
    _refuse_unknown("--arch", args.arch, ARCH_MODEL_REGISTRY)
    if args.arch and is_fairseq_command():
        _check_pair(args.arch, TASK_REGISTRY.get(args.task or parser.get_default("task")))
    return original(parser, input_args, *others, **options)


# Names a model or task that is not registered, for example without ``--user-dir``. (fairseq ends in
# ``KeyError: '_name'``, or in an AssertionError.)


@patches("fairseq.models:build_model")
def name_unknown_model(original, cfg, task, from_checkpoint=False):
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
    _refuse_unknown("--arch", name, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY)
    if not from_checkpoint:
        _check_pair(name, type(task))
    return original(cfg, task, from_checkpoint)


@patches("fairseq.tasks:setup_task")
def name_unknown_task(original, cfg, **options):
    from fairseq.tasks import TASK_REGISTRY

    name = getattr(cfg, "task", None) or getattr(cfg, "_name", None)
    _refuse_unknown("--task", name, TASK_REGISTRY)
    return original(cfg, **options)


_TASKS = {  # kind of model: tasks that train only this kind
    "FairseqEncoderDecoderModel": ("translation", "translation_multi_simple_epoch"),
    "FairseqEncoderModel": ("masked_lm",),
    "FairseqLanguageModel": ("language_modeling",),
    "FairseqMultiModel": ("multilingual_translation",),
}


def _check_pair(arch: str | None, task: type | None) -> None:
    """Raise UsageError if a model and a task of fairseq or this package are of different kinds."""
    from fairseq import models, tasks

    model = models.ARCH_MODEL_REGISTRY.get(arch) or models.MODEL_REGISTRY.get(arch)
    packages = {getattr(each, "__module__", "").partition(".")[0] for each in (model, task)}
    if not packages <= {"fairseq", "smoe_fairseq"}:
        return
    classes = {names: tuple(map(tasks.TASK_REGISTRY.get, names)) for names in _TASKS.values()}
    fitting = [names for kind, names in _TASKS.items() if issubclass(model, getattr(models, kind))]
    requested = [names for names in classes if issubclass(task, classes[names])]
    if fitting and requested and fitting != requested:
        fits, given = (" or ".join(names[0]) for names in (fitting, requested))
        raise UsageError(f"--arch {arch}: expected --task {fits}, or a model for --task {given}")


def _refuse_unknown(flag: str, name, *registries: Mapping) -> None:
    """Raise UsageError for the name of a model or a task that no registry has."""
    if not isinstance(name, str) or any(name in registry for registry in registries):
        return
    is_ours, near = name.startswith("smoe_"), nearest(name, registries[0])
    plugin = "$(smoe path), or your own plugin with `import smoe_fairseq` in its __init__.py"
    meant = f"did you mean {near}? " if near and near.startswith("smoe_") == is_ours else ""
    user_dir = f"--user-dir {plugin}" if is_ours else "--user-dir, or SMOE_PLUGINS for smoe"
    raise UsageError(f"{flag} {name}: unknown; {meant}a name of a plugin needs {user_dir}")


# Lets models of ``translation_multi_simple_epoch`` translate through fairseq's Python interface. (It passes
# an argument that this task's ``build_generator`` lacks.)


@patches(
    "fairseq.tasks.translation_multi_simple_epoch:TranslationMultiSimpleEpochTask.build_generator"
)
def accept_prefix_function(original, *arguments, prefix_allowed_tokens_fn=None, **options):
    if prefix_allowed_tokens_fn is not None:
        raise NotImplementedError("prefix_allowed_tokens_fn")
    return original(*arguments, **options)


# Blocks repeated n-grams (``--no-repeat-ngram-size``). (fairseq compares them with the padding behind the
# hypothesis, and blocks none.)


@patches("fairseq.ngram_repeat_block:NGramRepeatBlock._no_repeat_ngram")
def block_ngrams(_, block, tokens, lprobs, bsz, beam_size, step):
    n = block.no_repeat_ngram_size
    for row, scores in zip(tokens[:, 1 : step + 1].tolist(), lprobs, strict=True):
        last, starts = row[len(row) + 1 - n :], range(len(row) + 1 - n)
        if again := [row[i + n - 1] for i in starts if row[i : i + n - 1] == last]:
            scores[again] = float("-inf")
    return lprobs


# Keeps fairseq's stock encoder layer off torch's fused inference kernel.
#
# For fairseq 0.12.2 on torch 1.13 and later. A post-norm layer that was loaded from a checkpoint calls
# ``torch._transformer_encoder_layer_fwd`` in evaluation, with the arguments of an older torch, so a batch
# with padding fails with "Mask Type should be defined". The layer's ordinary code computes the same.


@patches("fairseq.modules.transformer_layer:TransformerEncoderLayerBase._load_from_state_dict")
def avoid_fast_path(original, layer, *arguments):
    original(layer, *arguments)
    layer.load_to_BT = False  # fairseq's switch, which loading turns on


# Sets a buffer that fairseq saves without ever setting it.
#
# It holds whatever was in memory, at times NaN, so two runs with the same seed had different checkpoints.
# Loading a checkpoint fills it so again.

_POSITIONS = "fairseq.modules.sinusoidal_positional_embedding:SinusoidalPositionalEmbedding"


@patches("fairseq.modules.adaptive_input:AdaptiveInput.__init__")
@patches("fairseq.modules.adaptive_softmax:TiedHeadModule.__init__")
@patches(f"{_POSITIONS}.__init__")
@patches(f"{_POSITIONS}._load_from_state_dict")
def set_float_tensor(original, module, *arguments, **options):
    original(module, *arguments, **options)
    module._float_tensor.zero_()


# Leaves the routing metrics of each block and stratum out of the console's lines.
#
# Its progress bars print every metric, and a large model has a hundred of these, named
# ``encoder.layer.1/...``. TensorBoard, Weights & Biases and the JSON log contain them all.


@patches("fairseq.logging.progress_bar:BaseProgressBar._format_stats")
def keep_lines_short(original, bar, stats):
    sides = ("encoder.", "decoder.")
    return original(bar, {k: v for k, v in stats.items() if not ("/" in k and k.startswith(sides))})
