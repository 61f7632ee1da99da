"""The authors' archive: a small one of its layout, taken as it is, and refused where a part is missing."""

import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import sentencepiece
from commands import contents, succeeded
from test_preparation import preprocess
from test_recipes import commands, recipe, refusal, server, write_text
from test_recipes_archives import configuration, step

from smoe_fairseq.recipes.data.subwords import encode, learn

assert server  # a fixture

TEXT = "m15_32k/data_bin/shard000"
MODEL = "m15_32k/vocab_bin/sentencepiece.source.32000.model"
TEST = "m15_32k/retrieved_data/test"
# As the archive names them: one pair in both orders, one the other way round, one that is not asked for.
ORDERS = ["eng-nso", "nso-eng", "msa-eng", "eng-isl"]
PAIRS = ["eng-nso", "eng-msa"]
SIZES = dict(zip(ORDERS, (90, 70, 80, 60), strict=True))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    """Text, a model and a dictionary of it, and its pieces."""
    folder = tmp_path_factory.mktemp("pieces")
    for order in ORDERS:
        write_text(folder / "text", order, train=SIZES[order], valid=9, test=7)
        for language in order.split("-"):
            file = folder / f"text/test.{order}.{language}"
            file.write_text("".join(f"{language} {line}" for line in open(file, newline="\n")))
    learn(folder / "text", folder, vocab_size=60, character_coverage=1.0)
    encode(folder / "spm.model", folder / "text", folder / "encoded")
    return folder


@pytest.fixture(scope="module")
def published(pieces, tmp_path_factory) -> Path:
    """What the archive holds; of eng-nso and eng-isl the tests are binarised too."""
    folder = tmp_path_factory.mktemp("published")
    for order in ORDERS:
        splits = ["train", "valid", *["test"] * (order in ("eng-nso", "eng-isl"))]
        preprocess(pieces / "encoded", pieces / "dict.txt", folder / TEXT, order, splits)
        for language in order.split("-"):
            target = folder / f"{TEST}.{order}.{language}"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(pieces / f"text/test.{order}.{language}", target)
    (folder / MODEL).parent.mkdir()
    shutil.copyfile(pieces / "spm.model", folder / MODEL)
    return folder


def zipped(folder: Path, above: str = "", **more: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in contents(folder).items():
            archive.writestr(above + name, file)
        for name, file in more.items():
            archive.writestr(name, file)
    return content.getvalue()


@pytest.fixture
def given(tmp_path, server) -> dict[str, str]:
    train = {"max-update": 2, "num-workers": 0, "arch": "smoe_transformer_tiny"}
    changes = {"pairs": PAIRS, "shards": 4, "train": train}
    configured = configuration(tmp_path / "configs", "m4", server, [{"file": "m15.zip"}], **changes)
    return configured | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.soak
def test_from_the_archive_to_scores(tmp_path, given, server, published, pieces):
    server.files["m15.zip"] = zipped(published, "some/folder/", **{"m15_32k/other": b"not ours"})
    result = succeeded(recipe(tmp_path, "prepare", "m4", **given))
    assert not list(tmp_path.glob("data/**/*.partial"))
    data, said = tmp_path / "data/m4", result.stdout
    binary = contents(data / "bin")
    dictionary = (pieces / "dict.txt").read_bytes()
    for language in ("eng", "nso", "msa"):
        assert binary.pop(f"dict.{language}.txt") == dictionary
    assert binary.pop("dict.txt") == dictionary
    digest = hashlib.sha256(dictionary).hexdigest()
    assert binary.pop("dict.sha256").count(digest.encode()) == 4
    assert binary.pop("spm.model") == (pieces / "spm.model").read_bytes()
    names = [name for name in binary if "test." in name and "test.eng-nso" not in name]
    made = {name: binary.pop(name) for name in names}
    expected = contents(published / TEXT)
    assert binary == {name: expected[name] for name in expected if name in binary}
    orders = {name.split(".")[1] for name in binary}
    assert orders == {"eng-nso", "nso-eng", "msa-eng"} and len(binary) == 4 * (2 * 3 + 1)
    # What was there as text only: as the archive's own steps would have binarised it.
    encode(pieces / "spm.model", data / "raw", tmp_path / "tests")
    preprocess(tmp_path / "tests", pieces / "dict.txt", tmp_path / "made", "eng-msa", ["test"])
    made_by_fairseq = contents(tmp_path / "made")
    assert len(made) == 4 and all(made_by_fairseq[name] == made[name] for name in made)
    assert "tests, binarised from text: 14 sentences" in said

    assert json.loads((data / "sizes.json").read_text()) == {"eng-nso": 90, "eng-msa": 80}
    assert sorted(contents(data / "raw")) == sorted(
        f"test.{pair}.{language}" for pair in PAIRS for language in pair.split("-")
    )
    original = (published / f"{TEST}.msa-eng.msa").read_text("utf-8").split("\n")
    taken = (data / "raw/test.eng-msa.msa").read_text("utf-8").split("\n")
    assert taken == [" ".join(line.split()) for line in original]

    planned = recipe(tmp_path, "train", "m4", "smoe-2-2", DRY_RUN="1", **given)
    assert commands(planned, "fairseq-train")[0][1] == "data/m4/bin"


def test_a_folder_of_text_beside_the_archive_is_text(tmp_path, given, published):
    shutil.copytree(published / "m15_32k", tmp_path / "given/m15_32k")
    text = tmp_path / "given/text"
    for pair in PAIRS:
        write_text(text, pair, train=50, valid=5, test=5)
    result = recipe(tmp_path, "prepare", "m4", DRY_RUN="1", RAW=str(text), **given)
    steps = [words[4] for words in commands(result, "python")]
    assert steps == ["gather", "learn", "encode", "binarise"]


def test_the_archive_s_subwords_cannot_be_changed(tmp_path, given):
    said = refusal(recipe(tmp_path, "prepare", "m4", "--vocab-size", "60", **given))
    assert "--vocab-size 60: " in said and "m15.zip" in said


def refused(tmp_path: Path, given: dict[str, str], source: Path) -> str:
    """What the step says, of which nothing may be left."""
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "data").mkdir()
    result = step(tmp_path, given, "adopt", "m4", source, "data/raw", "data/bin", check=False)
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    (tmp_path / "data").rmdir()  # which is empty
    assert sorted(tmp_path.rglob("*")) == before
    (said,) = [x for x in result.stdout.splitlines() if x.startswith("error: ")]
    return said


