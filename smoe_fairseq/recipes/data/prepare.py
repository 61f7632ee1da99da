"""``scripts/prepare.sh``: from raw text to what ``fairseq-train`` reads."""

import contextlib
import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from smoe_fairseq import files, locks
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.flags import refusing_flags
from smoe_fairseq.forms import read_json
from smoe_fairseq.host_memory import cores
from smoe_fairseq.languages import spelled_twice
from smoe_fairseq.recipes import pretrained
from smoe_fairseq.recipes.commands import CommandParser, Step, add_subword_options
from smoe_fairseq.recipes.data import raw
from smoe_fairseq.recipes.data.adopt import binarised_folder
from smoe_fairseq.recipes.data.checks import print_checks
from smoe_fairseq.recipes.data.download import remote_files
from smoe_fairseq.recipes.data.finding import find
from smoe_fairseq.recipes.datasets import Dataset, naming_settings
from smoe_fairseq.recipes.folders import LEFT_OUT, PARTIAL, PREPARED, SIZES, Folders, package_folder
from smoe_fairseq.recipes.pretrained import is_foreign, plain_path, source_of, with_pretrained
from smoe_fairseq.recipes.processes import command, recipe, run, warn
from smoe_fairseq.recipes.program_flags import FAIRSEQ_POSITIONS, arguments, parse_flags, value_of

_UNFINISHED = "unfinished.json"  # the name of `PREPARED`, see `_origin`, until the text is complete
_WHOLE = 1 << 26  # bytes up to which a pretrained model's files without checksums are read whole
_POSITIONS = "max-source-positions"  # of `train`: decides where lines are cut off


def prepare(dataset: Dataset, flags: Sequence[str] = ()) -> None:
    """Download the text or read it from ``RAW``, learn subwords, and binarise every pair.

    With a pretrained model, the subwords are the model's. Does nothing if the data set is prepared already.
    ``flags`` go to the step that learns subwords.
    Raises UsageError, before anything is written, if it was prepared from other text or settings.
    """
    folders = Folders(dataset)
    parser = CommandParser(prog="smoe prepare")
    add_subword_options(parser)
    parser.words = [*arguments(dataset.subwords), *flags]  # for its errors
    with naming_settings(dataset, ["subwords"], flags), refusing_flags():
        symbols = parser.parse_args(parser.words).user_defined_symbols
        if taken := {*symbols} & {f"__{language}__" for language in dataset.languages}:
            raise UsageError(f"--user-defined-symbols {min(taken)}: it is a language's token")
    if source := source_of(dataset):
        own = dataset.own("pretrained") and dataset.own("subwords")
        if named := " ".join(flags) or own and f"{dataset.file}: `subwords`":
            kept = f"the pretrained model {source} keeps its own; `add-subwords` adds some"
            raise UsageError(f"{named}: {kept}")
        with quietly():
            from smoe_fairseq.recipes.data.adapt import check_languages, languages_of  # fairseq

            if known := languages_of(Path(source)):
                check_languages(dataset, known)
    for key in () if source else ("trim", "new-languages", "add-subwords"):
        if getattr(dataset, key.replace("-", "_")):
            raise UsageError(f"{dataset.file}: `{key}` needs `pretrained`, or --pretrained")
    if _is_prepared(dataset, flags):
        return
    if dataset.settings.dry_run:
        _prepare(dataset, flags)
        return
    _check_training(dataset)
    folders.data.mkdir(parents=True, exist_ok=True)
    locks.lock_folder(folders.data, locks.PREPARATION)
    try:
        if not _is_prepared(dataset, flags):  # by another process meanwhile
            _prepare(dataset, flags)
    finally:
        locks.unlock_folder(folders.data, locks.PREPARATION)
        with contextlib.suppress(OSError):
            folders.data.rmdir()  # if nothing was written


def _check_training(dataset: Dataset) -> None:
    """Raise UsageError if ``fairseq-train`` refuses a setting of ``train``, rather than after this work."""
    if value_of(dataset.train, "arch", None):  # by which its flags are known
        words = ["DATA", *arguments(dataset.task | dataset.train)]
        with naming_settings(dataset, ("train", "task")), quietly():
            parse_flags("fairseq-train", words)


