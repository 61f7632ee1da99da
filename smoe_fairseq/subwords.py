"""Subwords beside the dictionaries, of sentencepiece or subword-nmt: found, read, checked; checksums."""

import hashlib
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain, read_text, write_whole
from smoe_fairseq.forms import read_json

NAMES = ("spm.model", "sentencepiece.bpe.model")  # of our recipes and of fairseq
CODES = ("bpecodes", "code")  # of subword-nmt, named as by fairseq
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # the first entries of every dictionary of fairseq
BEGINS_WORD = "\u2581"  # sentencepiece's mark for the beginning of a word
SUMS = "dict.sha256"  # beside dictionaries, in the format of the program sha256sum


def write_sums(folder: Path) -> None:
    """Write the checksums of a folder's dictionaries, by which its text was binarised."""
    files = sorted(folder.glob("dict*.txt"))
    write_whole(folder / SUMS, "".join(f"{_sum(file)}  {file.name}\n" for file in files))


def check_sum(dictionary: Path) -> None:
    """Raise UsageError unless a dictionary is the one of `write_sums`, if its folder has checksums."""
    sums = dictionary.parent / SUMS
    lines = read_text(sums).splitlines() if sums.exists() else []
    known = [line for line in lines if line.endswith(f" {dictionary.name}")]
    if known and not known[0].startswith(_sum(dictionary)):
        binarised = "is not what it was when text was binarised with it"
        raise UsageError(f"{dictionary} {binarised}: restore it, or prepare the data again")


def _sum(file: Path) -> str:
    return hashlib.sha256(read_plain(file)).hexdigest()


def read_subwords(path: Path | str):
    """A sentencepiece model from a plain file; raises UsageError as `read_plain`, or if it is not one."""
    from sentencepiece import SentencePieceProcessor

    content = read_plain(path) or b"0"  # sentencepiece accepts an empty model
    try:
        return SentencePieceProcessor(model_proto=content)
    except Exception:  # from C++, of various types
        raise UsageError(f"{path} is not a model of sentencepiece") from None


def composer(model) -> Callable[[str], str]:
    """What text goes through before a sentencepiece model: NFC, if the model's rules are those of ``nfc``.

    The rules neither reorder marks nor compose what has no single character, as training text was.
    """
    is_nfc = model.normalize("e\u0301\ufb01").strip(f"{BEGINS_WORD} ") == "\xe9\ufb01"  # not NFKC
    return partial(unicodedata.normalize, "NFC") if is_nfc else str


class SubwordNMT:
    """Divides text into subwords by the codes of subword-nmt, as fairseq's class does, and joins them.

    Raises:
        UsageError: the file is damaged, or the package is not installed.
    """

    def __init__(self, codes: Path):
        try:
            from subword_nmt.apply_bpe import BPE
        except ImportError:
            raise UsageError(f"{codes} needs: pip install subword-nmt") from None
        try:
            with redirect_stderr(io.StringIO()) as said:
                self.bpe = BPE(io.StringIO(read_text(codes)))
        except SystemExit:
            raise UsageError(f"{codes}: {' '.join(said.getvalue().split())}") from None
        self.encode = self.bpe.process_line

    def decode(self, pieces: str) -> str:
        return f"{pieces} ".replace("@@ ", "").rstrip()


def subwords_of(data: str) -> Path | None:
    """The model or codes of subwords in the folder of the dictionaries; None if it has none."""
    folder = Path(data)
    folders = [folder, folder.parent] if re.fullmatch(r"shard\d+", folder.name) else [folder]
    places = (place / name for place in folders for name in NAMES + CODES)
    return next((place for place in places if place.is_file()), None)


def has_pieces(dictionary) -> bool:
    """Whether the dictionary contains sentencepiece's pieces."""
    return any(symbol.startswith(BEGINS_WORD) for symbol in dictionary.symbols)


def has_nmt_pieces(dictionary) -> bool:
    """Whether the dictionary contains subword-nmt's pieces: ``@@`` ends all but the last of a word."""
    pieces = (symbol for symbol in dictionary.symbols if symbol.endswith("@@") and symbol != "@@")
    return any(pieces) and not has_pieces(dictionary)