MISSING = {
    MODEL: f"has no {MODEL}",
    f"{TEXT}/dict.*.txt": f"has no {TEXT}/dict.eng.txt",
    f"{TEXT}/train.msa-eng.*": f"has no {TEXT}/train.eng-msa.eng.bin",
    f"{TEXT}/valid.msa-eng.*": f"has no {TEXT}/valid.eng-msa.eng.bin",
    f"{TEXT}/train.nso-eng.nso.idx": f"has no {TEXT}/train.nso-eng.nso.idx",
    f"{TEST}.msa-eng.msa": f"has no {TEST}.eng-msa.eng",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_part_that_is_missing_is_named(tmp_path, given, published, name):
    folder = shutil.copytree(published, tmp_path / "m15")
    for file in list(folder.glob(name)):
        file.unlink()
    source = tmp_path / "m15.zip"
    source.write_bytes(zipped(folder))
    said = refused(tmp_path, given, source)
    assert str(source) in said and MISSING[name] in said and "--raw folder" in said


def other_model() -> bytes:
    model, text = io.BytesIO(), (f"{n} zyx{n}wvu" for n in range(1000))
    options = {"vocab_size": 60, "minloglevel": 2}
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=text, model_writer=model, **options)
    return model.getvalue()


def other_order(content: bytes) -> bytes:
    first, second, rest = content.split(b"\n", 2)
    return b"\n".join((second, first, rest))


WRONG = {
    "dictionaries that differ": (
        f"{TEXT}/dict.nso.txt",
        other_order,
        "dict.eng.txt and dict.nso.txt",
    ),
    "an index that is cut off": (f"{TEXT}/valid.eng-nso.nso.idx", lambda c: c[:-5], "is cut off"),
    "no index at all": (f"{TEXT}/valid.eng-nso.nso.idx", lambda c: b"", "is cut off"),
    "no model": (MODEL, lambda c: b"text", f"{MODEL} is not a model of sentencepiece"),
    "a model of other text": (MODEL, lambda c: other_model(), f"{MODEL} does not fit"),
    "a test that is shorter": (
        f"{TEST}.eng-nso.nso",
        lambda c: c[: c.rindex(b"\n", 0, -1) + 1],
        "line n of both",
    ),
    "a test that is not text": (f"{TEST}.eng-nso.nso", lambda c: b"\xff" + c, "is not UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_part_that_is_wrong_is_named(tmp_path, given, published, case):
    name, change, told = WRONG[case]
    shutil.copytree(published, tmp_path / "m15")
    file = tmp_path / "m15" / name
    file.write_bytes(change(file.read_bytes()))
    assert told in refused(tmp_path, given, tmp_path / "m15")
