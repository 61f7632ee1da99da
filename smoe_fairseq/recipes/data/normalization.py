"""Normalisation of text, in Python and as rules of a sentencepiece model.

| characters | become |
|---|---|
| any that have another canonical form, such as e and a combining accent | their NFC form |
| runs of white space, with line breaks and tabs inside a line | one space |
| byte order marks, zero-width spaces, word joiners, soft hyphens, control characters | nothing |

Zero-width joiner and non-joiner (Indic scripts, Persian) and marks of direction (Arabic, Hebrew) stay:
they change what a reader sees.
"""

import itertools
import re
import sys
import unicodedata
from functools import cache

_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u202f\u205f\u3000\u2028\u2029" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_INVISIBLE = "\xad\u200b\u2060\ufeff" + "".join(
    chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _SPACES
)
# Half of a UTF-16 pair, which escapes of JSON may hold and UTF-8 cannot.
_REMOVED = re.compile(f"[{re.escape(_INVISIBLE)}\ud800-\udfff]")
_HANGUL = range(0xAC00, 0xD7A4)
_MOST_MARKS = 4  # whose orders are all listed


def plain(text: str) -> str:
    """A text as the table above says, on one line."""
    if text.isascii() and text.isprintable():  # most lines
        return " ".join(text.split())
    return " ".join(unicodedata.normalize("NFC", _REMOVED.sub("", text)).split())


@cache
def nfc_rules() -> str:
    """The table above for sentencepiece's ``normalization_rule_tsv``.

    A rule maps a sequence of characters, in hexadecimal, to another one. There is a rule for each order of
    the marks that a character decomposes to, also with some of them composed already.
    """
    rules = dict.fromkeys(_INVISIBLE.replace("\0", ""), "") | dict.fromkeys(_SPACES, " ")
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        decomposed = unicodedata.normalize("NFD", character := chr(code))
        if decomposed != character and character not in _SPACES:
            composed = unicodedata.normalize("NFC", character)
            sequences = {character, *_orders(decomposed, composed)}
            rules |= {sequence: composed for sequence in sequences if sequence != composed}
    return "".join(f"{_hexadecimal(a)}\t{_hexadecimal(b)}\n" for a, b in sorted(rules.items()))


def _orders(decomposed: str, composed: str) -> set[str]:
    marks = decomposed[1:]
    orders = [marks]
    if ord(composed[0]) not in _HANGUL and len(marks) <= _MOST_MARKS:
        orders = map("".join, itertools.permutations(marks))
    found = set()
    for order in orders:
        sequence = decomposed[0] + order
        if unicodedata.normalize("NFC", sequence) == composed:
            for end in range(1, len(sequence) + 1):
                found.add(unicodedata.normalize("NFC", sequence[:end]) + sequence[end:])
    return found


def _hexadecimal(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
