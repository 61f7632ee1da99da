"""Checks of a model's options against each other, the data and the checkpoint, before work starts."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import flag_of, with_value
from smoe_fairseq.models.options import (
    BLOCK_FLAGS,
    DecoderOptions,
    MoEOptions,
    SMoEMultilingualTransformerConfig,
    SMoETransformerConfig,
)
from smoe_fairseq.modules import OptionError, StratifiedMoE
from smoe_fairseq.modules.config import MoEConfig, gates_that_read, without_effect
from smoe_fairseq.modules.gates import GATES

# Larger models would take minutes to build, and then not fit.
MAX_SIZES = {"layers": 2_000, "embed_dim": 100_000, "ffn_embed_dim": 100_000}
MAX_SIZES |= {"source_positions": 10**9, "target_positions": 10**9}
MAX_GATES = 10_000

# The block's options that are accepted for a dense model, though without effect.
DENSE_OPTIONS = {"strata", "top_k", "top_p", "threshold_step", "bias_step", "drop_order", "norms"}
DENSE_OPTIONS |= {"capacity_factor", "eval_capacity_factor", "gate_normalization", "dropout_per"}
DENSE_OPTIONS |= {"second_expert_policy", "gate_init_scale", "output_init_scale", "cmr_gate_drop"}
DENSE_OPTIONS |= {"expert_parallel"}
EXPERT_OPTIONS = [flag for name, flag in MoEConfig.flags().items() if name not in DENSE_OPTIONS]
# Old checkpoints of dense models may have these, and options without the option that they depend on.
ONCE_DENSE_OPTIONS = {"moe_eom", "moe_fom", "moe_gating_dropout", "moe_stacked"}

_loading = ContextVar("whether the options are a checkpoint's own", default=False)


@contextmanager
def as_loaded() -> Iterator[None]:
    """Accept options without effect, since a checkpoint was trained with them."""
    before = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(before)


def config_faults(config: DecoderOptions) -> Iterator[str]:
    """Sentences on options that contradict each other, which name the flag and what would be accepted.

    The first is to be raised: what follows it relies on what it is about.
    """
    if config.moe_gate not in GATES:  # of a command line, its parser refuses it
        expected = f"expected one of {', '.join(GATES)}, or of a plugin (--user-dir, SMOE_PLUGINS)"
        yield f"--moe-gate {config.moe_gate}: {expected}"
    yield from _number_faults(config)
    for side in config.SIDES:
        freq = config.moe_freq_of(side)
        layers = getattr(config, f"{side}_layers")
        if freq < 0 or freq > layers:
            name = "moe_freq" if getattr(config, f"{side}_moe_freq") == -1 else f"{side}_moe_freq"
            yield f"{flag_of(name)} {freq}: expected 0 to {layers}, the layers of the {side}"
        if freq > 0 and not getattr(config, f"{side}_normalize_before"):
            yield f"--no-{side}-normalize-before: expected pre-norm layers, or --{side}-moe-freq 0"
        dim, heads = (getattr(config, f"{side}_{n}") for n in ("embed_dim", "attention_heads"))
        if dim % heads:
            yield f"--{side}-embed-dim {dim}: expected a multiple of --{side}-attention-heads {heads}"
        if (gates := sum(map(len, config.strata_of(side)))) > MAX_GATES:
            flag = flag_of("smoe_chain" if config.smoe_chain > 1 else config.strata_option_of(side))
            yield f"{flag}: {gates:,} gates in {layers} layers; expected at most {MAX_GATES:,}"
    sides = [side for side in config.SIDES if config.moe_freq_of(side)]
    yield from _effect_faults(config, has_experts=bool(sides))
    if sides:
        yield from _gate_faults(config, sides)
    for side in sides:
        yield from _block_faults(config, side)


def translation_faults(config: SMoETransformerConfig, task) -> Iterator[str]:
    """As `config_faults`, where embeddings of different words would be shared, or no part be trained."""
    yield from _freeze_faults(config)
    if config.share_all_embeddings and task.source_dictionary != task.target_dictionary:
        yield "--share-all-embeddings: expected --joined-dictionary data, or --no-share-all-embeddings"
    if getattr(getattr(task, "args", None), "enable_lang_ids", False):
        yield "--enable-lang-ids: the encoder takes language tokens, but no language ids"


def _freeze_faults(config: SMoETransformerConfig) -> Iterator[str]:
    parts = {"embeddings", *config.SIDES}
    if not config.frozen < parts:
        yield f"--freeze {config.freeze}: expected one or two of {', '.join(sorted(parts))}"


def language_pair_faults(config: SMoEMultilingualTransformerConfig, task) -> Iterator[str]:
    """As `config_faults`, where a model per language pair does not fit the task or an option."""
    yield from _freeze_faults(config)
    pairs = getattr(task, "model_lang_pairs", None)
    if pairs is None:
        yield "--arch smoe_multilingual_transformer: expected it with --task multilingual_translation"
    sources, targets = zip(*(pair.split("-") for pair in pairs), strict=True)
    for shared, languages in {
        "share_all_embeddings": sources + targets,
        "share_encoder_embeddings": sources,
        "share_encoders": sources,
        "share_decoder_embeddings": targets,
        "share_decoders": targets,
    }.items():
        first, *others = dict.fromkeys(languages)
        other = next((lang for lang in others if task.dicts[lang] != task.dicts[first]), None)
        if getattr(config, shared) and other is not None:
            yield (
                f"{flag_of(shared)}: the dictionaries of {first} and {other} differ; preprocess all "
                f"languages with one --srcdict and --tgtdict, or train with {flag_of('no_' + shared)}"
            )
    # These rely on one order of the layers in an update, but language pairs run one after the other.
    for name, value in (
        *(("moe_balance", "bias"), ("moe_balance_over", "update"), ("expert_parallel", True)),
        *(("moe_gate", name) for name, gate in GATES.items() if gate.learns_by_counts),
    ):
        if getattr(config, name) == value:
            yield f"{with_value(name, value)}: expected --task translation_multi_simple_epoch with it"


def language_modeling_faults(config: DecoderOptions, task) -> Iterator[str]:
    """As `config_faults`, where a language model would not predict next words, or not all words."""
    others = [target for target in getattr(task, "targets", []) if target != "future"]
    if others:
        yield f"--{others[0]}-target: expected --future-target or no target flag"
    words = len(task.target_dictionary)
    if config.share_decoder_input_output_embed and words != len(task.source_dictionary):
        yield (
            f"--output-dictionary-size {words}: the shared embeddings have {len(task.source_dictionary)} "
            "words; leave it out, or train with --no-share-decoder-input-output-embed"
        )


def _block_faults(config: MoEOptions, side: str) -> Iterator[str]:
    by_id = GATES[config.moe_gate].extra_input == "id"
    table = {"hash_table": torch.zeros(1).long()} if by_id else {}
    layers = config.moe_options(side)
    try:
        with torch.device("meta"):
            for options in {options["strata"]: options for options in layers}.values():
                StratifiedMoE(8, 8, **options, **table)
    except OptionError as error:
        yield error.named(config.block_flags(side))


def _number_faults(config: DecoderOptions) -> Iterator[str]:
    """On the range of each number, except for the block's options, which `MoEConfig` checks."""
    sizes = ("embed_dim", "ffn_embed_dim", "layers", "attention_heads")
    names = [f"{side}_{name}" for side in config.SIDES for name in sizes]
    positions = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
    for name in (*names, *(positions[side] for side in config.SIDES)):
        value, most = getattr(config, name), MAX_SIZES.get(name.partition("_")[2], math.inf)
        if not 1 <= value <= most:
            yield f"{flag_of(name)} {value}: expected 1 to {most:,}"
    dropouts = ("dropout", "attention_dropout", "activation_dropout")
    for name in (*dropouts, *(f"{side}_layerdrop" for side in config.SIDES)):
        if not 0 <= getattr(config, name) < 1:  # false for NaN
            yield f"{flag_of(name)} {getattr(config, name)}: expected 0 to below 1"


