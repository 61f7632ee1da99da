"""What a trained model needs, found by its run's folder or checkpoint: weights, dictionaries, subwords."""

import re
from pathlib import Path

from fairseq.utils import split_paths

from smoe_fairseq.system.errors import UsageError

SUBWORDS = ("spm.model", "sentencepiece.bpe.model")  # as our recipes call it, and as fairseq does
_NAMES = ("checkpoint_best.pt", "checkpoint_last.pt")


def checkpoint_of(run: Path | str, name: str | None = None) -> Path:
    """The checkpoint of a run: ``run`` itself where it is a file, else ``name`` in it, or its best, or last.

    Raises:
        UsageError: there is none.
    """
    run = Path(run)
    if not run.is_dir():
        if run.exists():
            return run
        raise UsageError(f"{run} is missing: expected the folder of a run, or a checkpoint")
    names = (name,) if name else _NAMES
    found = next((run / each for each in names if (run / each).is_file()), None)
    if found:
        return found
    if any(run.glob(f"{Path(names[-1]).stem}-rank-*.pt")):
        raise UsageError(
            f"{run} is of a run with --expert-parallel: make one checkpoint of its files with smoe "
            "consolidate, and name that"
        )
    raise UsageError(
        f"{run} has no {' or '.join(names)}: expected the folder of a run, or a checkpoint"
    )


def data_of(checkpoint: Path, saved: str, given: Path | str | None = None) -> str:
    """The folder of the dictionaries: ``given``, the checkpoint's own, or where its training has had them.

    Args:
        saved: what the checkpoint says of that, the data that it was trained with. A relative path is looked
            for from the folders above the checkpoint, then from here; of data in parts it is the first's.

    Raises:
        UsageError: they are not there.
    """
    if given is not None:
        if _has_dictionaries(Path(given)):
            return str(given)
        raise UsageError(f"{given} has no dictionaries: expected a folder with dict.*.txt")
    folder = checkpoint.resolve().parent
    if _has_dictionaries(folder):
        return str(folder)
    for part in split_paths(saved)[:1]:
        for place in (*(above / part for above in folder.parents), Path(part)):
            if _has_dictionaries(place):
                return str(place)
    raise UsageError(
        f"{saved or 'a folder'}, with the dictionaries that {checkpoint} was trained with, is not here: "
        "expected dict.*.txt beside the checkpoint, or their folder by --data (in Python data_name_or_path)"
    )


def subwords_of(data: str) -> Path | None:
    """The sentencepiece model beside the dictionaries; None: there is none."""
    folder = Path(data)
    folders = [folder, folder.parent] if re.fullmatch(r"shard\d+", folder.name) else [folder]
    places = (place / name for place in folders for name in SUBWORDS)
    return next((place for place in places if place.is_file()), None)


def _has_dictionaries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("dict.*"))
