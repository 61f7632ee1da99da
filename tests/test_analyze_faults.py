"""``smoe analyze`` of what it cannot take, and without room for what it draws."""

import errno
import json
import os
import shutil

import pytest
from commands import run
from handmade import MULTILINGUAL, one_direction, read, train

from smoe_fairseq.cli import main


def test_numbers_stay_where_a_picture_fails(three_languages, gates_by_hand, tmp_path, monkeypatch):
    from smoe_fairseq.analysis import report

    def draw(*_):
        raise ValueError("no ink\nleft")

    monkeypatch.setattr(report, "draw", draw)
    folder = tmp_path / "out"
    given = one_direction(three_languages, gates_by_hand)
    with pytest.raises(SystemExit, match="has all numbers, but .* not be drawn: no ink left") as e:
        main([*given, "--output", str(folder)])
    assert str(e.value).startswith(f"error: {folder} ")
    assert read(folder / "blocks.csv") and read(folder / "tokens.csv")
    assert json.loads((folder / "run.json").read_text())["subset"] == "valid"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.soak
def test_without_room_for_a_picture_the_numbers_and_the_others_stay(
    three_languages, gates_by_hand, tmp_path, monkeypatch
):
    from matplotlib.figure import Figure

    savefig = Figure.savefig

    def full(figure, path, **options):
        savefig(figure, path, **options)
        if "load.svg" in str(path):
            no_room()

    monkeypatch.setattr(Figure, "savefig", full)
    given = one_direction(three_languages, gates_by_hand)
    with pytest.raises(SystemExit) as error:
        main([*given, "--output", str(tmp_path / "out")])
    reason = (
        "load.svg cannot be saved: No space left on device; files saved before are as they were"
    )
    assert str(error.value).endswith(f"the report could not be drawn: {reason}")
    assert read(tmp_path / "out/tokens.csv")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"by_direction.png", "by_depth.svg", "load.png"} <= names
    assert not any("load.svg" in name or name == "report.html" for name in names)


def test_without_room_for_the_numbers_there_is_no_folder(
    three_languages, gates_by_hand, tmp_path, monkeypatch
):
    from smoe_fairseq.analysis import results

    monkeypatch.setattr(results, "write", no_room)
    given = one_direction(three_languages, gates_by_hand)
    with pytest.raises(SystemExit) as error:
        main([*given, "--output", str(tmp_path / "out")])
    words = f"error: --output {tmp_path / 'out'} cannot be saved: No space left on device"
    assert str(error.value).startswith(words) and not list(tmp_path.iterdir())


def bad_inputs(tmp_path):
    return {
        "--lang-pairs aa-dd": "--lang-pairs aa-dd: the model knows bb-aa, cc-aa",
        "--gen-subset test": "--gen-subset test: ",
        f"--output {tmp_path}": f"--output {tmp_path} exists already",
        f"--log {tmp_path}/none": f"--log {tmp_path}/none is missing",
        f"--log {__file__}": f"--log {__file__} has no routing metrics",
    }


@pytest.mark.parametrize("number", range(5))
def test_bad_input_gets_one_sentence(three_languages, gates_by_hand, tmp_path, number):
    flags, sentence = list(bad_inputs(tmp_path).items())[number]
    given = [
        "analyze",
        str(three_languages),
        "--path",
        str(gates_by_hand),
        "--output",
        str(tmp_path / "new"),
    ]
    with pytest.raises(SystemExit) as error:
        main([*given, *flags.split(), "--cpu"])
    assert str(error.value).startswith(f"error: {sentence}") and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_whole_gets_one_sentence(three_languages, gates_by_hand, tmp_path):
    data = shutil.copytree(three_languages, tmp_path / "data")
    file = data / "valid.aa-bb.bb.bin"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(SystemExit, match=f"^error: {data}"):
        main([*one_direction(data, gates_by_hand), "--output", str(tmp_path / "new")])


def test_a_bad_checkpoint_gets_one_sentence(three_languages, tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    train(three_languages, folder, *MULTILINGUAL, "--moe-freq", 0)
    dense = folder / "checkpoint_last.pt"
    (tmp_path / "text.pt").write_text("no checkpoint")
    for path, words in (
        (dense, "is a dense model: expected one with MoE layers"),
        (tmp_path / "text.pt", "is cut off or not a checkpoint"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none.pt", "is missing"),
    ):
        process = run(
            *(
                "smoe",
                "analyze",
                three_languages,
                "--path",
                path,
                "--output",
                tmp_path / "new",
                "--cpu",
            ),
            check=False,
        )
        assert process.returncode == 1
        assert process.stdout.startswith(f"error: {path}") and words in process.stdout
        assert len(process.stdout.splitlines()) == 1
    assert not (tmp_path / "new").exists()