def _is_prepared(dataset: Dataset, flags: Sequence[str]) -> bool:
    folders = Folders(dataset)
    if not folders.binary.exists():
        return False
    folders.check_prepared()
    advice = "delete it to prepare it again"
    if changed := _changed(dataset, flags):
        # Text that was gathered is used again, unless RAW names its source.
        if changed in ("`raw`", "`source`", "`clean`") and not dataset.settings.raw:
            advice = f"delete it{raw.put_away(folders.raw)} to prepare it again"
        raise UsageError(f"{folders.binary} was prepared with other {changed}: {advice}")
    print("# " * dataset.settings.dry_run + f"{folders.binary} is prepared already: {advice}")
    return True


def _changed(dataset: Dataset, flags: Sequence[str]) -> str | None:
    """A setting or text that is not that of the binarised text; None if there is none, or no record."""
    if not (before := _record(dataset)):
        return None
    if setting := changed_setting(dataset, flags):
        return setting
    now = _origin(dataset, flags)
    if before.get("model", now["model"]) != now["model"]:
        return "content of `pretrained`"
    for place, texts in now["content"].items():
        known = before["content"].get(place)
        if known is None:
            return "text, without --raw"
        if any(known.get(name) != digest for name, digest in texts.items()):
            return f"text in {place}"
    return None


def changed_setting(dataset: Dataset, flags: Sequence[str] | None = None) -> str | None:
    """A setting that the binarised text was not made with; None if there is none, or no record.

    Without ``flags``, those that were typed to prepare it are taken as meant.
    """
    now, others = _settings(dataset, flags or ()), {"languages"}  # that `check_prepared` compares
    before = {**_record(dataset).get("settings", now)}
    before["pretrained"] = plain_path(before.get("pretrained"))
    if dataset.start:  # whose positions `with_pretrained` adds where the file has none
        before[_POSITIONS] = before.get(_POSITIONS) or dataset.start["train"].get(_POSITIONS)
    if flags is None:  # `with_pretrained` compares the model
        others |= {"pretrained"}
        before["subwords"] = before["subwords"][: len(now["subwords"])]
    compared = sorted(now.keys() - others)
    changed = (key for key in compared if (before.get(key) or None) != (now[key] or None))
    return next((f"`{key}`" for key in changed), None)


def _record(dataset: Dataset) -> dict[str, dict]:
    record = Folders(dataset).binary / PREPARED
    form = {"settings": dict, "content": {str: {str: str}}, "model?": dict}
    advice = f"delete {record.parent} to prepare it again"
    return read_json(record, form, advice) if record.exists() else {}


def _origin(dataset: Dataset, flags: Sequence[str], gathered: Path | None = None) -> dict:
    """What binarised text is made of: settings, the `_digests` of the texts' files, and the pretrained model.

    With it alone an interrupted preparation continues. ``gathered`` has the text of ``raw/`` until that is
    replaced.
    """
    gathered = gathered or Folders(dataset).raw
    text = {"raw/": _digests(gathered, raw.text_files(gathered, ",".join(dataset.all_pairs)))}
    if source := dataset.settings.raw:
        text["RAW"] = _digests(source, _text_of(dataset, source))
    settings = _settings(dataset, flags)
    return {"settings": settings, "content": text, "model": _model(dataset)}


def _settings(dataset: Dataset, flags: Sequence[str]) -> dict[str, object]:
    settings = raw.settings_of(dataset)
    settings |= {"shards": dataset.shards, "subwords": [*arguments(dataset.subwords), *flags]}
    settings |= {"pretrained": source_of(dataset), "new-languages": dataset.new_languages}
    settings |= {"add-subwords": dataset.add_subwords, "trim": dataset.trim}
    settings |= {_POSITIONS: dataset.train.get(_POSITIONS), "keep": [*dataset.keep]}
    return settings | {"languages": dataset.codes}


def _model(dataset: Dataset) -> dict[str, str]:
    """The identity of each of the pretrained model's files."""
    if not (given := source_of(dataset)):
        return {}
    source = Path(given)
    if is_foreign(source):
        files = [file for file in source.glob("[!.]*") if file.is_file() and file.suffix != ".md"]
    else:
        with quietly():
            from smoe_fairseq.translate.load import checkpoint_of  # fairseq

        files = [checkpoint_of(source)]
    return {file.name: _identity(file) for file in files}