def checked_subwords(data: str, dictionary, needed: bool = True) -> Path | None:
    """`subwords_of`, checked against the dictionary; None for text without subwords.

    Some words are no pieces of the model: languages, and characters that it does not cover.

    Args:
        needed: whether the model or codes are required if the dictionary contains pieces.

    Raises:
        UsageError: the model is missing or invalid, or a third of the words are no pieces of it.
    """
    subwords, of_nmt = subwords_of(data), has_nmt_pieces(dictionary)
    if subwords is None or not of_nmt and subwords.name in CODES:
        if needed and (of_nmt or has_pieces(dictionary)):
            name, what = (
                (CODES, "codes of subword-nmt") if of_nmt else (NAMES, "sentencepiece model")
            )
            raise UsageError(
                f"{data} has no {name[0]}: expected the {what} of the dictionaries in their folder"
            )
        return None
    words = dictionary.symbols[dictionary.nspecial :]
    if subwords.name not in CODES:
        check_pieces(subwords, words)
        return subwords
    encode = SubwordNMT(subwords).encode
    ends = [word for word in words if not word.endswith("@@") and not _TAG.fullmatch(word)][:1000]
    unknown = [word for word in ends if any(p not in dictionary for p in encode(word).split())]
    _refuse_unknown(subwords, unknown, ends)
    return subwords


def check_order(file: Path | str, known: str | None, *vocabularies: Sequence[str]) -> str:
    """The checksum of vocabularies; raises UsageError if another is known, as entries were changed since."""
    content = json.dumps(vocabularies).encode()
    if (found := hashlib.sha256(content).hexdigest()) != (known or found):
        changed = "its entries or their order were changed after the export"
        raise UsageError(f"{file} is not the model's vocabulary: {changed}")
    return found


def check_pieces(subwords: Path, words: list[str]) -> None:
    """Raise UsageError if the sentencepiece model is invalid, or words are no pieces of it.

    Characters that it does not cover are words of its text, too. So it is refused for a third of the words,
    or for a hundredth that it would divide into several pieces.
    """
    model = read_subwords(subwords)
    words = [word for word in words if not _TAG.fullmatch(word)]
    numbers = model.piece_to_id(words)
    unknown = [w for w, number in zip(words, numbers, strict=True) if number == model.unk_id()]
    _refuse_unknown(subwords, unknown, words, 1 / 3)
    texts = [w.replace(BEGINS_WORD, " ") for w in unknown]
    others = [w for w, ids in zip(unknown, model.encode(texts)) if model.unk_id() not in ids]
    _refuse_unknown(subwords, others, words, 1 / 100)


# Words that stand for a language or a source, such as __de__ and [de_DE] of fairseq, or for none.
_TAG = re.compile(r"__.+__|\[.+\]|<.+>|>>.+<<|2[a-z]{2,3}|madeupword\d+")


def _refuse_unknown(
    subwords: Path, unknown: list[str], words: list[str], most: float = 1 / 3
) -> None:
    if len(unknown) > most * len(words):
        raise UsageError(
            f"{subwords} does not fit the dictionaries: {len(unknown):,} of {len(words):,} words are no "
            f"pieces of it, such as {unknown[0][:40]!r}"
        )


_SYMBOL = re.compile(r"[^\r\n]+")


def read_vocabulary(file: Path | str, rows: int | None = None) -> list[str]:
    """The entries of a dictionary from JSON; the first four are not part of fairseq's files.

    Args:
        rows: of the embeddings; None: unknown.

    Raises:
        UsageError: an entry is invalid or there twice, or the number of entries is not that of the rows.
    """
    symbols = read_json(file, [_SYMBOL])
    if symbols[:4] != SPECIAL:
        raise UsageError(f"{file} begins with {symbols[:4]}; expected {SPECIAL}")
    if twice := next((symbol for symbol, n in Counter(symbols).items() if n > 1), None):
        raise UsageError(f"{file} has {twice!r} twice")
    if rows is not None and len(symbols) != rows:
        raise UsageError(
            f"{file} has {len(symbols)} entries, and the embeddings {rows}; expected as many: tokens that "
            "were added to the tokenizer cannot be imported"
        )
    return symbols
