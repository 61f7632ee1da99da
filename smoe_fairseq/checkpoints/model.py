"""The model that a checkpoint's settings describe."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY
from torch import Tensor

from smoe_fairseq.checkpoints.reading import check_plugins
from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.flags import differing_flags, flag_of, values_of, with_value
from smoe_fairseq.models.checks import as_loaded
from smoe_fairseq.models.options import SMoETransformerConfig
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.modules.gates import GATES

OURS, STOCK = "smoe_transformer", "transformer"
SIDES = ("encoder", "decoder")
NORM_OPTION = "smoe_norm"  # how inner layer norms and residuals are computed
# From router_NAME_loss_coef of a config for transformers to moe_NAME_loss_wt of the criterion.
LOSS_WEIGHTS = {"aux": "gate", "z": "z", "entropy": "entropy"}
# Options of a single training: frozen parts, and what saves memory.
OF_A_RUN = {"freeze", "checkpoint_activations", "offload_activations", "min_params_to_wrap"}
# Options that each training of a model may set as it likes: they change training, limits or the execution.
_OF_TRAINING = OF_A_RUN.union(
    """dropout attention_dropout activation_dropout encoder_layerdrop decoder_layerdrop cmr_gate_drop
    moe_dropout_per moe_gating_dropout moe_capacity_factor moe_second_expert_policy moe_gate_init_scale
    moe_output_init_scale moe_bias_step moe_execution expert_parallel max_source_positions
    max_target_positions""".split()
)
_OF_EVALUATION = {"moe_eval_capacity_factor", "moe_drop_order"}  # likewise
# Options that do not change what the same tensors compute.
_NOT_OF_TENSORS = _OF_TRAINING.union(
    """moe_threshold_step moe_balance_over smoe_capacity_budget moe_hash_table moe_hash_seed
    share_all_embeddings share_decoder_input_output_embed""".split()
)
_LIMIT = "moe_capacity_factor"
_LAYERS = ("moe_freq", "smoe_strata")
# fairseq's options that change the forward pass in ways that our model does not support.
_UNSUPPORTED = (
    *("adaptive_input", "adaptive_softmax_cutoff", "cross_self_attention", "no_cross_attention"),
    *("no_decoder_final_norm", "quant_noise_pq", "quant_noise_scalar", "char_inputs"),
    *("encoder_xformers_att_config", "decoder_xformers_att_config"),
)


def saved_options(path: Path, state: Mapping) -> dict:
    """The model options in the content of the checkpoint ``path``, by their flat names (``encoder_layers``).

    Raises:
        UsageError: it has no model options.
    """
    if not (values := values_of(saved_model(state))):
        raise UsageError(f"{path} is not a checkpoint of fairseq: its model has no options")
    return _flat(values)


def saved_model(state: Mapping):
    """The saved settings of the model, with all others in a file of fairseq before 0.10."""
    return state["cfg"].get("model") if state.get("cfg") else state.get("args")


def model_values(path: Path, state: Mapping) -> tuple[str, dict]:
    """The model (`OURS` or `STOCK`) and all its options, with defaults for those not in the checkpoint.

    Raises:
        UsageError: the checkpoint is of another model, has no architecture, or needs a plugin.
    """
    check_plugins(path, state)
    values = saved_options(path, state)
    arch = values.get("arch") or values.get("_name")
    for model in (OURS, STOCK):
        if arch in (model, *ARCH_MODEL_INV_REGISTRY.get(model, ())):
            filled = Namespace(**values)
            if arch in ARCH_CONFIG_REGISTRY:
                ARCH_CONFIG_REGISTRY[arch](filled)  # the defaults of the architecture
            return model, vars(filled)
    raise UsageError(f"{path}: architecture {arch}; expected transformer or smoe_transformer")


def known_options(path: Path, state: Mapping) -> dict:
    """The options of `SMoETransformerConfig` with which our model equals the checkpoint's.

    Raises:
        UsageError: it is another model, has unsupported options, or its weights do not fit its options.
    """
    with naming_file(path):
        model, values = model_values(path, state)
    if model == STOCK:
        width = values.get("decoder_embed_dim")
        widths = [n for n in ("decoder_input_dim", "decoder_output_dim") if values.get(n) != width]
        refuse_options(path, values, (*_UNSUPPORTED, *widths))
    options = SMoETransformerConfig.select(values)
    if model == STOCK:
        options["moe_freq"] = 0
    check_weights(path, options, state["model"])
    return options


def refuse_options(path: Path, values: Mapping, names: Iterable[str]) -> None:
    """Raise UsageError if one of these options of a checkpoint is set."""
    for name in names:
        if values.get(name):
            flag = with_value(name, values[name])
            raise UsageError(f"{path} was trained with {flag}; expected a model without it")


def check_weights(path: Path, options: Mapping, weights: Mapping[str, Tensor]) -> None:
    """Raise UsageError unless a model with these options has the names and shapes of the weights."""
    for option in fields(SMoETransformerConfig):
        value = options.get(option.name, option.default)
        if isinstance(option.default, int | float) and not isinstance(value, int | float):
            raise UsageError(f"{path}: {option.name} in its settings is {value!r:.60}")
    with as_loaded():
        model = target_model(path, {**options, "expert_parallel": False}, weights)
    weights = dict(weights)
    model.upgrade_state_dict(weights)
    check_fit(path, weights, model.state_dict())


def check_fit(
    path: Path,
    weights: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    place: str = "by its options",
) -> None:
    """Raise UsageError at the first name or shape that differs from ``target``, described by ``place``."""
    for name in {**target, **weights}:
        actual, expected = (
            tuple(each[name].shape) if name in each else "missing" for each in (weights, target)
        )
        if actual != expected:
            raise UsageError(f"{path}: {name} is {actual}, and {place} {expected}")


def has_experts(state: Mapping) -> bool:
    """Whether the model of a checkpoint's content has MoE layers."""
    return any(".moe." in name for name in state["model"])


