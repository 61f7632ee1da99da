"""Checkpoints that hold more than data: every command names file and type, and runs nothing of them."""

import io
import os
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from commands import generation, refused, run
from fairseq import checkpoint_utils  # noqa: F401  (allows the types of its checkpoints)

REST = (
    "which is not loaded since it could run a program; expected tensors, numbers, text, and lists"
)


class Intruder:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Settings:
    """A class of a program of its own; its objects do nothing when they are unpickled."""


def test_a_command_names_file_and_type(pre_norm, corpus, tmp_path):
    """That it goes on or fine-tunes from: see test_checkpoint_files.py."""
    trace, path = tmp_path / "trace", tmp_path / "checkpoint.pt"
    torch.save(torch.load(pre_norm) | {"intruder": Intruder(trace)}, path)
    result = run("fairseq-generate", *generation(corpus, path), check=False)
    refused(result, f"{path} holds posix.mkdir (a type or function), {REST}")
    assert not trace.exists()
    # torch's words explain how to load it all the same.
    assert not any(word in result.stdout for word in ("weights_only", "safe_globals", "trust"))


def saved(content, path: Path, **options) -> Path:
    torch.save(content, path, **options)
    return path


class Made:
    """Whatever a function makes of its arguments, and of a state that it is given then."""

    def __init__(self, function, *arguments, state=None):
        self.made = (function, arguments, state)[: 2 + (state is not None)]

    def __reduce__(self):
        return self.made


ADDRESS = b"A" * 8  # of no object
EMPTY = (numpy.ndarray, (0,), b"b")
WHOLE = (3, "<", None, None, None, -1, -1, 0)


def array(shape=(1,), kind=None, content=ADDRESS):
    kind = kind or Made(numpy.dtype, "f8", False, True, state=WHOLE)
    return Made(RECONSTRUCT, *EMPTY, state=(1, shape, kind, False, content))


RECONSTRUCT, SCALAR = (getattr(numpy._core.multiarray, n) for n in ("_reconstruct", "scalar"))
FORGED = {
    "a buffer of addresses": Made(numpy.ndarray, (1,), "O", ADDRESS),
    "a buffer that is too small": Made(numpy.ndarray, (1 << 40,), "d", ADDRESS),
    "objects": array(kind=Made(numpy.dtype, "O", False, True)),
    "a scalar of an object": Made(SCALAR, Made(numpy.dtype, "O", False, True), ADDRESS),
    "a scalar cut off": Made(SCALAR, Made(numpy.dtype, "f8", False, True), b"AA"),
    "less than its shape": array(shape=(1 << 40,)),
    "more dimensions than there are": array(shape=(1,) * 70),
    "a large shape of nothing": array(shape=(1 << 62, 0), content=b""),
    "a negative shape": array(shape=(-1, -1)),
    "fields": array(kind=Made(numpy.dtype, [("a", "O")])),
    "a type of another state": array(
        kind=Made(numpy.dtype, "f8", False, True, state=(*WHOLE[:3], ("a",), {}, 8, 8, 63))
    ),
    "an array of another type": Made(RECONSTRUCT, torch.Tensor, (0,), b"b"),
    "no state of an array": Made(RECONSTRUCT, *EMPTY, state=(1, 2)),
    "a type of no code": Made(numpy.dtype),
}


def twice_filled() -> bytes:
    """A pickle by hand: a list of an array that is filled, of a tensor of its memory, and of it once more."""

    def text(word: str) -> bytes:
        return b"X" + len(word).to_bytes(4, "little") + word.encode()

    def data(word: str) -> bytes:
        return b"c_codecs\nencode\n" + text(word) + text("latin1") + b"\x86R"

    kind = b"cnumpy\ndtype\n" + text("u1") + b"\x85R"
    state = b"(K\x01(K\x04t" + kind + b"\x89" + data("AAAA") + b"t"
    made = (
        b"cnumpy._core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + data("b")
    )
    array = made + b"\x87Rq\x01" + state + b"b"
    tensor = b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n(h\x01ctorch\nuint8\n" + text(
        "cpu"
    )
    return b"\x80\x02]" + array + b"a" + tensor + b"\x89tRa" + b"h\x01" + state + b"ba."


def test_an_array_is_filled_once():
    with pytest.raises(pickle.UnpicklingError, match="filled twice"):
        torch._weights_only_unpickler.load(io.BytesIO(twice_filled()))


def test_those_who_name_numpys_own_types_safe_change_nothing(tmp_path):
    path = saved([numpy.arange(3), numpy.float32(2)], tmp_path / "arrays.pt")
    own = [RECONSTRUCT, SCALAR, numpy.ndarray, numpy.dtype, type(numpy.dtype("i8"))]
    with torch.serialization.safe_globals(own):
        array, number = torch.load(path)
        assert array.tolist() == [0, 1, 2] and number == 2
        with pytest.raises(pickle.UnpicklingError):
            torch.load(saved([FORGED["a buffer of addresses"]], path))


def test_arrays_of_numbers_are_what_they_were(tmp_path):
    arrays = [
        *(numpy.arange(6).astype(code).reshape(2, 3) for code in "?bhilqBHILQefd"),
        *(numpy.float32(0.1), numpy.int64(-3), numpy.bool_(True), numpy.array(2.5)),
        *(numpy.arange(6.0).astype(">f4"), numpy.asfortranarray(numpy.eye(3)[:2])),
    ]
    loaded = torch.load(saved(arrays, tmp_path / "arrays.pt"), weights_only=True)
    for again in (loaded, torch.load(saved(loaded, tmp_path / "again.pt"), weights_only=False)):
        for made, array in zip(again, arrays, strict=True):
            # numpy itself brings what it loads to the machine's order of bytes.
            assert made.dtype == array.dtype.newbyteorder("=") and made.shape == array.shape
            assert numpy.array_equal(made, array)
    assert type(again[0]) is numpy.ndarray
