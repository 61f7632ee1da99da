"""The identity of a checkpoint is its content, whatever the names and times of its files."""

import hashlib
import zipfile
from pathlib import Path

from smoe_fairseq.compat.checkpoint_names import PENDING, rank_files
from smoe_fairseq.files import check_plain

MADE_OF = "smoe_made_of"  # key in a checkpoint made of others: their fingerprints, by name


def fingerprint(path: Path) -> str:
    """A digest of names, sizes and checksums (CRC-32) of all parts of a checkpoint, or of a set by its name.

    Only the tables of the archives are read; files of torch before 1.6 have none and are read whole.

    Raises:
        UsageError: it is a pipe or a device.
        OSError: there is no such file, or it cannot be read.
    """
    ranks = [*rank_files(path).values(), *rank_files(path, PENDING).values()]
    digest = hashlib.sha256()
    for file in ranks or [path]:
        check_plain(file)
        with open(file, "rb") as opened:
            digest.update(_table(opened) or hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def is_cut_off(path: Path) -> bool:
    """Whether a file begins as a checkpoint's archive and has not its end, as after a full disk."""
    with open(path, "rb") as opened:
        return opened.read(2) == b"PK" and not zipfile.is_zipfile(path)


def _table(opened) -> bytes:
    """The parts of an archive, without its own name, which torch puts in front; empty for other files."""
    try:
        parts = zipfile.ZipFile(opened).infolist()
    except OSError:
        raise
    except Exception:  # damaged tables cause many types of errors
        opened.seek(0)
        return b""
    rows = sorted((p.filename.partition("/")[2], p.file_size, p.CRC) for p in parts)
    return "".join(f"{row}\n" for row in rows).encode("utf-8", "surrogatepass")