def _identity(file: Path) -> str:
    """A `fingerprint`; of samples of a large file that would be read whole, such as safetensors."""
    size = file.stat().st_size if file.exists() else 0
    if size <= _WHOLE or zipfile.is_zipfile(file):
        return fingerprint(file)
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        for start in range(0, size, _WHOLE):
            content.seek(start)
            digest.update(content.read(1 << 20))
    return f"{size} {digest.hexdigest()}"


def _text_of(dataset: Dataset, source: Path) -> Iterable[Path]:
    """The files in ``source`` that have the data set's text."""
    if source.is_file():
        return [source]
    if dataset.raw.get("messages") or dataset.raw.get("binarised"):
        return source.rglob("*")
    text = dataset.in_text
    sections = filter(None, (find(text, source, *unit) for unit in raw.splits_of(text)))
    return {file for section in sections for file in section.files.values() if file}


def _digests(source: Path, files: Iterable[Path]) -> dict[str, str]:
    """A digest of each file's content, by its path in ``source``; of files elsewhere by its name."""
    digests = {}
    for path in filter(Path.is_file, files):
        with open(path, "rb") as file:
            within = source in path.parents  # test sets of sacreBLEU are not
            name = str(path.relative_to(source)) if within else path.name
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _prepare(dataset: Dataset, flags: Sequence[str]) -> None:
    folders, source, dry_run = Folders(dataset), dataset.settings.raw, dataset.settings.dry_run
    for one, other in spelled_twice(dataset.languages):
        warn(f"{one} and {other} are one language, and become two of the model: use one in `pairs`")
    if archive := _archive(dataset):
        if unused := " ".join(flags) or "`clean`" * bool(dataset.clean):
            advice = "leave it out, or give --raw folder with text"
            raise UsageError(f"{unused}: {archive} is used as its authors binarised it; {advice}")
        run(_adopted(dataset, archive), dataset.settings)
        return
    is_no_folder = source and not source.is_dir() and (source.exists() or not dry_run)
    if is_no_folder and not dataset.raw.get("messages"):
        expected = f"expected a folder with the text of {dataset.name}, unpacked"
        raise UsageError(f"--raw {source}: {expected}")
    if source and dataset.source.get("datasets"):
        raise UsageError(f"--raw {source}: `source.datasets` names the text: leave one of them out")
    if source:
        raw.check_replaceable(folders.raw, [source])
    elif folders.raw.exists():
        raw.check_settings(dataset, folders.raw)
    partial, replacing = (Path(f"{path}{PARTIAL}") for path in (folders.binary, folders.raw))
    text, tested = replacing if replacing.exists() else folders.raw, dataset.pairs
    record = partial / _UNFINISHED
    kept, continues = False, not dry_run and record.exists()
    continues = continues and read_json(record) == _origin(dataset, flags, text)
    try:
        if continues:
            print(f"# {dataset.name}: an interrupted preparation continues", flush=True)
        else:
            text = folders.raw
            if not dry_run:
                _remove(partial, replacing)
            if source or not text.exists():
                if text.exists():  # it stays until all that replaces it is complete
                    text = replacing
                run(_raw_text(dataset, text), dataset.settings)
        if not dry_run or text.exists():
            tested = raw.check(dataset, text)
        for pair in sorted({*dataset.all_pairs} - {*tested}):
            warn(f"{text}/test.{pair}.* is missing: {pair} will not be scored")
        if not (dry_run or continues):
            partial.mkdir()
            made_of = _origin(dataset, flags, text)
            files.write_whole(record, json.dumps(made_of) + "\n")
        run(_binarised(dataset, text, partial, flags), dataset.settings)
        run(_replaced(dataset, text, partial), dataset.settings)
    except SystemExit as ended:
        if ended.code >= 128:
            kept = record.exists()
            does = "continues" if kept else "gathers the text again"
            print(f"# ended by a signal; the same command {does}", flush=True)
        raise
    finally:  # what is complete is kept for the next attempt
        if not (dry_run or kept or (partial / "spm.model").exists()):
            _remove(partial, replacing)


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _archive(dataset: Dataset) -> Path | None:
    """The archive of binarised text, or its folder; None to prepare the data set from text."""
    folders = Folders(dataset)
    if not dataset.raw.get("binarised"):
        return None
    if source := dataset.settings.raw:
        return source if source.is_file() or binarised_folder(dataset, source) else None
    if any(folders.raw.glob("train.*")):  # text of an earlier preparation, or of the user
        return None
    return folders.download / remote_files(dataset)[0].name


