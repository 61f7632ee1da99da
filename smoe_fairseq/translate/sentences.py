"""Sentences of a text in any script: where they end, and how a text is put together from its parts."""

from collections.abc import Callable, Iterator

import regex

# In brackets of a pattern. A full stop also ends abbreviations, so after these marks follows a blank.
_AMBIGUOUS = r".!?…．"
# Unicode's ends of sentences, those of Tibetan and Thai, and halfwidth ones; not Burmese's comma, U+104A.
_CLEAR = r"[\p{Sentence_Terminal}\u0f08\u0f0d-\u0f12\u0e5a\u0e5b]--[.!?．\u104a]"
# Quotation marks and brackets that belong to the sentence before them (» and “ open a quotation, too), and
# marks of the direction of writing.
_CLOSING = r"""(?:[\p{Pe}\p{Pf}\p{Bidi_Control}"'*_]|\p{Pi}(?=\s|$)|\p{Zs}»(?=\s|$))*"""
_WIDE = r"[\p{Han}\p{Hiragana}\p{Katakana}]"
_END = regex.compile(
    rf"(?P<marks>[{_AMBIGUOUS}]+)(?P<closing>{_CLOSING})\s+"
    rf"|[{_AMBIGUOUS}]*(?:๚ะ)?[{_CLEAR}](?:\p{{Zs}}?[{_AMBIGUOUS}{_CLEAR}])*{_CLOSING}\s*"
    rf"|(?<={_WIDE})[!?]+{_CLOSING}(?=[\p{{L}}\p{{N}}])"
    # Thai and Lao have blanks between clauses, names and numbers; those of longer clauses count.
    r"|(?<=[\p{Thai}\p{Lao}]{8})\s+(?=[\p{Thai}\p{Lao}]{8})",
    regex.V1,
)
# A letter (U.S., z. B.), a title, an ordinal of German (am 3. Mai), the number of an item.
_ABBREVIATION = regex.compile(
    r"(?<![\p{L}\p{M}\d])(?:[\p{Lu}\p{Ll}]|Capt|Col|Dr|Gen|Gov|Hon|Lt|Mme|Mrs?|Ms|Mt|Prof|Rep|Rev|Sen|Sgt|Sig"
    r"|Sra?|St|Str|bzw|ca|cf|vgl|vs|(?:^|\b(?i:am|im|vom|zum|de[mnrs]|die|das|ab|bis) )\d{1,2}"
    r"|(?:Abs|Art|Fig|No|Nr|pp)(?=\.\s+\d))\.\s+\S$"
)
_LONGEST_ABBREVIATION = 40
# The sentence, after a full stop.
_GOES_ON = regex.compile(r"""[\p{Ps}\p{Pi}\p{Bidi_Control}"'„]*\p{Ll}""")
_DIRECTION = regex.compile(r"\p{Bidi_Control}+")
_LINE = regex.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
_WORD = regex.compile(r"[\p{L}\p{N}]")
_LAST_WORD = regex.compile(r"(?r)[\p{L}\p{N}]")
_CLAUSE = regex.compile(r"(?<=[,;:–—،؛፣፤፥])\s+|(?<=[，；：、\u104a])\s*")
_BLANK = regex.compile(r"\s+")
_CLUSTER = regex.compile(r"\X")  # letters that are read as one: with vowel signs, joined emoji
_LONGEST_CLUSTER = 32  # of Unicode's stream-safe text

Span = tuple[int, int]


def _sentences(text: str) -> Iterator[Span]:
    """Begin and end of each sentence, without the blanks between them; each line is at least one."""
    has_capitals = text != text.lower()
    for line in _LINE.finditer(text):
        yield from _sentences_of_line(text, *line.span(), has_capitals)


def _sentences_of_line(text: str, begin: int, stop: int, has_capitals: bool) -> Iterator[Span]:
    begin = stop - len(text[begin:stop].lstrip())
    stop = begin + len(text[begin:stop].rstrip())
    # Every part has a word, so that no mark is a sentence of its own.
    word, last = _WORD.search(text, begin, stop), _LAST_WORD.search(text, begin, stop)
    for match in _END.finditer(text, begin, stop):
        after = match.end()
        if word and word.start() < match.start() and after <= last.start():
            if _is_end(text, begin, match, has_capitals):
                yield begin, begin + len(text[begin:after].rstrip())
                begin, word = after, _WORD.search(text, after, stop)
    if begin < stop:
        yield begin, stop


def _is_end(text: str, begin: int, match, has_capitals: bool) -> bool:
    if not (marks := match["marks"]):
        return True
    closing = _DIRECTION.sub("", match["closing"])
    stops = marks[-1] in ".…．"
    if (stops or closing) and has_capitals and _GOES_ON.match(text, match.end()):
        return False
    around = text[max(begin, match.start() - _LONGEST_ABBREVIATION) : match.end() + 1]
    return marks != "." or bool(closing) or not _ABBREVIATION.search(around)


def split_sentences(text: str) -> tuple[list[str], list[str]]:
    """The sentences of a text, and what is before, between and after them: blanks, lines without words.

    A text without words is one sentence, unless it is blank.
    """
    spans = list(_sentences(text))
    spans = [span for span in spans if _WORD.search(text, *span)] or spans
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    gaps = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [text[a:b] for a, b in spans], gaps


# After these marks of Chinese and Japanese, which write no blanks, sentences are joined without one.
_WIDE_MARK = regex.compile(r"[。！？，；：、｡][\p{Pe}\p{Pf}]*$")


def join_sentences(texts: list[str], gaps: list[str]) -> str:
    """A text from sentences and the gaps before, between and after them, as their script joins them."""
    joined, between = gaps[0], ["", *gaps[1:]]
    for number, text in enumerate(texts):
        gap = between[number]
        if number and not gap.strip(" "):
            gap = "" if _WIDE_MARK.search(texts[number - 1]) else gap or " "
        joined += gap + text
    return joined + gaps[-1] if texts else joined


# Texts that are too long for a model are divided: at ends of sentences, then of clauses, then of words.


def _between(pattern) -> Callable[[str], Iterator[Span]]:
    def spans(text: str) -> Iterator[Span]:
        begin = 0
        for match in pattern.finditer(text):
            yield begin, match.start()
            begin = match.end()
        yield begin, len(text)

    return spans


_LEVELS = (_sentences, _between(_CLAUSE), _between(_BLANK))


def divide(text: str, fits: Callable[[str], bool], levels: tuple = _LEVELS) -> list[str]:
    """The text in parts that fit, each as long as possible.

    Parts consist of sentences. A sentence that does not fit is divided at commas, then between words, and a
    word between grapheme clusters.
    """
    if fits(text):
        return [text]
    if not levels:
        cuts = [match.end() for match in _CLUSTER.finditer(text)][:-1]
        if not cuts and len(text) > _LONGEST_CLUSTER:
            cuts = list(range(1, len(text)))
        if not cuts:
            return [text]
        half = cuts[len(cuts) // 2]
        return [part for side in (text[:half], text[half:]) for part in divide(side, fits, ())]
    parts: list[str] = []
    start = None  # of the last part, if it may get longer
    for begin, end in levels[0](text):
        if begin < end and start is not None and fits(text[start:end]):
            parts[-1] = text[start:end]
        elif begin < end:
            parts += divide(text[begin:end], fits, levels[1:])
            start = end - len(parts[-1])
    return parts
