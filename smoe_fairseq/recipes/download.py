"""Downloads that resume, are checked, and appear under their final name only when complete."""

import hashlib
import http.client
import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.raw import publisher_names

ATTEMPTS = 3
TIMEOUT_SECONDS = 60


def fetch(dataset: Dataset, folder: Path) -> None:
    """Downloads the files of ``raw.url`` that ``folder`` lacks, compared with ``raw.sha256``."""
    checksums = dataset.raw.get("sha256", {})
    for name in publisher_names(dataset):
        url = dataset.raw["url"].format(file=name)
        target = folder / url.rsplit("/", 1)[-1]
        if target.exists():
            continue
        try:
            download(url, target, checksums.get(target.name))
        except OSError as error:
            raise UsageError(
                f"cannot download {url} ({error}): go online and repeat, or give a folder with "
                f"{dataset.name}'s files as RAW=folder"
            ) from None


def download(url: str, target: Path, sha256: str | None = None) -> None:
    """Downloads to ``target.part`` and renames; resumes what an earlier attempt left there.

    Raises ``OSError`` when the server stays out of reach or keeps cutting off, `UsageError` when
    the content is not what was expected; in neither case does ``target`` exist afterwards.
    """
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _append_rest(url, part)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == ATTEMPTS:
                raise
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                raise OSError(str(error)) from error
        print(f"{target.name}: interrupted, resuming", file=sys.stderr, flush=True)
    if sha256 and (found := _sha256(part)) != sha256:
        part.unlink()
        raise UsageError(f"{url} has the SHA-256 checksum {found}, not {sha256} as expected")
    os.replace(part, target)


def _append_rest(url: str, part: Path) -> None:
    """Requests what ``part`` still lacks; a connection cut short raises ``ConnectionError``."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        part.unlink()  # The server has nothing beyond it: it may be of another file. Start anew.
        return _append_rest(url, part)
    with response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        with open(part, "ab" if resumed else "wb") as output:
            shutil.copyfileobj(response, output)
            size = output.tell()
    if length is not None and size < have + int(length):
        raise ConnectionError(f"cut off after {size} of {have + int(length)} bytes")
    print(f"{url}: {size:,} bytes", flush=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
