"""Opening a checkpoint: the one way to its content, safe, and with one sentence for whatever is wrong."""

from pathlib import Path

import torch

from smoe_fairseq.system.checkpoint_file import CutOffCheckpoint, check_content, is_archive, reading
from smoe_fairseq.system.errors import UsageError


def open_checkpoint(path: Path | str) -> dict:
    """The content of a checkpoint, its tensors left on disk until they are used.

    Its checksums have been compared, and nothing but data is built. Files of torch before 1.6 are read into
    memory.

    Raises:
        UsageError: it is missing, or no checkpoint of fairseq.
        UnreadableCheckpoint: it is cut off, damaged, refused, or the system does not let it be read; each
            has a class of its own.
    """
    if Path(path).is_dir():
        raise UsageError(
            f"{path} cannot be read: Is a directory; expected a checkpoint, such as checkpoint_best.pt in it"
        )
    try:
        with reading(path):
            state = torch.load(path, map_location="cpu", mmap=is_archive(path), weights_only=True)
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except Exception:  # what torch raises for bytes that are no pickle is of many kinds
        raise CutOffCheckpoint(f"{path} is cut off or not a checkpoint") from None
    check_content(path, state)
    return state
