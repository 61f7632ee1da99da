"""Files that can be read, and are not what a checkpoint of fairseq is: one sentence, in every command."""

import errno
import io
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import handmade
import pytest
import torch
from commands import changed, refused, run, sentence_of, smoe
from fairseq import checkpoint_utils
from sampling import soak
from test_refused_types import FORGED, REST, Settings
from test_training import train as train_smoe

from smoe_fairseq.checkpoints.reading import open_checkpoint, record_of
from smoe_fairseq.compat.safe_load import InaccessibleCheckpoint

WEIGHT = "encoder.layers.0.fc1.weight"


@pytest.fixture(scope="module")
def small(sparse, tmp_path_factory) -> Path:
    """The checkpoint of a run, of which it has one weight alone, and no state of the optimizer."""

    def strip(state):
        state.update(model={WEIGHT: state["model"][WEIGHT]})
        del state["last_optimizer_state"]

    return changed(sparse, tmp_path_factory.mktemp("small") / "small.pt", strip)


def of_kind(change):
    """Another kind of tensor in the place of one of the model's."""

    def of(state: dict) -> None:
        state["model"][WEIGHT] = change(state["model"][WEIGHT])

    return of


OTHER_KINDS = {
    "whole numbers": of_kind(lambda tensor: tensor.char()),
    "complex numbers": of_kind(lambda tensor: tensor.to(torch.complex64)),
    "a sparse tensor": of_kind(lambda tensor: tensor.to_sparse()),
    "text": of_kind(str),
    "a tensor on no device": of_kind(lambda tensor: tensor.to("meta")),
    "a number as a name": lambda state: state["model"].update({1: torch.zeros(1)}),
    "no options of the model": lambda state: state["cfg"].update(model=None),
    "no options of the task": lambda state: state["cfg"].update(task=None),
    "no history": lambda state: state.update(optimizer_history=[]),
    "no model": lambda state: state.pop("model"),
    "no parameters": lambda state: state.update(model=None),
    "a schedule of no kind": lambda state: state["optimizer_history"][-1].update(
        lr_scheduler_state=None
    ),
    "a number of updates of no kind": lambda state: state["optimizer_history"][-1].update(
        num_updates="x"
    ),
    "meters of no kind": lambda state: state["extra_state"].update(metrics=3),
    "a best score of no kind": lambda state: state["extra_state"].update(best="x"),
    "options of no kind": lambda state: state.update(cfg=[1]),
    "a batch of no kind": lambda state: state["extra_state"]["train_iterator"].update(
        iterations_in_epoch="x"
    ),
    "an epoch of no kind": lambda state: state["extra_state"]["train_iterator"].update(epoch=-4),
    "no options": lambda state: state.update(cfg=None, args=None),
}


def test_a_gate_may_save_truth_values(small, tmp_path):
    """A buffer of a plugin's gate, such as a mask."""
    mask = {"encoder.layers.1.moe.gates.0.allowed": torch.ones(4, dtype=torch.bool)}
    changed(small, file := tmp_path / "checkpoint.pt", lambda state: state["model"].update(mask))
    assert mask.keys() <= checkpoint_utils.load_checkpoint_to_cpu(str(file))["model"].keys()


def saved(content, **options):
    """Another content of the whole file."""
    return lambda file, _: torch.save(content, file, **options)


def written(content: bytes):
    return lambda file, _: file.write_bytes(content)


def with_(change):
    return lambda file, small: changed(small, file, change)


