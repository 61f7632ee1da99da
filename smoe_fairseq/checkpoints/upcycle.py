"""``smoe upcycle``: an MoE checkpoint whose experts are copies of a dense model's FFNs."""

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, make_dataclass
from pathlib import Path

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from torch import Tensor, nn

from smoe_fairseq.checkpoints import sets
from smoe_fairseq.checkpoints.model import (
    NORM_OPTION,
    OF_A_RUN,
    SIDES,
    check_pre_norm,
    is_moe_option,
    saved_options,
    target_model,
    transformer_options,
    with_model_options,
)
from smoe_fairseq.checkpoints.reading import saved_task
from smoe_fairseq.compat.checkpoint_names import files_read
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.flags import as_flag, flag_of, values_of, with_value
from smoe_fairseq.models.memory import check_fits
from smoe_fairseq.models.options import SMoETransformerConfig, offer_gates
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.translate.directions import TOKEN_FLAGS

LATER_NORM_SCALE = 0.1  # weights of later strata's layer norms, relative to the dense model's
_BLOCK = re.compile(r"(.+\.layers\.\d+)\.moe\.(\w+)\.?(.*)")
_EXPERTS = {"w1": "fc1.weight", "b1": "fc1.bias", "w2": "fc2.weight", "b2": "fc2.bias"}


def upcycle(path: Path, moe_options: Mapping, noise: float) -> dict:
    """The content of a checkpoint for ``--finetune-from-model``.

    Args:
        path: a checkpoint of a dense ``smoe_transformer`` or of fairseq's ``transformer``, pre-norm.
        moe_options: options of `SMoETransformerConfig` for experts; all others are the checkpoint's.
        noise: standard deviation of noise added to the experts' weights, relative to that of the weights.

    Gates and noise are drawn by torch's default generator.

    Raises:
        UsageError: the checkpoint or the options are not supported.
    """
    state = sets.weights_of(path)
    options = transformer_options(path, state) | dict(moe_options)
    _check(path, SMoETransformerConfig(**options))
    try:
        model = target_model(path, options, state["model"])
    except UsageError as error:  # about flags, since the checkpoint's settings were checked above
        raise error.__cause__ if isinstance(error.__cause__, UsageError) else error from None
    check_fits(model)
    filled = dict(state["model"])
    model.upgrade_state_dict(filled)  # with what older checkpoints leave out
    state["model"] = _weights(filled | state["model"], model, noise)
    return with_model_options(state, options)


def _check(path: Path, config: SMoETransformerConfig) -> None:
    if not any(map(config.moe_freq_of, SIDES)):
        raise UsageError("--moe-freq 0: no layer would have experts; expected 1 or more")
    check_pre_norm(path, config)
    for name, refused, why, expected in _rules(config):
        if refused:
            shown = with_value(name, getattr(config, name))
            raise UsageError(f"{shown}: {why}; expected {expected}")


def _rules(config: SMoETransformerConfig) -> Iterator[tuple[str, bool, str, str]]:
    """(option, whether its value is refused, why, what is expected).

    Refused is what makes the output of a layer with copies of the FFN differ from that of the FFN.
    """
    why = "a token's weights have to sum to one, so that copies of the FFN compute the same"
    able = [name for name, kind in GATES.items() if kind.can_upcycle]
    yield "moe_gate", config.moe_gate not in able, why, " or ".join(able)
    yield "moe_top_k", config.moe_top_k < 2, why, "2 or more"
    unscaled = config.moe_gate_normalization == "none"
    yield "moe_gate_normalization", unscaled, why, "after-drop or before-drop"
    for name in ("moe_null_experts", "moe_copy_experts", "moe_constant_experts"):
        yield name, bool(getattr(config, name)), why, "0"
    for name in ("moe_shared_experts", "moe_residual", "moe_cmr", "moe_stacked"):
        yield name, bool(getattr(config, name)), "the FFN would count twice", "none"
    yield "moe_branches", bool(config.moe_branches), "it adds to the FFN's output", "none"
    why = "experts are copies of the FFN"
    yield "moe_output_init_scale", config.moe_output_init_scale != 1, why, "1.0"
    widths = (getattr(config, f"{side}_ffn_embed_dim") for side in SIDES)
    other_width = any(config.moe_expert_ffn_dim not in (0, width) for width in widths)
    yield "moe_expert_ffn_dim", other_width, why, "0"
    default = getattr(SMoETransformerConfig, NORM_OPTION)
    other_norm = getattr(config, NORM_OPTION) != default
    yield NORM_OPTION, other_norm, "it adds layer norms that the dense model lacks", default


