"""What a checkpoint says of its transformer, ours or fairseq's own, as one flat set of options."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY

from smoe_fairseq.models.config import SMoETransformerConfig, flag
from smoe_fairseq.system.errors import UsageError

OURS, STOCK = "smoe_transformer", "transformer"
SIDES = ("encoder", "decoder")
NORM_OPTION = "smoe_norm"  # how inner layer norms and residuals are computed
# fairseq's options that ours has not got, each with another forward pass than without.
_WITHOUT_PLACE = (
    *("adaptive_input", "adaptive_softmax_cutoff", "cross_self_attention", "no_cross_attention"),
    *("no_decoder_final_norm", "quant_noise_pq", "quant_noise_scalar", "char_inputs"),
    *("encoder_xformers_att_config", "decoder_xformers_att_config"),
)


def saved_options(path: Path, state: Mapping) -> dict:
    """What a checkpoint says of its model, by the flat names of the options (``encoder_layers``).

    Args:
        path: for the sentence of an error.
        state: content of the checkpoint.

    Raises:
        UsageError: it does not say.
    """
    config = state["cfg"].get("model") if state.get("cfg") else state.get("args")
    values = vars(config) if isinstance(config, Namespace) else config
    if not isinstance(values, Mapping):
        raise UsageError(f"{path} is not a checkpoint of fairseq: its model has no options")
    return _flat(values)


def model_values(path: Path, state: Mapping) -> tuple[str, dict]:
    """The model (`OURS` or `STOCK`) and all its options, also those that the checkpoint leaves out.

    Raises:
        UsageError: it is of another model, or does not say of which.
    """
    values = saved_options(path, state)
    arch = values.get("arch") or values.get("_name")
    for model in (OURS, STOCK):
        if arch in (model, *ARCH_MODEL_INV_REGISTRY.get(model, ())):
            filled = Namespace(**values)
            if arch in ARCH_CONFIG_REGISTRY:
                ARCH_CONFIG_REGISTRY[arch](filled)  # what a flat command line leaves out
            return model, vars(filled)
    raise UsageError(
        f"{path} holds a model of architecture {arch}: expected fairseq's transformer, or smoe_transformer"
    )


def known_options(path: Path, state: Mapping) -> dict:
    """Options of `SMoETransformerConfig` under which ours is the checkpoint's model.

    Raises:
        UsageError: it has options that ours has not got, or is another model.
    """
    model, values = model_values(path, state)
    for name in _WITHOUT_PLACE if model == STOCK else ():
        if values.get(name):
            raise UsageError(
                f"{path} was trained with {flag(name)} {values[name]}, which smoe_transformer has not got; "
                "expected a model without it"
            )
    known = SMoETransformerConfig.among(values)
    return known if model == OURS else {**known, "moe_freq": 0}


def transformer_options(path: Path, state: Mapping) -> dict:
    """Those of a dense model that are not about experts.

    Raises:
        UsageError: as of `known_options`, or it has experts.
    """
    if any(".moe." in name for name in state["model"]):
        raise UsageError(f"{path} has experts already: expected a dense model (--moe-freq 0)")
    options = known_options(path, state)
    return {name: value for name, value in options.items() if not of_experts(name)}


def check_pre_norm(path: Path, config: SMoETransformerConfig) -> None:
    """Raise UsageError unless the sides that have, or are to have, experts are pre-norm."""
    for side in SIDES:
        if config.moe_freq_of(side) and not getattr(config, f"{side}_normalize_before"):
            raise UsageError(
                f"{path} is post-norm in its {side}: experts take the place of pre-norm layers only; "
                "expected a model trained with --encoder-normalize-before --decoder-normalize-before"
            )


def of_experts(option: str) -> bool:
    """Whether an option of the model is about its MoE layers."""
    return "moe_" in option or option.startswith("cmr_") or option == "expert_parallel"


def _flat(values: Mapping) -> dict:
    """Those of a hydra config, ``encoder.layers``, under the names of the flags, ``encoder_layers``."""
    flat = {}
    for name, value in values.items():
        if name in (*SIDES, "quant_noise") and isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": v for inner, v in value.items()}
        else:
            flat[name] = value
    return flat