def _gate_faults(config: MoEOptions, sides: list[str]) -> Iterator[str]:
    name, kind = config.moe_gate, GATES[config.moe_gate]
    if kind.in_decoder and "encoder" not in config.SIDES:
        others = ", ".join(name for name, kind in GATES.items() if not kind.in_decoder)
        yield (
            f"--moe-gate {name}: experts would see later tokens, which a language model must not; "
            f"expected one of {others}"
        )
    if kind.in_decoder and "encoder" not in sides:
        yield f"--moe-gate {name}: expected it with --encoder-moe-freq above 0"
    for side in sides if kind.skips_tokens and not _loading.get() else ():
        fewest = min(strata.num_experts for strata in config.strata_of(side))
        if (config.moe_capacity_factor or 0) >= fewest:
            yield (
                f"--moe-capacity-factor {config.moe_capacity_factor} with --moe-gate {name}: experts would "
                f"take all tokens; expected a number below {fewest}, such as 0.5"
            )
    for side in sides if config.moe_gate_residual == "layers" else ():
        # Gates add up their logits.
        if len({strata.num_experts for strata in config.strata_of(side)}) > 1:
            yield f"--moe-gate-residual layers: expected as many experts in all layers of the {side}"


def _effect_faults(config: MoEOptions, has_experts: bool) -> Iterator[str]:
    """On flags without effect, since another model would be trained than was meant."""
    for name in EXPERT_OPTIONS:
        if _loading.get() and name in ONCE_DENSE_OPTIONS:
            continue
        value, default = getattr(config, name), getattr(MoEOptions, name)
        # Enumerations equal their defaults only as strings.
        if not has_experts and value != default and str(value) != str(default):
            flag = with_value(name, value)
            yield f"{flag} with --moe-freq 0, a model without experts: leave one out"
    for side in config.SIDES:
        flag, strata = f"--{side}-smoe-strata", getattr(config, f"{side}_smoe_strata")
        if strata and not config.moe_freq_of(side):
            yield f"{flag} {strata}: expected it with --{side}-moe-freq above 0"
    if _loading.get():
        return
    options = {name: getattr(config, option) for name, option in MoEConfig.flags().items()}
    for sentence in without_effect(options).values():
        yield OptionError(sentence).named(BLOCK_FLAGS)
    by_id = gates_that_read("hash_table")
    for name in ("moe_hash_table", "moe_hash_seed"):
        value = str(getattr(config, name))
        if config.moe_gate not in by_id and value != str(getattr(MoEOptions, name)):
            yield f"{flag_of(name)} {value}: expected it with --moe-gate {' or '.join(by_id)}"