def _adopted(dataset: Dataset, archive: Path) -> Iterator[str | Step]:
    folders = Folders(dataset)
    yield f"# {dataset.name}: binarised text, subwords and tests as they are in the authors' archive"
    if not dataset.settings.raw:
        yield Step("fetch", dataset, folders.download)
    longest = _longest(dataset)
    yield Step("adopt", dataset, archive, folders.raw, folders.binary, longest=longest)


def _raw_text(dataset: Dataset, gathered: Path) -> Iterator[str | Step]:
    folders, source, builtin = Folders(dataset), dataset.settings.raw, dataset.raw.get("builtin")
    elsewhere = builtin or dataset.source.get("datasets")
    if not (source or elsewhere or remote_files(dataset)):
        raise UsageError(f"{dataset.name} cannot be fetched: give its text with --raw folder")
    yield f"# {dataset.name}: bring the text into one layout"
    text = source or (package_folder("recipes", builtin) if builtin else folders.download)
    if not source and not elsewhere:
        yield Step("fetch", dataset, folders.download)
        if dataset.raw.get("messages"):
            text = folders.download / remote_files(dataset)[0].name
        elif dataset.raw.get("archives"):
            text = folders.unpacked
            yield Step("unpack", dataset, folders.download, folders.unpacked)
    yield Step("gather", dataset, Path(text), gathered, workers=_workers(dataset))


def _binarised(
    dataset: Dataset, raw_text: Path, partial: Path, flags: Sequence[str]
) -> Iterator[str | Step]:
    text = partial / "text"
    yield f"# {dataset.name}: one sentencepiece model and dictionary for all languages"
    if dataset.settings.dry_run:
        yield command("rm", "-rf", partial)
    source, model = source_of(dataset), text / "model.pt"
    if source:
        if not (partial / pretrained.RECORD).exists():
            if is_foreign(Path(source)):
                if not model.exists():
                    yield command("smoe", "import", source, "--output", model)
                source = model
            yield Step("adapt", dataset, Path(source), raw_text, partial)
        dataset = with_pretrained(dataset, partial)
    elif not (partial / "spm.model").exists():
        # In a process of its own, since no signal interrupts sentencepiece.
        pairs = ("--pairs", ",".join(dataset.pairs))
        yield recipe("learn", raw_text, partial, *pairs, *arguments(dataset.subwords), *flags)
    pairs, workers = ",".join(dataset.all_pairs), _workers(dataset)
    options = {"pairs": pairs, "longest": _longest(dataset), "workers": workers}
    yield Step("encode", partial / "spm.model", raw_text, text, shards=dataset.shards, **options)
    yield f"# {dataset.name}: binarise; one set of files serves both directions of a pair"
    yield Step("binarise", dataset, text, partial / "dict.txt", partial, workers=workers)


def _replaced(dataset: Dataset, raw_text: Path, partial: Path) -> Iterator[str]:
    """Put what is complete in the place of what was there."""
    folders = Folders(dataset)
    if raw_text != folders.raw:
        for counts in (SIZES, LEFT_OUT):
            if (raw_text / counts).exists():
                yield command("mv", raw_text / counts, folders.data)
        yield command("rm", "-rf", folders.raw)
        yield command("mv", raw_text, folders.raw)
    if not dataset.settings.dry_run:
        print_checks(dataset, partial, _workers(dataset))
    yield command("rm", "-rf", partial / "text", folders.binary)
    if not dataset.settings.dry_run:
        (partial / _UNFINISHED).rename(partial / PREPARED)
    yield command("mv", partial, folders.binary)


def _longest(dataset: Dataset) -> int:
    """Maximum number of pieces in a test sentence: the model's positions less language token and end."""
    return value_of(dataset.train, _POSITIONS, FAIRSEQ_POSITIONS) - 2


def _workers(dataset: Dataset) -> int:
    return dataset.settings.workers or cores()


def gather(dataset: Dataset, source: Path, target: Path, workers: int = 1) -> None:
    """Bring the text of a folder, or of an archive of messages, into the shared layout."""
    dataset = dataset.in_text
    if dataset.raw.get("messages") and not any(source.glob("train.*")):
        from smoe_fairseq.recipes.data.messages import gather_messages  # imports polib

        gather_messages(dataset, source, target)
    else:
        raw.gather(dataset, source, target, workers)
