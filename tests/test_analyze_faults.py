"""``smoe analyze`` of what it cannot take, and without room for what it draws."""

import json
import shutil

import pytest
from commands import no_room
from handmade import one_direction, read
from test_expert_parallel_checkpoints import refusal

from smoe_fairseq.analysis import inputs
from smoe_fairseq.cli import main


@pytest.fixture(scope="module")
def model(three_languages, gates_by_hand):
    return inputs.load(gates_by_hand, three_languages)


@pytest.fixture
def loaded(model, monkeypatch):
    """The model of ``gates_by_hand`` is not loaded again."""
    monkeypatch.setattr(inputs, "load", lambda *_: model)


@pytest.mark.usefixtures("loaded")
def test_numbers_stay_where_a_picture_fails(three_languages, gates_by_hand, tmp_path, monkeypatch):
    from smoe_fairseq.analysis import report

    def draw(*_):
        raise ValueError("no ink\nleft")

    monkeypatch.setattr(report, "draw", draw)
    folder = tmp_path / "out"
    given = one_direction(three_languages, gates_by_hand)
    said = refusal(*given, "--output", folder)
    assert said.startswith(f"error: {folder} ") and ": no ink left" in said
    assert read(folder / "blocks.csv") and read(folder / "tokens.csv")
    assert json.loads((folder / "run.json").read_text())["subset"] == "valid"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("loaded")
def test_without_room_for_the_numbers_there_is_no_folder(
    three_languages, gates_by_hand, tmp_path, monkeypatch
):
    from smoe_fairseq.analysis import results

    monkeypatch.setattr(results, "write", no_room)
    given = one_direction(three_languages, gates_by_hand)
    said = refusal(*given, "--output", tmp_path / "out")
    assert f"--output {tmp_path / 'out'} " in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        "--lang-pairs aa-dd",
        "--gen-subset test",
        "--output FOLDER",
        "--log none",
        "--max-tokens 1",
        f"--log {__file__}",
        "--lang-pairs aa-bb,bb-aa --sentence aa0",
        "--sentences 2 --sentence aa0",
    ],
)
@pytest.mark.usefixtures("loaded")
def test_bad_input_gets_one_sentence(three_languages, gates_by_hand, tmp_path, flags):
    flags = flags.replace("FOLDER", str(tmp_path))
    given = ("--path", gates_by_hand, "--output", tmp_path / "new", "--cpu")
    named = flags.partition(" --sentence ")[0]
    assert named in refusal("analyze", three_languages, *given, *flags.split())
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_whole_gets_one_sentence(three_languages, gates_by_hand, tmp_path):
    data = shutil.copytree(three_languages, tmp_path / "data")
    file = data / "valid.aa-bb.bb.bin"
    file.write_bytes(file.read_bytes()[:20])
    said = refusal(*one_direction(data, gates_by_hand), "--output", tmp_path / "new")
    assert said.startswith(f"error: {data}")


def test_a_model_of_subwords_that_is_none_is_named(three_languages, gates_by_hand, tmp_path):
    data = shutil.copytree(three_languages, tmp_path / "data")
    (data / "spm.model").write_bytes(b"no model")
    said = refusal(*one_direction(data, gates_by_hand), "--sentence", "aa0")
    assert str(data / "spm.model") in said


@pytest.mark.soak
def test_blanks_between_pairs_do_not_count(three_languages, gates_by_hand, tmp_path):
    given = [*one_direction(three_languages, gates_by_hand), "--output", str(tmp_path / "out")]
    main([*given, "--lang-pairs", "aar-bb, aa-cc, aa-bb", "--sentences", "2"])
    assert [*json.loads((tmp_path / "out/run.json").read_text())["sentences"]] == ["aa-bb", "aa-cc"]


def test_a_sentence_in_another_encoding_is_named(three_languages, gates_by_hand, capsys):
    with pytest.raises(SystemExit) as end:
        main([*one_direction(three_languages, gates_by_hand), "--sentence", "caf\udce9"])
    assert end.value.code == 2 and "--sentence" in capsys.readouterr().err


def test_a_bad_checkpoint_gets_one_sentence(dense, small_corpus, tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    for path in (dense, tmp_path / "text.pt", tmp_path, tmp_path / "none.pt"):
        given = ("--path", path, "--output", tmp_path / "new", "--cpu")
        assert f"{path} " in refusal("analyze", small_corpus, *given)
    assert not (tmp_path / "new").exists()


def test_data_of_other_languages_is_named(three_languages, gates_by_hand, tmp_path):
    other = shutil.copytree(three_languages, tmp_path / "other")
    (other / "dict.aa.txt").unlink()
    given = ("--path", gates_by_hand, "--output", tmp_path / "new", "--cpu")
    assert f"not {other}" in refusal("analyze", other, *given)
