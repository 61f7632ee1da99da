"""What a checkpoint says of its model and task, without building them."""

from collections.abc import Mapping

from smoe_fairseq.system.checkpoint_file import check_content, is_archive, reading
from smoe_fairseq.system.errors import UsageError


def saved_name(path: str, part: str, older: str) -> str | None:
    """The name of a checkpoint's ``part``, "model" or "task"; None where it does not say.

    Args:
        older: what the flag was called by which fairseq took it, before checkpoints had parts.

    Raises:
        UsageError: the file is missing, damaged, or no checkpoint of fairseq.
    """
    import torch

    try:
        with reading(path):
            state = torch.load(path, map_location="cpu", mmap=is_archive(path), weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    check_content(path, state)
    config = state.get("cfg")
    saved = state["args"] if config is None else config.get(part)
    saved = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    found = saved.get("_name") or saved.get(older)
    return found if isinstance(found, str) else None
