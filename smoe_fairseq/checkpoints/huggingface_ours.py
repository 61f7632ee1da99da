"""``smoe import`` of ``smoe export --to huggingface``: options, and text."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from smoe_fairseq.checkpoints.model import LOSS_WEIGHTS, OURS
from smoe_fairseq.checkpoints.tensors import blocks
from smoe_fairseq.checkpoints.trained_with import checksum
from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.files import read_plain
from smoe_fairseq.forms import Number, read_json
from smoe_fairseq.models.options import SMoETransformerConfig
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.subwords import BEGINS_WORD, check_order, check_pieces, read_vocabulary

_SUBWORDS = "spm.model"

# A block's arguments that are those of its side by default.
_SIDE_ARGUMENTS = ("embed_dim", "ffn_embed_dim", "activation_fn")
# These do not change translations.
_IRRELEVANT = {"dropout", "activation_dropout", "capacity_factor", "execution"}

_LANGUAGE = r"[^\s,:/-][^\s,:/]*"
_TOKENIZER = {
    "lang_pairs": [re.compile(rf"(?!(.+)-\1$){_LANGUAGE}-{_LANGUAGE}")],  # two languages
    **{f"{side}_lang?": (None, re.compile(_LANGUAGE)) for side in ("src", "tgt")},
    "language_tokens?": (None, {re.compile(_LANGUAGE): re.compile(r"\S+")}),
    "encoder_langtok?": (None, re.compile("(src|tgt)[a-z]*")),
    "decoder_langtok?": (None, bool),
    "vocab_checksum?": (None, str),
}
_OPTIONS = {bool: bool, int: Number(-1, whole=True), float: float}  # by the type of the default
_CONFIG = {
    **{
        f"{option.name}?": _OPTIONS[type(option.default)]
        for option in fields(SMoETransformerConfig)
        if type(option.default) in _OPTIONS
    },
    "moe_blocks?": (None, {str: dict}),
    "label_smoothing?": (None, Number(0, 1)),
    **{f"router_{name}_loss_coef?": (None, Number(0)) for name in LOSS_WEIGHTS},
}
FORM = {OURS: _CONFIG}


def model(
    folder: Path, config: Mapping, weights: Mapping[str, Tensor]
) -> tuple[dict, Mapping[str, Tensor]]:
    """The options of `SMoETransformerConfig`, and the weights, which have our names.

    Raises:
        UsageError: ``moe_blocks``, which transformers uses, differs from the other options.
    """
    options = SMoETransformerConfig.select(config)
    # The weights include the table of a hash gate; a balanced one would need counts, which are lost.
    options["moe_hash_table"] = "random"
    _check_blocks(folder / "config.json", config.get("moe_blocks") or {}, options, weights)
    return options, weights


def _check_blocks(
    file: Path, moe_blocks: dict[str, dict], options: dict, weights: Mapping[str, Tensor]
) -> None:
    """Raise UsageError unless ``moe_blocks``, which transformers uses, agrees with the options."""
    with naming_file(file):
        expected = blocks(SMoETransformerConfig(**options), weights)
    if moe_blocks.keys() != expected.keys():
        actual, implied = (", ".join(each) or "empty" for each in (moe_blocks, expected))
        raise UsageError(f"{file}: moe_blocks is {actual}; by the other options {implied}")
    for layer, block in expected.items():
        arguments = {name: block[name] for name in _SIDE_ARGUMENTS} | moe_blocks[layer]
        # Experts that choose their tokens do so within their limit, in evaluation, too.
        limited = GATES[block.get("gate", MoEConfig.gate)].needs_capacity
        irrelevant = _IRRELEVANT - {"capacity_factor"} if limited else _IRRELEVANT
        for name in {**block, **arguments}.keys() - irrelevant:
            value = arguments.get(name, getattr(MoEConfig, name, None))
            if value != block.get(name):
                option = f"{MoEConfig.flags().get(name, name)} {block.get(name)!r}"
                where = f"{file}: moe_blocks.{layer}.{name}"
                raise UsageError(f"{where} is {value!r:.60}, and {option}; expected the same")


def text(
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
    vocabulary = {"source": read_vocabulary(folder / "vocab.json", len(source))}
    vocabulary["target"] = vocabulary["source"]
    if (folder / "target_vocab.json").exists():
        vocabulary["target"] = read_vocabulary(folder / "target_vocab.json", len(target))
    known = settings.get("vocab_checksum")
    check_order(folder / "vocab.json", known, vocabulary["source"], vocabulary["target"])
    files, by_side = {}, {side: checksum(symbols) for side, symbols in vocabulary.items()}
    by_language = {}
    places = [place for pair in pairs for place in zip(vocabulary, pair, strict=True)]
    if vocabulary["source"] == vocabulary["target"]:
        places += [("source", language) for language in tokens]
    for side, language in places:
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
