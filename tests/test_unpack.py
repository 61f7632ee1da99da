"""Archives that are damaged or mean harm: refused in one sentence, and nothing is left of them."""

import io
import os
import stat
import tarfile
import zipfile

import pytest
from commands import contents, refused
from test_recipes_archives import step, tar

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.data.archives import extract, read_members

WANTED = "opus-100-corpus/v1.0/supervised/en-fr/opus.en-fr-train.fr"


def zipped(**fields) -> bytes:
    """A zip whose headers, both of them, say something else than what is there."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(WANTED, b"text\n")
    changed = bytearray(content.getvalue())
    for signature, flag, method in ((b"PK\3\4", 6, 8), (b"PK\1\2", 8, 10)):
        start = changed.index(signature)
        changed[start + flag] |= fields.get("flag", 0)
        changed[start + method] = fields.get("method", 0)
    return bytes(changed)


def packed(kind: str, *members: tuple[str, bytes]) -> bytes:
    """An archive in which later members follow those that are wanted."""
    if kind == "tar":
        return tar(dict(members), "xz")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for member in members:
            archive.writestr(*member)
    return content.getvalue()


def special(kind: bytes) -> bytes:
    """A link in the place of the text."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        info = tarfile.TarInfo(WANTED)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    return content.getvalue()


def large() -> bytes:
    """A few bytes of a header that stand for more than there is room."""
    info = tarfile.TarInfo(WANTED)
    info.size = 2**60
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


LINK = zipfile.ZipInfo(WANTED)
LINK.external_attr = (stat.S_IFLNK | 0o777) << 16
SOUND = tar({WANTED: os.urandom(5000)})
OUTSIDE = ("../evil", "/tmp/evil", f"../{WANTED.rpartition('/')[0]}/evil")
FAULTS = [
    *((special(kind), [WANTED]) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
    (packed("zip", (LINK, b"/etc/passwd")), [WANTED]),
    *((damaged, ["get it again"]) for damaged in (SOUND[:2500], b"<html>quota exceeded</html>")),
    # In the checksum, behind everything that is unpacked.
    (SOUND[:-6] + bytes([SOUND[-6] ^ 1]) + SOUND[-5:], ["get it again"]),
    (large(), [WANTED]),
    (tar({f"one/{WANTED}": b"a\n", f"two/{WANTED}": b"b\n"}), ["one/", "two/"]),
    (tar({"other/words": b"a\n"}), ["af-en/opus", "raw.files"]),
    (zipped(flag=1), ["password"]),
    (zipped(method=9), ["compression"]),  # deflate64
]


@pytest.mark.parametrize("archive, named", FAULTS, ids=range(len(FAULTS)))
def test_a_bad_archive_is_named_and_leaves_nothing(tmp_path, archive, named):
    folder = tmp_path / "inside/download"
    folder.mkdir(parents=True)
    (folder / "opus-100-corpus-v1.0.tar.gz").write_bytes(archive)
    before = sorted(tmp_path.rglob("*"))
    words = ["unpack", "opus100", folder, tmp_path / "inside/unpacked"]
    refused(step(tmp_path, {}, *words, check=False), "opus-100-corpus-v1.0.tar.gz", *named)
    assert sorted(tmp_path.rglob("*")) == before


def test_two_archives_with_one_name_are_told(tmp_path):
    """As a zip for each pair, with the same names inside: the text of the first would be that of both."""
    wanted = {WANTED: tmp_path / "out/text"}
    for name in "ab":
        (tmp_path / name).write_bytes(packed("zip", (WANTED, name.encode())))
    extract(tmp_path / "a", wanted)
    with pytest.raises(UsageError, match=f"{tmp_path}/b holds"):
        extract(tmp_path / "b", wanted)
    assert (tmp_path / "out/text").read_bytes() == b"a"


def test_members_may_be_compressed(tmp_path):
    names = {f"a/{WANTED}{ending}" for ending in ("", ".gz", ".xz", ".bz2", ".zst")}
    (tmp_path / "opus-100-corpus-v1.0.tar.gz").write_bytes(tar(dict.fromkeys(names, b"a")))
    step(tmp_path, {}, "unpack", "opus100", tmp_path, tmp_path / "out")
    assert {f"a/{name}" for name in contents(tmp_path / "out")} == names


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_nothing_is_written_outside(tmp_path, kind):
    """Whatever the members' names are, only wanted ones are written, under the names that are wanted."""
    members = [(name, b"evil\n") for name in OUTSIDE]
    (tmp_path / "a").write_bytes(packed(kind, *members, (f"../{WANTED}", b"good\n")))
    assert extract(tmp_path / "a", {WANTED: tmp_path / "out/text"}) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "out", "text"]


def test_a_sparse_member_larger_than_a_text_is_not_read_into_memory(tmp_path):
    info = tarfile.TarInfo("translations/source/de/x.po")
    info.size = 2**43
    archive = tmp_path / "messages.tar"
    archive.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UsageError, match="x.po' of 8,796,093,022,208 bytes: expected at most"):
        list(read_members(archive, lambda path: True))


def test_missing_archive_is_named(tmp_path):
    result = step(tmp_path, {}, "unpack", "opus100", tmp_path, tmp_path / "unpacked", check=False)
    refused(result, tmp_path / "opus-100-corpus-v1.0.tar.gz")
    assert list(tmp_path.iterdir()) == []
