"""Archives that are damaged or mean harm: refused in one sentence, and nothing is left of them."""

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from commands import refused
from test_recipes_archives import step, tar

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.data.download import read_members


def unpacked(tmp_path: Path, archive: bytes) -> str:
    """What unpacking says, having failed; nothing may be left of it, nor lie outside of it."""
    folder = tmp_path / "inside/download"
    folder.mkdir(parents=True)
    (folder / "opus-100-corpus-v1.0.tar.gz").write_bytes(archive)
    before = sorted(tmp_path.rglob("*"))
    words = ["unpack", "opus100", folder, tmp_path / "inside/unpacked"]
    result = step(tmp_path, {}, *words, check=False)
    assert sorted(tmp_path.rglob("*")) == before
    return refused(result, "opus-100-corpus-v1.0.tar.gz")


WANTED = "opus-100-corpus/v1.0/supervised/en-fr/opus.en-fr-train.fr"


@pytest.mark.parametrize("name", [f"../{WANTED}", f"/tmp/{WANTED}", f"a/../../{WANTED}", "../evil"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_lead_outside_are_refused(tmp_path, kind, name):
    if kind == "tar":
        archive = tar({WANTED: b"good\n", name: b"evil\n"}, "xz")
    else:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as target:
            target.writestr(WANTED, b"good\n")
            target.writestr(name, b"evil\n")
        archive = content.getvalue()
    assert "outside of it" in unpacked(tmp_path, archive)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_are_refused(tmp_path, kind):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        info = tarfile.TarInfo(WANTED)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "not a plain file" in unpacked(tmp_path, content.getvalue())


def test_link_in_a_zip_is_refused(tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        info = zipfile.ZipInfo(WANTED)
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    assert "not a plain file" in unpacked(tmp_path, content.getvalue())


def test_corrupt_archives_are_named(tmp_path):
    archive = bytearray(tar({WANTED: os.urandom(5000)}))
    for i, damaged in enumerate([archive[:2500], b"<html>quota exceeded</html>"]):
        assert "get it again" in unpacked(tmp_path / str(i), bytes(damaged))
    archive[-6] ^= 1  # In the checksum, behind everything that is unpacked.
    assert "get it again" in unpacked(tmp_path / "2", bytes(archive))


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


def test_a_sparse_member_larger_than_the_disk_is_refused(tmp_path):
    """A few bytes of a header that stand for more than there is room."""
    info = tarfile.TarInfo(WANTED)
    info.size = 2**60
    sentence = unpacked(tmp_path, info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert WANTED in sentence and "has no room" in sentence


def test_a_sparse_member_larger_than_a_text_is_not_read_into_memory(tmp_path):
    info = tarfile.TarInfo("translations/source/de/x.po")
    info.size = 2**43
    archive = tmp_path / "messages.tar"
    archive.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UsageError, match="x.po' of 8,796,093,022,208 bytes: expected at most"):
        list(read_members(archive, lambda path: True))


def test_two_members_for_one_file_are_refused(tmp_path):
    content = tar({f"one/{WANTED}": b"a\n", f"two/{WANTED}": b"b\n"})
    sentence = unpacked(tmp_path, content)
    assert "one/" in sentence and "two/" in sentence and "for one file" in sentence


def test_archive_with_a_password_is_named(tmp_path):
    assert "expected an archive without a password" in unpacked(tmp_path, zipped(flag=1))


@pytest.mark.parametrize("method", [9, 99])  # deflate64; AES
def test_unknown_compression_is_named(tmp_path, method):
    sentence = unpacked(tmp_path, zipped(method=method))
    assert "compression" in sentence and "bzip2 or xz" in sentence


def test_missing_archive_is_named(tmp_path):
    result = step(tmp_path, {}, "unpack", "opus100", tmp_path, tmp_path / "unpacked", check=False)
    refused(result, tmp_path / "opus-100-corpus-v1.0.tar.gz")
    assert list(tmp_path.iterdir()) == []
