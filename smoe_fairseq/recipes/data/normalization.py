"""Normalisation of text, in Python and as rules of a sentencepiece model.

| characters | become |
|---|---|
| those with another canonical form, such as e and a combining accent | their NFC form |
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
# And halves of UTF-16 pairs, which JSON's escapes allow and UTF-8 does not.
_REMOVED = re.compile(f"[{re.escape(_INVISIBLE)}\ud800-\udfff]")


def plain(text: str) -> str:
    """Normalise a text by the table above, to one line."""
    if text.isascii() and text.isprintable():  # most lines
        return " ".join(text.split())
    return " ".join(unicodedata.normalize("NFC", _REMOVED.sub("", text)).split())


def unquoted(text: str) -> str:
    """A cell without the quotes that a spreadsheet adds: one at each end, and each one inside doubled."""
    inner = text[1:-1]
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return inner.replace('""', '"') if is_quoted and '"' not in inner.replace('""', "") else text


@cache
def nfc_rules() -> str:
    """The table above for sentencepiece's ``normalization_rule_tsv``.

    A rule maps a sequence of characters, in hexadecimal, to another. A character that decomposes has a rule
    for each order of its marks, and for each number of marks that are composed already.
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
    sequences = set()
    for order in itertools.permutations(decomposed[1:]):
        sequence = decomposed[0] + "".join(order)
        if unicodedata.normalize("NFC", sequence) == composed:
            for end in range(1, len(sequence) + 1):
                sequences.add(unicodedata.normalize("NFC", sequence[:end]) + sequence[end:])
    return sequences


def _hexadecimal(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