def transformer_options(path: Path, state: Mapping) -> dict:
    """The options of a dense model, without those of MoE layers.

    Raises:
        UsageError: as `known_options`; or the model has experts.
    """
    if has_experts(state):
        raise UsageError(f"{path} has experts: expected a dense model (--moe-freq 0)")
    options = known_options(path, state)
    return {name: value for name, value in options.items() if not is_moe_option(name)}


def check_pre_norm(path: Path, config: SMoETransformerConfig) -> None:
    """Raise UsageError unless the sides with experts are pre-norm."""
    for side in SIDES:
        if config.moe_freq_of(side) and not getattr(config, f"{side}_normalize_before"):
            raise UsageError(
                f"{path} is post-norm in its {side}: expected a model trained with "
                "--encoder-normalize-before --decoder-normalize-before"
            )


def is_moe_option(option: str) -> bool:
    """Whether a model option is one of MoE layers."""
    return "moe_" in option or option.startswith("cmr_") or option == "expert_parallel"


def is_free(option: str) -> bool:
    """Whether each training of a model may set the option as it likes."""
    return option in _OF_TRAINING | _OF_EVALUATION


def other_model(content: Mapping, config) -> dict[str, str]:
    """The flags of a checkpoint's training with which its model computes otherwise than that of ``config``.

    With some of them all tensors fit, as with another number of attention heads, or another gate.
    """
    before, now = (_flat(values_of(each)) for each in (saved_model(content), config))
    skipped = of_training(before) | _OF_EVALUATION
    numbers, others = ({*str(o.get("moe_gate_options") or "").split(",")} for o in (before, now))
    # A gate may have more numbers now, and earlier versions did not save its defaults.
    if numbers - {""} <= others:
        skipped |= {"moe_gate_options"}
    if _layers(before) == _layers(now):  # perhaps by other flags
        skipped |= {f"{side}{name}" for side in ("", "encoder_", "decoder_") for name in _LAYERS}
    names = [n for n in SMoETransformerConfig.names() if n in before.keys() & now.keys() - skipped]
    flags = differing_flags({name: before[name] for name in names}, now)
    for name in flags:  # not the default: False and 0 have to be typed
        if before[name] is False and getattr(SMoETransformerConfig, name):
            flags[name] = flag_of(f"no_{name}")
        elif before[name] == 0 and before[name] is not False:
            flags[name] = f"{flag_of(name)} 0"
    return flags


def _layers(options: Mapping) -> list:
    """Which layers of each side have experts, and their strata."""
    config = SMoETransformerConfig(**SMoETransformerConfig.select(options))
    strata = (getattr(config, config.strata_option_of(side)) for side in SIDES)
    return [*map(config.moe_freq_of, SIDES), *strata]


def of_training(options: Mapping) -> set[str]:
    """`_NOT_OF_TENSORS` of these options: experts that choose tokens have their limit in evaluation, too."""
    gate = GATES.get(options.get("moe_gate"))
    return _NOT_OF_TENSORS - ({_LIMIT} if gate and gate.needs_capacity else set())


def _flat(values: Mapping) -> dict:
    """Rename the nested options of a hydra config (``encoder.layers``) to flat ones."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": v for inner, v in value.items()}
        else:
            flat[name] = value
    return flat


def target_model(path: Path, options: dict, weights: dict) -> SMoETransformerModel:
    """A ``smoe_transformer`` with these options on the meta device, for its names and shapes.

    Its vocabularies have the sizes of the embeddings in ``weights``.

    Raises:
        UsageError: the options do not define a model, or the weights of ``path`` have no embeddings.
    """

    class Task:
        source_dictionary = _vocabulary(path, weights, "encoder")
        target_dictionary = _vocabulary(path, weights, "decoder")

    with naming_file(path), torch.device("meta"):
        return SMoETransformerModel.build_model(Namespace(**options), Task)


def plain_config(options: dict) -> dict:
    """All options of ``smoe_transformer`` as plain data, for the ``cfg`` of a checkpoint."""
    values = vars(SMoETransformerConfig(**options))
    plain = bool | int | float | None
    return {n: v if isinstance(v, plain) else str(v) for n, v in values.items()} | {"_name": OURS}


def with_model_options(state: Mapping, options: dict) -> dict:
    """The checkpoint's content with its model options replaced by these of ``smoe_transformer``."""
    plain = plain_config(options)
    if state.get("cfg"):
        return {**state, "cfg": {**state["cfg"], "model": plain}}
    # Before fairseq had a config, checkpoints held the flat command line.
    args = vars(state["args"]) | plain | {"arch": plain["_name"]}
    return {**state, "args": Namespace(**args)}


def _vocabulary(path: Path, weights: dict, side: str) -> Dictionary:
    name = f"{side}.embed_tokens.weight"
    if name not in weights or weights[name].dim() != 2:
        raise UsageError(f"{path} lacks {name}: expected a transformer of fairseq")
    dictionary = Dictionary()
    for i in range(len(weights[name]) - len(dictionary)):
        dictionary.add_symbol(str(i))
    return dictionary
