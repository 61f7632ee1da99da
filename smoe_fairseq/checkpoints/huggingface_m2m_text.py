"""The text of M2M-100 and NLLB-200 in a folder for transformers: vocabulary, languages, subwords."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from smoe_fairseq.checkpoints.huggingface_tokenizer import read_tokenizer
from smoe_fairseq.checkpoints.huggingface_weights import refuse_pointers
from smoe_fairseq.checkpoints.trained_with import checksum
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain
from smoe_fairseq.forms import Number, read_json
from smoe_fairseq.subwords import SPECIAL, check_pieces, read_subwords

_SUBWORDS, _VOCABULARY, _SETTINGS = "sentencepiece.bpe.model", "vocab.json", "tokenizer_config.json"
_SMALL, _SMALL_FILE = "SMALL100Tokenizer", "tokenization_small100.py"
_MARKS = {*SPECIAL, "<mask>"}
_ID = Number(0, 10_000_000, whole=True)
_FORM = {
    "tokenizer_class?": (None, {"M2M100Tokenizer", "NllbTokenizer", "NllbTokenizerFast", _SMALL}),
    "legacy_behaviour?": (None, bool),
    "language_codes?": str,
    "added_tokens_decoder?": (None, {re.compile(r"\d{1,8}"): {"content": str}}),
}
# The codes of M2M-100 and of WMT21's models in the order of their tokens, which their folders do not list.
CODES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn "
    "mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}
LANGUAGE = {True: re.compile(r"__\w+__"), False: re.compile(r"[a-z]{2,3}_[A-Z][a-z]{3}\w*")}
_WORD = re.compile(r"[^\r\n]+")  # in a line of fairseq's dictionary
_MOST_UNUSED = 64  # embeddings beyond the tokens, as of a size that is a multiple of 64


# Text files by name, flags of the task, and the checksums of dictionaries (`checksum`) by language.
Files = tuple[dict[str, bytes], list[str], dict[str, dict]]


def text(folder: Path, weights: Mapping[str, Tensor]) -> Files:
    """The text files of a checkpoint by name, the task's flags, and the `dictionary_checksums`.

    - ``dict.txt``, a dictionary of fairseq for ``--fixed-dictionary``, has all rows of the embeddings but
      the first four: the pieces, the tokens of languages as fairseq writes them (``__eng_Latn__``),
      ``<mask>``, and ``madeupwordN`` for rows without meaning, in the order of the rows.
    - ``langs.txt``, for ``--lang-dict``, has a language per line (``eng_Latn``), in the order of tokens.
    - ``spm.model`` is the sentencepiece model.

    The task is ``translation_multi_simple_epoch`` with ``--encoder-langtok src --decoder-langtok`` (of
    SMaLL-100 with ``--encoder-langtok tgt``), and all pairs of the languages.

    Raises:
        UsageError: a file is missing or damaged, or does not fit the others.
    """
    rows = len(weights["encoder.embed_tokens.weight"])
    symbols, languages, subwords = _vocabulary(folder)
    if not 0 <= rows - len(symbols) <= _MOST_UNUSED:
        raise UsageError(
            f"{folder}: its tokenizer has {len(symbols)} tokens, and the embeddings {rows} rows; expected as "
            f"many, or up to {_MOST_UNUSED} more rows"
        )
    symbols += [f"madeupword{n:04d}" for n in range(rows - len(symbols))]
    return data_files(symbols, languages, subwords, *_langtoks(folder))


def _langtoks(folder: Path) -> tuple[str, bool]:
    """Those of `data_files`: SMaLL-100 has the target's token alone, before the source."""
    named = read_json(folder / _SETTINGS, _FORM).get("tokenizer_class") == _SMALL
    return ("tgt", False) if named or (folder / _SMALL_FILE).exists() else ("src", True)


def data_files(
    symbols: list[str], languages: list[str], subwords: bytes, encoder="src", decoder=True
) -> Files:
    """The files, flags and checksums of `text`.

    Args:
        encoder, decoder: the values of ``--encoder-langtok`` and ``--decoder-langtok``.
    """
    files = {
        "dict.txt": "".join(f"{symbol} 1\n" for symbol in symbols[4:]).encode(),
        "langs.txt": "".join(f"{language}\n" for language in languages).encode(),
        "spm.model": subwords,
    }
    pairs = ",".join(f"{one}-{other}" for one in languages for other in languages if one != other)
    flags = ["--task", "translation_multi_simple_epoch", "--fixed-dictionary", "dict.txt"]
    flags += ["--langs", ",".join(languages), "--lang-pairs", pairs]
    flags += ["--encoder-langtok", encoder] * bool(encoder) + ["--decoder-langtok"] * bool(decoder)
    return files, flags, dict.fromkeys(languages, checksum(symbols))


