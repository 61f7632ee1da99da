"""The text of M2M-100 and NLLB-200 in a folder for transformers: vocabulary, languages, subwords."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from smoe_fairseq.checkpoints.io import checksum
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain
from smoe_fairseq.forms import Number, read_json
from smoe_fairseq.subwords import check_pieces, read_subwords

_SUBWORDS, _VOCABULARY, _SETTINGS = "sentencepiece.bpe.model", "vocab.json", "tokenizer_config.json"
_FIRST = ["<s>", "<pad>", "</s>", "<unk>"]
_SPECIAL = {*_FIRST, "<mask>"}
_ID = Number(0, 10_000_000, whole=True)
# The codes of M2M-100 and of WMT21's models in the order of their tokens, which their folders do not list.
_CODES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn "
    "mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}
_NLLB = re.compile(r"[a-z]{2,3}_[A-Z][a-z]{3}\w*")  # a code of NLLB-200
_MOST_UNUSED = 256  # embeddings beyond the tokens, as of a size that is a multiple of 128


def text(
    folder: Path, weights: Mapping[str, Tensor]
) -> tuple[dict[str, bytes], list[str], dict[str, dict]]:
    """The text files of a checkpoint by name, the task's flags, and the `dictionary_checksums`.

    - ``dict.txt``, a dictionary of fairseq for ``--fixed-dictionary``, has all rows of the embeddings but
      the first four: the pieces, the tokens of languages as fairseq writes them (``__eng_Latn__``),
      ``<mask>``, and ``madeupwordN`` for rows without meaning, in the order of the rows.
    - ``langs.txt``, for ``--lang-dict``, has a language per line (``eng_Latn``), in the order of tokens.
    - ``spm.model`` is the sentencepiece model.

    The task is ``translation_multi_simple_epoch`` with ``--encoder-langtok src --decoder-langtok``, and all
    pairs of the languages.

    Raises:
        UsageError: a file is missing or damaged, or does not fit the others.
    """
    rows = len(weights["encoder.embed_tokens.weight"])
    symbols, languages = _vocabulary(folder)
    if not 0 <= rows - len(symbols) <= _MOST_UNUSED:
        raise UsageError(
            f"{folder}: its tokenizer has {len(symbols)} tokens, and the embeddings {rows} rows; expected as "
            f"many, or up to {_MOST_UNUSED} more rows"
        )
    symbols += [f"madeupword{n:04d}" for n in range(rows - len(symbols))]
    content = "".join(f"{symbol} 1\n" for symbol in symbols[4:])
    files = {
        "dict.txt": content.encode(),
        "langs.txt": "".join(f"{language}\n" for language in languages).encode(),
        "spm.model": read_plain(folder / _SUBWORDS),
    }
    pairs = ",".join(f"{one}-{other}" for one in languages for other in languages if one != other)
    flags = ["--task", "translation_multi_simple_epoch", "--fixed-dictionary", "dict.txt"]
    flags += ["--langs", ",".join(languages), "--lang-pairs", pairs]
    flags += ["--encoder-langtok", "src", "--decoder-langtok"]
    return files, flags, dict.fromkeys(languages, checksum(symbols))


def _vocabulary(folder: Path) -> tuple[list[str], list[str]]:
    """The words of fairseq's dictionary by row, and the languages in the order of their tokens."""
    settings = read_json(folder / _SETTINGS, {"legacy_behaviour?": (None, bool)})
    if settings.get("legacy_behaviour"):
        raise UsageError(
            f"{folder / _SETTINGS}: legacy_behaviour puts the language behind the text; expected false"
        )
    is_m2m = (folder / _VOCABULARY).exists()
    words = _pieces_of_m2m(folder) if is_m2m else _pieces_of_nllb(folder)
    if words[:4] != _FIRST:
        raise UsageError(f"{folder}: its vocabulary begins with {words[:4]}; expected {_FIRST}")
    check_pieces(folder / _SUBWORDS, words[4:])
    tokens = (
        _tokens_of_m2m(folder, settings, len(words))
        if is_m2m
        else _added(folder, settings, len(words))
    )
    languages = []
    for number, (row, token) in enumerate(sorted(tokens.items()), len(words)):
        if row != number:
            raise UsageError(f"{folder}: token {token!r} has the id {row}; expected {number}")
        code = token.strip("_") if is_m2m else token
        if token not in _SPECIAL and not (is_m2m or _NLLB.fullmatch(token)):
            raise UsageError(
                f"{folder}: {token!r} was added to the tokenizer; expected tokens of languages, like eng_Latn"
            )
        if token not in _SPECIAL:
            languages.append(code)
            token = f"__{code}__"
        words.append(token)
    if len(languages) < 2:
        raise UsageError(
            f"{folder / _SETTINGS} lists no languages; expected additional_special_tokens"
        )
    return words, languages


def _pieces_of_m2m(folder: Path) -> list[str]:
    file = folder / _VOCABULARY
    ids = read_json(file, {str: _ID})
    if sorted(ids.values()) != list(range(len(ids))):
        raise UsageError(f"{file} has {len(ids)} tokens; expected the ids 0 to {len(ids) - 1}")
    return sorted(ids, key=ids.get)


def _tokens_of_m2m(folder: Path, settings: Mapping, first: int) -> dict[int, str]:
    codes = _CODES.get(settings.get("language_codes", "m2m100"))
    if codes is None:
        raise UsageError(
            f"{folder / _SETTINGS}: language_codes is {settings['language_codes']}; expected one of "
            f"{', '.join(_CODES)}"
        )
    return {row: f"__{code}__" for row, code in enumerate(codes.split(), first)}


def _pieces_of_nllb(folder: Path) -> list[str]:
    subwords = read_subwords(folder / _SUBWORDS)
    return _FIRST + [subwords.id_to_piece(i) for i in range(3, subwords.get_piece_size())]


def _added(folder: Path, settings: Mapping, first: int) -> dict[int, str]:
    """The tokens beyond the pieces, by their rows."""
    file = folder / "tokenizer.json"
    if file.exists():
        added = read_json(file, {"added_tokens": [{"id": _ID, "content": str}]})["added_tokens"]
        tokens = {each["id"]: each["content"] for each in added}
    elif "added_tokens_decoder" in settings:
        added = settings["added_tokens_decoder"]
        tokens = {int(row): each["content"] for row, each in added.items()}
    else:
        names = settings.get("additional_special_tokens") or []
        tokens = dict(enumerate([*names, "<mask>"], first))
    return {row: token for row, token in tokens.items() if row >= first}
