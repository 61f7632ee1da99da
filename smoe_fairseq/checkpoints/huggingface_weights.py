"""The weights of a folder for transformers: safetensors or pytorch_model.bin, in one file or in shards."""

from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.compat.safe_load import is_archive, reading
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain
from smoe_fairseq.forms import read_json

_NAMES = ("model.safetensors", "pytorch_model.bin")  # the first that exists is read


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files by name, mapped from the files.

    Raises:
        UsageError: a file is missing or damaged, or is not plain data.
    """
    tensors, names = {}, _files(folder)
    for name in names:
        file = folder / name
        if not file.exists():
            several = f": {folder} is incomplete, with {len(names)} files of weights in its index"
            advice = several * (len(names) > 1) or f"; expected {' or '.join(_NAMES)}"
            raise UsageError(f"{file} is missing{advice}")
        check_plain(file)
        tensors |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    return tensors


def refuse_pointers(folder: Path) -> None:
    """Raise UsageError for a file of which ``git clone`` without git-lfs left only a pointer."""
    for file in folder.iterdir():
        small = file.is_file() and file.stat().st_size < 1024
        if small and file.read_bytes().startswith(b"version https://git-lfs"):
            advice = "get the file by `git lfs pull`, or the folder by `hf download`"
            raise UsageError(f"{file} is a pointer of git-lfs: {advice}")


def _files(folder: Path) -> list[str]:
    """The names of the files with weights."""
    for name in _NAMES:
        if (folder / name).exists():
            return [name]
        if (index := folder / f"{name}.index.json").exists():
            shards = read_json(index, {"weight_map": {str: str}})["weight_map"]
            return sorted({Path(shard).name for shard in shards.values()})
    return [_NAMES[0]]


def _safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} is damaged: {error}") from None


def _pickled(file: Path) -> dict[str, Tensor]:
    with reading(file):
        tensors = torch.load(file, map_location="cpu", mmap=is_archive(file), weights_only=True)
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise UsageError(f"{file} is not a file of weights: expected tensors by name")
    return tensors