def languages_of(folder: Path) -> list[str]:
    """The languages of a folder, in the order of their tokens; raises as `text`."""
    refuse_pointers(folder)
    return _vocabulary(folder)[1]


def _vocabulary(folder: Path) -> tuple[list[str], list[str], bytes]:
    """The words of fairseq's dictionary by row, the languages in the order of their tokens, the subwords."""
    settings = read_json(folder / _SETTINGS, _FORM)
    if settings.get("legacy_behaviour"):
        raise UsageError(
            f"{folder / _SETTINGS}: legacy_behaviour puts the language behind the text; expected false"
        )
    is_m2m = (folder / _VOCABULARY).exists()
    words, tokens, subwords = (_m2m if is_m2m else _nllb)(folder, settings)
    if words[:4] != SPECIAL:
        raise UsageError(f"{folder}: its vocabulary begins with {words[:4]}; expected {SPECIAL}")
    languages = []
    for number, (row, token) in enumerate(sorted(tokens.items()), len(words)):
        if row != number:
            raise UsageError(f"{folder}: token {token!r} has the id {row}; expected {number}")
        if token not in _MARKS and not LANGUAGE[is_m2m].fullmatch(token):
            raise UsageError(
                f"{folder}: {token!r} was added to the tokenizer; expected tokens of languages alone, like "
                "eng_Latn"
            )
        if token not in _MARKS:
            languages.append(token.strip("_"))
            token = f"__{languages[-1]}__"
        words.append(token)
    if len(languages) < 2:
        expected = "expected tokens of languages, like eng_Latn, in added_tokens_decoder"
        raise UsageError(f"{folder / _SETTINGS}: {expected}, or the file tokenizer.json")
    if wrong := next(
        (w for w, n in Counter(words).items() if n > 1 or not _WORD.fullmatch(w)), None
    ):
        raise UsageError(f"{folder}: token {wrong!r} is there twice, or has an end of line")
    return words, languages, subwords


def _m2m(folder: Path, settings: Mapping) -> tuple[list[str], dict[int, str], bytes]:
    """The words by id, the tokens that follow by id, and the sentencepiece model."""
    file, kind = folder / _VOCABULARY, settings.get("language_codes", "m2m100")
    ids = read_json(file, {str: _ID})
    words = sorted(ids, key=ids.get)
    if [ids[word] for word in words] != list(range(len(ids))):
        raise UsageError(f"{file} has {len(ids)} tokens; expected the ids 0 to {len(ids) - 1}")
    if kind not in CODES:
        known = " or ".join(CODES)
        raise UsageError(f"{folder / _SETTINGS}: language_codes is {kind}; expected {known}")
    languages = [f"__{code}__" for code in CODES[kind].split()]
    if new := [t for t in _added(folder, settings).values() if t not in {*ids, *languages}]:
        raise UsageError(f"{folder}: {new[0]!r} was added to the tokenizer; expected none")
    check_pieces(folder / _SUBWORDS, words[4:])
    tokens = dict(enumerate(languages, len(words)))
    return words, tokens, read_plain(folder / _SUBWORDS)


def _nllb(folder: Path, settings: Mapping) -> tuple[list[str], dict[int, str], bytes]:
    """As `_m2m`."""
    tokenizer, file = folder / "tokenizer.json", folder / _SUBWORDS
    if not file.exists() and not tokenizer.exists():
        raise UsageError(f"{file} is missing, and {tokenizer.name}; expected the text's vocabulary")
    if tokenizer.exists():
        words, tokens, subwords = read_tokenizer(tokenizer)
    if file.exists():
        model, subwords = read_subwords(file), read_plain(file)
        pieces = SPECIAL + [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
        if tokenizer.exists() and pieces != words:
            raise UsageError(f"{file} and {tokenizer.name} differ; expected the same tokens")
        if not tokenizer.exists():
            words = pieces
            # Other lists have no ids: transformers 4 has <mask> behind the languages, 5 before them.
            tokens = {i: token for i, token in _added(folder, settings).items() if i >= len(words)}
    return words, tokens, subwords


def _added(folder: Path, settings: Mapping) -> dict[int, str]:
    """The tokens by id that files list apart from the vocabulary."""
    listed = settings.get("added_tokens_decoder") or {}
    tokens = {int(i): token["content"] for i, token in listed.items()}
    if (file := folder / "added_tokens.json").exists():
        tokens |= {i: token for token, i in read_json(file, {str: _ID}).items()}
    return tokens