def _weights(dense: dict, model: nn.Module, noise: float) -> dict:
    """Weights for all names of ``model``, from those of the dense model."""
    weights = {}
    for name, like in model.state_dict().items():
        if (match := _BLOCK.fullmatch(name)) is None:
            weights[name] = dense[name]
            continue
        layer, kind, part = match.groups()
        if kind == "layer_norms":
            stratum, _, parameter = part.partition(".")
            norm = dense[f"{layer}.final_layer_norm.{parameter}"]
            weights[name] = norm if stratum == "0" else norm * LATER_NORM_SCALE
        elif kind == "experts":
            weights[name] = _copies(dense[f"{layer}.{_EXPERTS[part]}"], len(like), noise)
        elif name not in weights:  # all of a gate are drawn with its first
            number = part.partition(".")[0]
            block = model.get_submodule(f"{layer}.moe")
            drawn = block.draw_gate(int(number)).state_dict().items()
            weights |= {f"{layer}.moe.gates.{number}.{key}": value for key, value in drawn}
    return weights


def _copies(tensor: Tensor, number: int, noise: float) -> Tensor:
    experts = tensor.expand(number, *tensor.shape).clone()
    if noise and tensor.numel() > 1:
        drawn = torch.randn(experts.shape)
        experts += (noise * tensor.float().std() * drawn).to(experts.dtype)
    return experts


def add_upcycle_arguments(parser: ArgumentParser) -> None:
    read = "checkpoint of a dense pre-norm transformer, ours or fairseq's"
    sets.add_file_arguments(parser, read, metavar="DENSE.pt")
    words = "standard deviation of noise added to experts' weights, relative to theirs; default: 0"
    parser.add_argument("--noise", type=float, default=0.0, help=words)
    words = "random seed of gates and noise; default: 1"
    parser.add_argument("--seed", type=int, default=1, help=words)
    experts = make_dataclass(
        "Experts",
        [
            (f.name, f.type, field(default=f.default, metadata=f.metadata))
            for f in fields(SMoETransformerConfig)
            if is_moe_option(f.name) and f.name != "expert_parallel"
        ],
        bases=(FairseqDataclass,),
    )
    group = parser.add_argument_group("experts, as for fairseq-train")
    gen_parser_from_dataclass(group, experts(), delete_default=True)
    offer_gates(group)


_LONG = 1000  # characters of ``--lang-pairs`` in a command that people type


def run_upcycle(args: Namespace) -> None:
    if not (args.noise >= 0 and math.isfinite(args.noise)):
        raise UsageError(f"--noise {args.noise}: expected 0 or a positive number, such as 0.01")
    sets.check_output(files_read(args.path), [args.output], args.force)
    moe_options = {
        name: v
        for name, v in vars(args).items()
        if is_moe_option(name) and not (v is None or v is False)
    }
    with quietly():
        torch.manual_seed(args.seed)
        state = upcycle(args.path, moe_options, args.noise)
        sets.write_converted(state, args.output, args.force)
    layers = sum(name.endswith(".moe.experts.w1") for name in state["model"])
    flags = [*size_flags(saved_options(Path(), state)).items(), *moe_options.items()]
    words = " ".join(with_value(name, value) for name, value in flags)
    print(
        f"{args.output}: {layers} MoE layers, whose experts are copies of the FFNs of {args.path}"
    )
    print(
        f"without a recipe, train it with its dictionaries by fairseq-train DATA --user-dir $(smoe path) "
        f"--arch smoe_transformer {words} --criterion smoe_label_smoothed_cross_entropy "
        f"{_task_flags(state)} --finetune-from-model {args.output}"
    )


def _task_flags(state: Mapping) -> str:
    saved, name = saved_task(state)
    task = values_of(saved)
    flags = {"task": name}
    if name != "translation":
        several = ("langs", "lang_dict", "fixed_dictionary", "lang_pairs", *sorted(TOKEN_FLAGS))
        flags |= {each: task[each] for each in several if task.get(each)}
        if len(str(flags.get("lang_pairs"))) > _LONG:  # of an imported model, which has text of few
            flags["lang_pairs"] = "PAIRS"
    return " ".join(as_flag(each, value) for each, value in flags.items())


def size_flags(options: Mapping, experts: bool = False) -> dict:
    """The flags of a model's options that are not the defaults; True: a bare flag.

    Left out is what concerns a single training: frozen parts, and what saves memory.

    Args:
        experts: the options of MoE layers, in place of all others.
    """
    default = SMoETransformerConfig()
    names = [n for n in SMoETransformerConfig.names() if is_moe_option(n) == experts]
    known = [n for n in names if n in options and n not in OF_A_RUN]
    changed = {n: v for n in known if (v := options[n]) != getattr(default, n)}
    return {
        flag_of(f"no_{n}" if v is False else n)[2:]: v is False or v for n, v in changed.items()
    }
