"""``smoe import``: folders for transformers, of ``smoe export --to huggingface`` or in NLLB-MoE's layout.

transformers itself is not needed to read them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from smoe_fairseq.checkpoints.foreign import CRITERION, EXPECTED, complete, with_our_names
from smoe_fairseq.checkpoints.io import DICTIONARIES, checksum
from smoe_fairseq.checkpoints.model import LOSS_WEIGHTS, OURS, SIDES, plain_config
from smoe_fairseq.checkpoints.sets import check_tensors
from smoe_fairseq.checkpoints.tensors import blocks
from smoe_fairseq.compat.safe_load import check_content
from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.files import check_plain, read_plain
from smoe_fairseq.forms import Number, check, read_json
from smoe_fairseq.models.options import SMoETransformerConfig
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.subwords import BEGINS_WORD, check_pieces

NLLB = "nllb-moe"  # config.json's model_type, as `OURS` is
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SUBWORDS = "spm.model"

# A block's arguments that are those of its side by default.
_SIDE_ARGUMENTS = ("embed_dim", "ffn_embed_dim", "activation_fn")
# These do not change translations.
_IRRELEVANT = {"dropout", "activation_dropout", "capacity_factor", "execution", "output_norm"}

# The forms of a folder's JSON files.

_LANGUAGE = r"[^\s,:/-][^\s,:/]*"
_SYMBOL, _FIRST = re.compile(r"[^\r\n]+"), ["<s>", "<pad>", "</s>", "<unk>"]
_TOKENIZER = {
    "lang_pairs": [re.compile(rf"(?!(.+)-\1$){_LANGUAGE}-{_LANGUAGE}")],  # two languages
    **{f"{side}_lang?": (None, re.compile(_LANGUAGE)) for side in ("src", "tgt")},
    "language_tokens?": (None, {str: re.compile(r"\S+")}),
    "encoder_langtok?": (None, re.compile("(src|tgt)[a-z]*")),
    "decoder_langtok?": (None, bool),
}
_RATE, _COUNT = Number(0, 1), Number(0, 1_000_000, whole=True)
_OPTIONS = {bool: bool, int: Number(-1, whole=True), float: float}  # by the type of the default
_FORMS = {
    OURS: {
        **{
            f"{option.name}?": _OPTIONS[type(option.default)]
            for option in fields(SMoETransformerConfig)
            if type(option.default) in _OPTIONS
        },
        "moe_blocks?": (None, {str: dict}),
        "label_smoothing?": (None, _RATE),
        **{f"router_{name}_loss_coef?": (None, Number(0)) for name in LOSS_WEIGHTS},
    },
    NLLB: {
        **{name: _COUNT for name in ("d_model", "num_experts", "max_position_embeddings")},
        **{f"{s}_{n}": _COUNT for s in SIDES for n in ("ffn_dim", "layers", "attention_heads")},
        **{f"{side}_sparse_step": _COUNT for side in SIDES},
        **{f"{name}?": _RATE for name in ("dropout", "attention_dropout", "moe_token_dropout")},
        **{f"{name}?": str for name in ("activation_function", "second_expert_policy")},
        "tie_word_embeddings?": bool,
        "scale_embedding?": bool,
        "router_bias?": (None, bool),
    },
}


def read_folder(folder: Path) -> tuple[dict, dict[str, bytes]]:
    """The content of a checkpoint of ``smoe_transformer``; dictionaries and subword model by file name.

    There are no such files for NLLB-MoE's layout: its tokenizer is not converted.

    Raises:
        UsageError: a file is missing or damaged, or the folder holds another model.
    """
    config = read_json(folder / _CONFIG)
    kind = config.get("model_type")
    if kind not in (OURS, NLLB):
        raise UsageError(
            f"{folder / _CONFIG}: model_type is {kind}; expected {OURS} (smoe export) or {NLLB}"
        )
    check(config, _FORMS[kind], folder / _CONFIG)
    weights = _tensors(folder)
    check_content(folder, {"model": weights}, has_config=False)
    check_tensors(folder, weights)
    if kind == NLLB:
        options, weights = _convert_nllb(folder, config, weights)
        files, task, checksums = {}, ["--task", "translation", "-s", "src", "-t", "tgt"], {}
    else:
        options = SMoETransformerConfig.select(config)
        # The weights include the table of a hash gate; a balanced one would need counts, which are lost.
        options["moe_hash_table"] = "random"
        _check_blocks(folder / _CONFIG, config.get("moe_blocks") or {}, options)
        files, task, checksums = _text_files(folder, weights)
    state = _checkpoint(folder, options, config, weights, task)
    return state | {DICTIONARIES: checksums}, files


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = [_WEIGHTS]
    if not (folder / _WEIGHTS).exists() and (folder / _INDEX).exists():
        index = read_json(folder / _INDEX, {"weight_map": {str: str}})
        names = sorted(set(index["weight_map"].values()))
    tensors = {}
    for name in names:
        file = folder / Path(name).name
        if not file.exists():
            raise UsageError(f"{file} is missing: expected weights as safetensors")
        check_plain(file)
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file} is damaged: {error}") from None
    return tensors


def _checkpoint(
    folder: Path, options: dict, config: Mapping, weights: dict[str, Tensor], task: list[str]
) -> dict:
    """The content of a checkpoint, with the settings that ``fairseq-train`` would save."""
    if options.get("share_all_embeddings") and "encoder.embed_tokens.weight" in weights:
        weights.setdefault("decoder.embed_tokens.weight", weights["encoder.embed_tokens.weight"])
    flags = ["", *task, "--arch", OURS, "--criterion", CRITERION]
    flags += ["--label-smoothing", str(config.get("label_smoothing") or 0.0)]
    for theirs, ours in LOSS_WEIGHTS.items():
        if (value := config.get(f"router_{theirs}_loss_coef")) is not None:
            flags += [f"--moe-{ours}-loss-wt", str(value)]
    parser = fairseq_options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, flags))
    cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return {
        **EXPECTED,
        "args": None,
        "cfg": {**cfg, "model": plain_config(options)},
        "model": complete(folder, options, weights),
    }


def _check_blocks(file: Path, moe_blocks: dict[str, dict], options: dict) -> None:
    """Raise UsageError unless ``moe_blocks``, which transformers uses, agrees with the options."""
    with naming_file(file):
        expected = blocks(SMoETransformerConfig(**options))
    if moe_blocks.keys() != expected.keys():
        actual, implied = (", ".join(each) or "empty" for each in (moe_blocks, expected))
        raise UsageError(f"{file}: moe_blocks is {actual}; by the other options {implied}")
    for layer, block in expected.items():
        arguments = {name: block[name] for name in _SIDE_ARGUMENTS} | moe_blocks[layer]
        for name in {**block, **arguments}.keys() - _IRRELEVANT:
            value = arguments.get(name, getattr(MoEConfig, name, None))
            if value != block.get(name):
                option = f"{MoEConfig.flags().get(name, name)} {block.get(name)!r}"
                where = f"{file}: moe_blocks.{layer}.{name}"
                raise UsageError(f"{where} is {value!r:.60}, and {option}; expected the same")


# The text of an export: dictionaries and subwords, and the task that reads them.


def _text_files(
    folder: Path, weights: Mapping[str, Tensor]
) -> tuple[dict[str, bytes], list[str], dict[str, dict]]:
    """The files of a data folder by name, the task's flags, and the `dictionary_checksums`."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file, _TOKENIZER)
    names, tokens = settings["lang_pairs"], settings.get("language_tokens") or {}
    pairs = [name.split("-") for name in names]
    direction = [settings.get(f"{side}_lang") or "" for side in ("src", "tgt")]
    if names == ["-".join(direction)]:  # codes may have hyphens
        pairs = [direction]
    languages = {language for pair in pairs for language in pair}
    if not pairs or {*map(len, pairs)} != {2} or tokens and not languages <= tokens.keys():
        raise UsageError(f"{file}: lang_pairs is {names}; expected pairs of languages with tokens")
    source = weights["encoder.embed_tokens.weight"]
    target = weights.get("decoder.embed_tokens.weight", source)
    vocabulary = {"source": _vocabulary(folder / "vocab.json", len(source))}
    vocabulary["target"] = vocabulary["source"]
    if (folder / "target_vocab.json").exists():
        vocabulary["target"] = _vocabulary(folder / "target_vocab.json", len(target))
    files, by_side = {}, {side: checksum(symbols) for side, symbols in vocabulary.items()}
    by_language = {}
    for pair in pairs:
        for side, language in zip(vocabulary, pair, strict=True):
            content = "".join(f"{symbol} 1\n" for symbol in vocabulary[side][4:]).encode()
            by_language[language] = by_side[side]
            if files.setdefault(f"dict.{language}.txt", content) != content:
                raise UsageError(f"{folder}: source and target vocabularies of {language} differ")
    pieces = [word for word in vocabulary["source"][4:] if word not in tokens.values()]
    if (folder / _SUBWORDS).exists():
        check_pieces(folder / _SUBWORDS, pieces)
        files[_SUBWORDS] = read_plain(folder / _SUBWORDS)
    elif any(piece.startswith(BEGINS_WORD) for piece in pieces):
        raise UsageError(f"{folder / _SUBWORDS} is missing: expected the model of the subwords")
    if not tokens:
        source, target = pairs[0]
        return files, ["--task", "translation", "-s", source, "-t", target], by_side
    # fairseq appends the languages' tokens to a dictionary in the order of --langs, which JSON does not keep.
    langs = sorted(tokens, key=lambda language: vocabulary["target"].index(tokens[language]))
    style = "mbart" if next(iter(tokens.values())).startswith("[") else "multilingual"
    flags = ["--task", "translation_multi_simple_epoch", "--langs", ",".join(langs)]
    flags += ["--lang-pairs", ",".join(names), "--lang-tok-style", style]
    if settings.get("encoder_langtok"):
        flags += ["--encoder-langtok", settings["encoder_langtok"][:3]]
    flags += ["--decoder-langtok"] * bool(settings.get("decoder_langtok"))
    return files, flags, by_language