def compressed(file: Path, _) -> None:
    """Its 12 GB may be zeros, in a file of some megabytes."""
    content = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(1000)}}, content)
    with (
        zipfile.ZipFile(content) as plain,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for part in plain.namelist():
            small.writestr(part, plain.read(part))


def with_a_part_twice(file: Path, _) -> None:
    """Which of them is read would depend on the reader."""
    torch.save({"model": {}}, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(archive.namelist()[0], b"other")


OWN, SETTINGS = {"model": {}, "own": Settings()}, f"{Settings.__module__}.Settings (a type"
PICKLED = pickle.dumps(Settings(), protocol=2)
BAD = {name: (with_(change), "") for name, change in OTHER_KINDS.items()}
# numpy's own constructors would take addresses from the file, and crash where it says.
BAD |= {n: (with_(lambda s, n=n: s.update(own=FORGED[n])), "") for n in FORGED}
BAD |= {
    "a class": (saved(OWN), f"holds {SETTINGS}"),
    "a class, older": (saved(OWN, _use_new_zipfile_serialization=False), f"holds {SETTINGS}"),
    "a function": (saved({"model": {}, "own": print}), "holds print (a type or function)"),
    "a protocol that torch does not read": (saved(OWN, pickle_protocol=4), "more than data"),
    "a pickle of another": (written(PICKLED), f"holds {SETTINGS}"),
    "a name that would write to the terminal": (
        written(PICKLED.replace(b"Settings", b"\x1b[31mred")),
        "holds more than data",
    ),
    "no file": (lambda *_: None, ""),
    "text in it": (written(b"no checkpoint"), ""),
    "a pickle cut off": (written(b"\x80\x02junk"), ""),
    "an archive cut off": (written(b"PK\x03\x04junk"), ""),
    "a list": (saved([1, 2]), ""),
    "compressed parts": (compressed, "holds compressed parts"),
    "a part twice": (with_a_part_twice, "holds two parts of one name"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_one_sentence(small, tmp_path, fault):
    write, named = BAD[fault]
    write(file := tmp_path / "checkpoint.pt", small)
    for load in (open_checkpoint, checkpoint_utils.load_checkpoint_to_cpu):
        sentence = sentence_of(load, str(file))
        assert str(file) in sentence and named in sentence and sentence.isprintable()
        assert (SETTINGS in named) <= (REST in sentence)


# What the system and torch raise for want of memory or files, or from a failing disk.
SHORTAGES = [
    MemoryError(),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.EIO, "Input/output error"),
    RuntimeError("unable to mmap 9 bytes from file <x.pt>: Cannot allocate memory (12)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
    ),
]


@pytest.mark.parametrize(
    "place, error",
    [("zipfile.ZipFile", e) for e in SHORTAGES[:3]] + [("torch.load", e) for e in SHORTAGES],
)
def test_a_shortage_is_no_fault_of_the_file(small, tmp_path, monkeypatch, place, error):
    """It is named, without advice to remove it, and never taken for a useless one, which is removed."""
    file = shutil.copy(small, tmp_path / "checkpoint.pt")  # of no sums that are known

    def full(*_, **__):
        raise error

    monkeypatch.setattr(place, full)
    for load in (open_checkpoint, record_of, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(InaccessibleCheckpoint) as end:
            load(str(file))
        assert str(end.value).startswith(str(file)) and "remove" not in str(end.value)


def of_moments(change):
    """Other moments of Adam."""

    def of(state: dict) -> None:
        for values in state["last_optimizer_state"]["state"].values():
            values["exp_avg"] = change(values["exp_avg"])

    return of


def test_a_model_of_the_same_tensors_that_computes_otherwise(small_corpus, sparse, tmp_path):
    file = Path(shutil.copy(sparse, tmp_path / "checkpoint_last.pt"))
    free = ("--moe-second-expert-policy", "all", "--encoder-layerdrop", 0.1)  # of training alone
    others = ("--encoder-attention-heads", 2, "--moe-gate", "threshold", "--activation-fn", "gelu")
    result = train_smoe(small_corpus, tmp_path, *free, *others, "--max-update", 9, check=False)
    refused(result, file, *others[::2])
    assert not {"layerdrop", "policy"} & {*re.split(r"[\s-]", result.stdout.splitlines()[-1])}
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_other_language_tokens_than_those_of_the_training(three_languages, multilingual, tmp_path):
    last = shutil.copy(multilingual, tmp_path / "checkpoint_last.pt")
    more = (*handmade.MULTILINGUAL, "--decoder-langtok")
    words = handmade.training(three_languages, tmp_path, *more)
    refused(run(*words, "--max-update", 99, check=False), last, "no --decoder-langtok")
    words += ["--save-dir", tmp_path / "new", "--finetune-from-model", last, "--max-update", 1]
    assert f"{last}: its training had no --decoder-langtok" in run(*words).stdout


UNFIT = {
    "no groups of parameters": lambda state: state["last_optimizer_state"].update(param_groups=[]),
    "no optimizer state": lambda state: state.pop("last_optimizer_state"),
    "empty optimizer state": lambda state: state["last_optimizer_state"].update(state={}),
    "moments of another model": of_moments(lambda tensor: tensor.new_zeros(3)),
    "shared embeddings apart": lambda state: state["model"].update(
        {name: state["model"][name] + 1 for name in ["decoder.output_projection.weight"]}
    ),
    "betas out of range": lambda state: state["last_optimizer_state"]["param_groups"][0].update(
        betas=(2, 3)
    ),
    "moments not finite": of_moments(lambda tensor: tensor * float("nan")),
    "not finite": of_kind(lambda tensor: tensor * float("nan")),
}


OFTEN = ("no groups of parameters", "no optimizer state", "moments not finite", "not finite")


@pytest.mark.parametrize(
    "change", [UNFIT[fault] if fault in OFTEN else soak(UNFIT[fault]) for fault in UNFIT], ids=UNFIT
)
def test_training_does_not_go_on_from_what_it_cannot(small_corpus, sparse, tmp_path, change):
    file = changed(sparse, tmp_path / "checkpoint_last.pt", change)
    before = file.read_bytes()
    refused(train_smoe(small_corpus, tmp_path, "--max-update", 9, check=False), file)
    assert file.read_bytes() == before and len(list(tmp_path.glob("*.pt"))) == 1


@pytest.mark.parametrize(
    "position, other", [(10**9, {}), soak(1, {"sentences": 49}), soak(1, {"tokens": 9})]
)
def test_a_position_in_other_data_is_named(small_corpus, sparse, tmp_path, position, other):
    other = {"iterations_in_epoch": position, **other}
    file = changed(
        sparse,
        tmp_path / "checkpoint_last.pt",
        lambda state: state["extra_state"]["train_iterator"].update(other),
    )
    result = train_smoe(small_corpus, tmp_path, "--max-update", 9, check=False)
    refused(result, "--reset-dataloader")
    assert list(tmp_path.glob("*.pt")) == [file]


MISSING = {
    "extra_state is missing": lambda state: state.pop("extra_state"),
    "w1 is missing": lambda state: state["model"].pop("decoder.layers.1.moe.experts.w1"),
    "expected 8 experts": lambda state: state["model"].update(
        {"decoder.layers.1.moe.experts.w1": torch.zeros(3)}
    ),
}


@pytest.mark.parametrize("words", MISSING)
def test_a_part_that_cannot_be_divided_is_named(sparse, tmp_path, words):
    file = changed(sparse, tmp_path / "c.pt", MISSING[words])
    output = tmp_path / "new" / "c.pt"
    result = smoe("reshard", file, "--world-size", 2, "--output", output, check=False)
    refused(result, file, words)
    assert not output.parent.exists()
