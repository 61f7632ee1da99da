"""Downloads that resume, are checked, and appear under their final name only when complete."""

import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smoe_fairseq.recipes.preparing.layout import all_publisher_names
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import put_in_place

ATTEMPTS = 3
TIMEOUT_SECONDS = 60
_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True)
class Remote:
    """A file to download; ``size`` in bytes and ``sha256`` where they are known."""

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None


def remote_files(dataset: Dataset) -> list[Remote]:
    """What a data set is made of: single files (``raw.url``) or ``raw.archives``."""
    if url := dataset.raw.get("url"):
        checksums = dataset.raw.get("sha256", {})
        urls = (url.format(file=names[0]) for names in all_publisher_names(dataset))
        named = ((address, address.rsplit("/", 1)[-1]) for address in urls)
        return [Remote(address, name, None, checksums.get(name)) for address, name in named]
    return [
        Remote(
            entry["url"],
            entry.get("file") or entry["url"].rsplit("/", 1)[-1],
            entry.get("size"),
            entry.get("sha256"),
        )
        for entry in dataset.raw.get("archives", [])
    ]


def fetch(dataset: Dataset, folder: Path) -> None:
    """Downloads the data set's files that ``folder`` lacks and checks those it has."""
    for remote in remote_files(dataset):
        target = folder / remote.name
        if target.exists():
            if fault := _fault(remote, target):
                raise UsageError(f"{target} has {fault}: delete it and get it again")
            continue
        try:
            download(remote, target)
        except OSError as error:
            raise UsageError(
                f"cannot download {remote.url} ({error}): go online and repeat, put the file at "
                f"{target}, or give a folder with {dataset.name}'s files as RAW=folder"
            ) from None


def download(remote: Remote, target: Path) -> None:
    """Downloads to ``target.part`` and renames; resumes what an earlier attempt left there.

    Raises ``OSError`` when the server stays out of reach or keeps cutting off, `UsageError` when
    the content is not what was expected or the disk is full; in no case does ``target`` exist afterwards.
    """
    part = target.with_name(f"{target.name}.part")
    with _writing(part):
        part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _append_rest(remote.url, part)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == ATTEMPTS:
                raise
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                raise OSError(str(error)) from error
        print(f"{target.name}: interrupted, resuming", file=sys.stderr, flush=True)
    if fault := _fault(remote, part):
        part.unlink()
        raise UsageError(f"{remote.url} has {fault}")
    with _writing(part):
        put_in_place(part, target)


def _append_rest(url: str, part: Path) -> None:
    """Requests what ``part`` still lacks; a connection cut short raises ``ConnectionError``."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # Complete: an earlier attempt ended just before it was renamed.
        part.unlink()  # The server has nothing beyond it: it may be of another file. Start anew.
        return _append_rest(url, part)
    with response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        with _writing(part):
            output = open(part, "ab" if resumed else "wb")
        try:
            while block := response.read(_BLOCK):
                with _writing(part):
                    output.write(block)
        finally:
            with _writing(part):
                output.close()
        size = part.stat().st_size
    if length is not None and size < have + int(length):
        raise ConnectionError(f"cut off after {size} of {have + int(length)} bytes")
    print(f"{url}: {size:,} bytes", flush=True)


@contextmanager
def _writing(part: Path) -> Iterator[None]:
    """A disk that refuses is not a network that does, and is not asked again."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{part} cannot be written: {error.strerror}; what is there already is used by the next attempt"
        ) from None


def _fault(remote: Remote, path: Path) -> str | None:
    """What is wrong with a file, by size and checksum as far as they are known."""
    if remote.size and (size := path.stat().st_size) != remote.size:
        return f"{size} bytes, not {remote.size} as expected"
    if remote.sha256:
        with open(path, "rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != remote.sha256:
            return f"the SHA-256 checksum {found}, not {remote.sha256} as expected"
    return None