def _vocabulary(file: Path, rows: int) -> list[str]:
    """The entries of a dictionary; the first four are not part of fairseq's files."""
    symbols = read_json(file, [_SYMBOL])
    if symbols[:4] != _FIRST:
        raise UsageError(f"{file} begins with {symbols[:4]}; expected {_FIRST}")
    if len(symbols) != rows:
        raise UsageError(
            f"{file} has {len(symbols)} entries, and the embeddings {rows}; expected as many: tokens that "
            "were added to the tokenizer cannot be imported"
        )
    if twice := next((symbol for symbol, n in Counter(symbols).items() if n > 1), None):
        raise UsageError(f"{file} has {twice!r} twice")
    return symbols


# The layout of NllbMoeForConditionalGeneration.

_NAMES = (
    (r"^model\.", ""),
    (r"\.cross_attention(?=[._])", ".encoder_attn"),
    (r"\.ff_layer_norm\.", ".final_layer_norm."),
    (r"\.ffn\.(fc[12])\.", r".\1."),
)
_ROUTER = re.compile(r"(.+)\.ffn\.router\.classifier\.weight")
_EXPERT = re.compile(r"(.+)\.ffn\.experts\.expert_(\d+)\.(fc[12]\.(?:weight|bias))")


def _convert_nllb(
    folder: Path, config: Mapping, weights: Mapping[str, Tensor]
) -> tuple[dict, dict[str, Tensor]]:
    """Our options, and the weights under our names.

    A capacity limit in evaluation (``moe_eval_capacity_token_fraction`` below 1) is not converted.
    """
    if config.get("router_bias"):
        raise UsageError(f"{folder / _CONFIG}: router_bias is not supported; expected false")
    named = {}
    for name, tensor in weights.items():
        if match := _ROUTER.fullmatch(name):
            name = f"{match[1]}.moe_layer.gate.wg.weight"
        elif match := _EXPERT.fullmatch(name):
            name = f"{match[1]}.moe_layer.experts.{match[2]}.{match[3]}"
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        named[name] = tensor
    shared, projection = named.pop("shared.weight", None), named.pop("lm_head.weight", None)
    tied = config.get("tie_word_embeddings", True)
    for side in SIDES:
        if shared is not None:
            named.setdefault(f"{side}.embed_tokens.weight", shared)
    embedding = named.get("decoder.embed_tokens.weight")
    projection = embedding if tied or projection is None else projection
    named["decoder.output_projection.weight"] = projection
    options = {
        f"{side}_{ours}": config[theirs.format(side=side)]
        for side in SIDES
        for ours, theirs in (
            ("embed_dim", "d_model"),
            ("ffn_embed_dim", "{side}_ffn_dim"),
            ("layers", "{side}_layers"),
            ("attention_heads", "{side}_attention_heads"),
            ("moe_freq", "{side}_sparse_step"),
        )
    }
    options |= {"smoe_strata": str(config["num_experts"])}
    options |= {
        f"max_{text}_positions": config["max_position_embeddings"] for text in ("source", "target")
    }
    options |= {f"{side}_normalize_before": True for side in SIDES}
    before = config.get("normalize_router_prob_before_dropping", False)
    return options | {
        "activation_fn": config.get("activation_function", "relu"),
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.1),
        "no_scale_embedding": not config.get("scale_embedding", True),
        "share_all_embeddings": bool(tied),
        "moe_top_k": 2,
        "moe_gate_normalization": "before-drop" if before else "after-drop",
        "moe_drop_order": "score" if config.get("batch_prioritized_routing") else "sentence",
        "moe_second_expert_policy": config.get("second_expert_policy", "all"),
        "moe_eom": config.get("moe_token_dropout", 0.2),
    }, with_our_names(folder, named)
