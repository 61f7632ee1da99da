"""Download a data set's files, resume and check downloads, and unpack their archives."""

import hashlib
import http.client
import re
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain, open_plain, put_in_place, whole_folder, write_whole
from smoe_fairseq.recipes.data.archives import extract, naming_archive
from smoe_fairseq.recipes.data.compression import BLOCK, COMPRESSED, MAGIC, compression_of
from smoe_fairseq.recipes.data.finding import all_publisher_names, tells_apart
from smoe_fairseq.recipes.datasets import Dataset

ATTEMPTS = 3
TIMEOUT_SECONDS = 60
_BLOCK = 1 << 20  # bytes
_PAGE = re.compile(rb"\s*<(!doctype html|html)\b", re.I)


@dataclass(frozen=True)
class Remote:
    """A file to download, of ``size`` bytes if that is known; raises UsageError for an invalid ``url``."""

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self):
        address = urlsplit(self.url)
        if address.scheme not in ("https", "http", "ftp", "file"):
            raise UsageError(f"`url: {self.url}`: expected https://, http://, ftp:// or file:///")
        if address.password is not None:
            advice = f"download {self.name} by other means, and give its folder as --raw"
            raise UsageError(f"`url` has a password, which is not supported: {advice}")


def remote_files(dataset: Dataset) -> list[Remote]:
    """The files to download for a data set: single files (``raw.url``) or ``raw.archives``.

    Raises UsageError as `Remote`, if a checksum is of no file, or archives have the same name.
    """
    if url := dataset.raw.get("url"):
        checksums, names, apart = dataset.raw.get("sha256", {}), {}, tells_apart(dataset)
        path = urlsplit(url).path
        for name, *_ in all_publisher_names(dataset):
            encoded = quote(re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", name), safe="/%")
            address = url.format(file=encoded)
            # ?download=1 is not of the name; ?name={file} is.
            behind = "{file}" in url and "{file}" not in Path(path).name
            file = Path(name if behind else path.format(file=name)).name
            names[address] = file if apart else str(Path(name).with_name(file))
        files = {*names.values()}
        unused, without = checksums.keys() - files, files - checksums.keys()
        if unused and without:  # and not those of all files and of more pairs
            expected = f"expected the names of files to download, such as {min(without)}"
            raise UsageError(f"{dataset.file}: `raw.sha256` has {min(unused)}: {expected}")
        return [Remote(*each, None, checksums.get(each[1])) for each in names.items()]
    remotes = []
    for entry in dataset.raw.get("archives", []):
        name = entry.get("file") or entry["url"].rsplit("/", 1)[-1]
        if any(name == remote.name for remote in remotes):
            expected = "expected another for each, such as `file: 2.zip` beside `url`"
            raise UsageError(f"{dataset.file}: `raw.archives` has {name} twice: {expected}")
        remotes.append(Remote(entry["url"], name, entry.get("size"), entry.get("sha256")))
    return remotes


def fetch(dataset: Dataset, folder: Path) -> None:
    """Download the data set's files that ``folder`` lacks, and check the existing ones."""
    remotes = remote_files(dataset)
    if there := next((r.name for r in remotes if (folder / r.name).exists()), None):
        print(f"{folder} has {there} and so on: delete it to download again", flush=True)
    for remote in remotes:
        target = folder / remote.name
        if target.exists():
            if fault := _fault(remote, target):
                raise UsageError(f"{target} has {fault}: delete it and get it again")
            continue
        try:
            download(remote, target)
        except OSError as error:
            elsewhere = f"put the file at {target}, or give a folder with {dataset.name}'s files"
            advice = f"go online and repeat, {elsewhere} as --raw folder"
            raise UsageError(f"cannot download {remote.url} ({error}): {advice}") from None


def unpack(dataset: Dataset, downloads: Path, target: Path) -> None:
    """Extract the files that ``raw.files`` names from the data set's archives to ``target``."""
    named = all_publisher_names(dataset)
    files = [{f"{name}{ending}" for name in names for ending in COMPRESSED} for names in named]
    if all(any((target / name).exists() for name in names) for names in files):
        print(f"{target} is unpacked already: delete it to unpack it again", flush=True)
        return
    archives = [downloads / remote.name for remote in remote_files(dataset)]
    with whole_folder(target, replace=True) as partial:
        wanted = {name: partial / name for names in files for name in names}
        counts = {archive: extract(archive, wanted) for archive in archives}
        if not any(counts.values()):
            lack = f"{' and '.join(map(str, archives))} has no file {named[0][0]} or the like"
            raise UsageError(f"{lack}, as `raw.files` says: correct it in {dataset.file}")
    for archive, count in counts.items():
        print(f"{archive}: {count} files unpacked", flush=True)


def download(remote: Remote, target: Path) -> None:
    """Download to ``target.part`` and rename it; resume the ``.part`` of an earlier attempt.

    It is resumed only if the server's file is unchanged, by the version that the server sent
    (``target.part.version``), or if the checksum is known.

    Raises:
        OSError: the server cannot be reached, or the connection breaks repeatedly.
        UsageError: the content is not as expected, or the disk is full.
    """
    part = target.with_name(f"{target.name}.part")
    with _writing(part):
        part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            measured = _append_rest(remote, part)
            break
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or attempt == ATTEMPTS:
                raise OSError(str(error)) from error
        print(f"{target.name}: interrupted, resuming", file=sys.stderr, flush=True)
    known = measured or remote.size or remote.sha256
    if fault := _fault(remote, part) or (None if known else _cut_off(part)):
        part.unlink()
    else:
        with _writing(part):
            put_in_place(part, target)
    _version_file(part).unlink(missing_ok=True)
    if fault:
        raise UsageError(f"{remote.url} has {fault}")


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _append_rest(remote: Remote, part: Path) -> bool:
    """Download the rest of ``part``; returns whether its length is known. ConnectionError: it is cut off."""
    url, version = remote.url, _version_file(part)
    have = part.stat().st_size if part.exists() else 0
    known = version.read_text("utf-8") if version.is_file() else ""
    headers = {}
    if have and (known or remote.sha256):
        headers = {"Range": f"bytes={have}-"} | ({"If-Range": known} if known else {})
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return True  # complete: an earlier attempt ended just before renaming it
        part.unlink()  # longer than the server's file, so perhaps another file
        return _append_rest(remote, part)
    with response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        with _writing(part):
            output = open_plain(part, append=resumed)
            if not resumed:
                write_whole(version, _version(response.headers))
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
    return length is not None


def _version(headers: Mapping[str, str]) -> str:
    """The version of the server's file, for If-Range; "" if the server sends none."""
    tag = headers.get("ETag") or ""
    return tag if tag.startswith('"') else headers.get("Last-Modified") or ""


@contextmanager
def _writing(part: Path) -> Iterator[None]:
    """Raise UsageError for an error of the disk, so that the download is not retried."""
    try:
        yield
    except OSError as error:
        advice = "the next attempt resumes the download"
        raise UsageError(f"{part} cannot be written: {error.strerror}; {advice}") from None


def _fault(remote: Remote, path: Path) -> str | None:
    """What shows that a file is not the expected one; None if nothing does."""
    check_plain(path)
    size = path.stat().st_size
    if not size or remote.size not in (None, size):
        return f"{size} bytes, not {remote.size or 'more'} as expected"
    with open(path, "rb") as content:
        beginning = content.read(_BLOCK)
        if _PAGE.match(beginning):
            return "a page of HTML, such as a login, not the file as expected"
        if (magic := MAGIC.get(Path(remote.name).suffix)) and not beginning.startswith(magic):
            return f"other content than {Path(remote.name).suffix} as expected"
        if remote.sha256:
            content.seek(0)
            checksum = hashlib.file_digest(content, "sha256").hexdigest()
            if checksum != remote.sha256.lower():
                return f"the SHA-256 checksum {checksum}, not {remote.sha256} as expected"
    return None


def _cut_off(path: Path) -> str | None:
    """What shows that a compressed file or archive lacks its end; None if nothing does."""
    try:
        with naming_archive(path):
            with open(path, "rb") as file:
                kind = compression_of(file.read(BLOCK))
            with COMPRESSED[kind](path) as content:
                while content.read(BLOCK):
                    pass
            if path.name.endswith(".zip.part"):
                zipfile.ZipFile(path).close()
    except UsageError:
        return "no end as expected: it is cut off, or damaged"
    return None


def fetch_tokenizer(name: str) -> None:
    """Download the model of a sacreBLEU tokenizer (``flores200``) to sacreBLEU's folder.

    sacreBLEU itself would download it only after translation, and a failed download would leave an empty
    file that it then reads as the model.
    """
    url, target = _tokenizer(name)
    if tokenizer_file(name):
        return
    try:
        download(Remote(url, target.name), target)
    except OSError as error:
        failed = f"cannot fetch sacreBLEU's {name} tokenizer ({error})"
        raise UsageError(f"{failed}: download {url} elsewhere, and put it at {target}") from None


def tokenizer_file(name: str) -> Path | None:
    """The model's file if it exists."""
    file = _tokenizer(name)[1]
    return file if file.exists() and file.stat().st_size else None


def _tokenizer(name: str) -> tuple[str, Path]:
    """The model's URL, and its path in sacreBLEU's folder."""
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    url = SPM_MODELS[name]["url"]
    return url, Path(SACREBLEU_DIR) / "models" / Path(url).name
