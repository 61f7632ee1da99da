"""Text of unknown origin, made fit for a terminal and for pictures."""

import unicodedata

# Control characters, halves of a pair and line ends: a terminal obeys them, and SVG may not contain them.
_UNSEEN = {"Cc", "Cs", "Zl", "Zp"}
# They turn around what follows, so that another text is read than is there.
_TURNING = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}


def visible(text: str) -> str:
    r"""The text with such characters as ``\x1b`` or ``\u202e``; all others stay as they are."""
    return "".join(_escaped(c) if _is_unseen(c) else c for c in text)


def _is_unseen(character: str) -> bool:
    never_a_character = ord(character) & 0xFFFE == 0xFFFE
    return unicodedata.category(character) in _UNSEEN or character in _TURNING or never_a_character


def _escaped(character: str) -> str:
    number = ord(character)
    if number > 0xFFFF:
        return f"\\U{number:08x}"
    return f"\\u{number:04x}" if number > 0xFF else f"\\x{number:02x}"
