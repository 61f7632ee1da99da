"""Archives that are damaged or mean harm: refused in one sentence, and nothing is left of them."""

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_recipes_archives import step, tar


def unpacked(tmp_path: Path, archive: bytes) -> str:
    """What unpacking says, having failed; nothing may be left of it, nor lie outside of it."""
    folder = tmp_path / "inside/download"
    folder.mkdir(parents=True)
    (folder / "opus-100-corpus-v1.0.tar.gz").write_bytes(archive)
    before = sorted(tmp_path.rglob("*"))
    words = ["unpack", "opus100", folder, tmp_path / "inside/unpacked"]
    result = step(tmp_path, {}, *words, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    assert sorted(tmp_path.rglob("*")) == before
    assert "error: " in result.stdout and "opus-100-corpus-v1.0.tar.gz" in result.stdout
    return result.stdout


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
