"""Translation memories (``.tmx``): the segments of each translation unit."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.data.compression import opened

_MARKUP = {"bpt", "ept", "it", "ph", "ut"}  # elements whose content is markup of another format


def units(path: Path) -> Iterator[dict]:
    """The ``<seg>`` elements of each unit, the first of each language. They last until the next unit.

    Raises UsageError for a damaged file, and for text outside of a ``<seg>``.
    """
    from lxml import etree

    with opened(path) as content:
        safe = {"resolve_entities": False, "no_network": True, "load_dtd": False}
        try:
            for _, unit in etree.iterparse(_WithoutControls(content), tag="{*}tu", **safe):
                segments = {}
                for variant in unit.iterfind("{*}tuv"):
                    code = variant.get("{http://www.w3.org/XML/1998/namespace}lang")
                    segment = variant.find("{*}seg")
                    if segment is None and (variant.text or "").strip():
                        line = f"{path}, line {variant.sourceline}"
                        raise UsageError(f"{line}: text in a <tuv>: expected it in a <seg>")
                    if segment is not None:
                        segments.setdefault(code or variant.get("lang") or "", segment)
                yield segments
                unit.clear()
                while unit.getprevious() is not None:  # else all units stay in memory
                    del unit.getparent()[0]
        except etree.XMLSyntaxError as error:
            first = next(iter(error.error_log), None)  # its own message may be of what follows
            line, reason = (first.line, first.message) if first else (error.lineno, error.msg)
            raise UsageError(f"{path}, line {line}: this is no TMX file: {reason}") from None


def text_of(segment, path: Path) -> str:
    """The text of a segment, without markup; raises UsageError for an entity, which may name a file."""
    from lxml import etree

    parts = [segment.text or ""]
    for child in segment:
        if child.tag is etree.Entity:
            raise UsageError(f"{path}: the entity {child.text}: expected its text in its place")
        if isinstance(child.tag, str) and child.tag.rpartition("}")[2] not in _MARKUP:
            parts.append(text_of(child, path))
        parts.append(child.tail or "")
    return "".join(parts)


class _WithoutControls:
    """A file of XML without the control characters that XML forbids, and without references to them."""

    FORBIDDEN = re.compile(
        rb"[\0-\x08\x0b\x0c\x0e-\x1f]|&#(?:x0*(?:[0-8bcef]|1[0-9a-f])|0*(?:[0-8]|1[124-9]|2\d|3[01]));",
        re.I,
    )

    def __init__(self, content: IO[bytes]):
        self.content, self.wide = content, None

    def read(self, size: int) -> bytes:
        data = self.content.read(size)
        while b"&" in data[-12:] and (more := self.content.read(12)):  # a whole reference
            data += more
        if self.wide is None:
            self.wide = b"\0" in data[:4]  # UTF-16
        return data if self.wide else self.FORBIDDEN.sub(b"", data)