def check_model(config, task) -> None:
    """Raise UsageError for options of the model or the task that do not work with sharded experts.

    With them, ranks would wait for each other forever. training/launch.py checks the trainer's options.
    """
    for side in config.SIDES:
        if getattr(config, f"{side}_layerdrop"):
            raise UsageError(f"--{side}-layerdrop with --expert-parallel: leave one of the two out")
    if getattr(getattr(task, "cfg", None), "eval_bleu", False):
        raise UsageError(
            "--eval-bleu with --expert-parallel: leave it out, and score after smoe consolidate"
        )


def check_checkpoint(model, state_dict) -> None:
    """Raise UsageError with one sentence if ``state_dict`` is of another architecture."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    loaded = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    if own == loaded:
        if names := shared_but_differing(model, state_dict):
            raise UsageError(
                f"the model shares {' and '.join(names)}, which differ in the checkpoint: expected equal "
                "ones, or the flags of its training"
            )
        return
    differing = [n for n in sorted({**own, **loaded}) if own.get(n) != loaded.get(n)]
    if all(".moe.experts." in n and n in own and n in loaded for n in differing):
        first = differing[0]
        if loaded[first][1:] == own[first][1:]:
            raise UsageError(
                f"the checkpoint has {loaded[first][0]} of {own[first][0]} experts: use smoe consolidate"
            )
    for name in (n for n in own if n.endswith("embed_tokens.weight")):
        shape, loaded_shape = own[name], loaded.get(name, ())
        if loaded_shape[1:] == shape[1:] and loaded_shape != shape:
            side = model.get_submodule(name.removesuffix(".embed_tokens.weight"))
            words, file = side.dictionary, getattr(side.dictionary, "read_from", "the dictionary")
            # fairseq's tasks for several languages add their tokens at the end.
            added = words.symbols[-1].startswith(("__", "<2", "[", "<mask>"))
            raise UsageError(
                f"{file} makes {shape[0]} tokens, and the checkpoint has {loaded_shape[0]} in {name}: "
                f"expected {'the --langs of its training, or ' if added else ''}the folder of its "
                "dictionaries (DATA, or --data)"
            )
    name = differing[0]
    dense = any(".moe." in n for n in own) and not any(".moe." in n for n in loaded)
    raise UsageError(
        f"the checkpoint has another architecture: {name} is {loaded.get(name, 'missing')} in it and "
        f"{own.get(name, 'missing')} in this model; pass the flags of its training, such as --arch, "
        f"--smoe-strata and --moe-freq{', or convert it with smoe upcycle' if dense else ''}"
    )


def shared_but_differing(model, weights) -> tuple[str, str] | None:
    """Two names of a parameter of the model, such as embeddings, whose values in a checkpoint differ."""
    first = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        if {name, other} <= weights.keys() and not same_bits(weights[other], weights[name]):
            return other, name
    return None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; NaNs compare equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (one, other)))
