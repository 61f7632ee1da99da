"""``smoe subwords``: what the recipes do, for users of fairseq's own commands."""

import gzip
import re

import pytest
import sentencepiece
from test_recipes import write_text

from smoe_fairseq.cli import main

NO_TEXT = {"latin-1": b"\xe9\n", "utf-16": "text".encode("utf-16") + b"\n", "mac": b"a\rb\r"}


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text", "en-fr", train=300, valid=20)


def test_learnt_and_applied(text, tmp_path, capsys):
    (text / "train.gz").write_bytes(gzip.compress((text / "train.en-fr.fr").read_bytes()))
    train = [str(text / name) for name in ("train.en-fr.en", "train.gz")]
    learnt, encoded = tmp_path / "subwords", tmp_path / "encoded"
    assert main(["subwords", "learn", *train, "--vocab-size", "60", "--output", str(learnt)]) == 0
    with pytest.raises(SystemExit, match=f"--output: {learnt}/spm.model"):
        main(["subwords", "learn", *train, "--vocab-size", "50", "--output", str(learnt)])
    # 28 or 29: versions of sentencepiece differ.
    said = re.search(rf"{learnt}/spm.model: (2\d) pieces from 2 files", capsys.readouterr().out)
    assert len((learnt / "dict.txt").read_text().splitlines()) == int(said[1]) - 3  # fairseq's own
    valid = text / "valid.en-fr.fr"
    words = ["subwords", "encode", str(learnt / "spm.model"), *train, str(valid)]
    assert main([*words, "--output", str(encoded)]) == 0
    model = sentencepiece.SentencePieceProcessor(model_file=str(learnt / "spm.model"))
    lines = (encoded / valid.name).read_text().splitlines()
    assert [model.decode(line.split()) for line in lines] == [
        " ".join(line.split()) for line in open(valid, newline="\n")
    ]
    assert {file.name for file in encoded.iterdir()} == {"train.en-fr.en", "train", valid.name}
    assert model.decode((encoded / "train").read_text().splitlines()[0].split())


def test_the_same_text_gives_the_same_file(text, tmp_path):
    train, files = str(text / "train.en-fr.en"), []
    for name in ("one", "two"):
        output = tmp_path / name
        main(["subwords", "learn", train, "--vocab-size", "25", "--output", str(output)])
        files.append((output / "spm.model").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learn", "absent", "--output", "o"], "absent is not a file: expected text"),
        (["encode", "spm.model", "a/x", "b/x", "--output", "o"], "two files are called x"),
        (["encode", "a/x", "b/y", "--output", "o"], "a/x is not a model of sentencepiece"),
        (["learn", "a/empty", "--output", "o"], "a/empty has no text"),
        *((["learn", f"a/{x}", "--output", "o"], f"a/{x}, line 1,") for x in ("latin-1", "utf-16")),
        (["learn", "a/mac", "--output", "o"], r"a/mac has \\r "),
        (
            ["learn", "a/x", "--normalization", "b/x", "--output", "o"],
            "--normalization b/x, line 1",
        ),
        (["learn", "a/x", "--vocab-size", "1", "--output", "o"], "a/x with --vocab-size 1 "),
        (
            ["learn", "a/x", "--vocab-size", "99", "--byte-fallback", "--output", "o"],
            "--vocab-size 99: ",
        ),
    ],
)
def test_refused(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("a/x", "b/x", "b/y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\n")
    (tmp_path / "a/empty").write_text("\n \n")
    for name, content in NO_TEXT.items():
        (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(SystemExit, match=said):
        main(["subwords", *words])
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "flag, value",
    [
        *(("--vocab-size", str(10**20)), ("--vocab-size", "0"), ("--character-coverage", "nan")),
        *(("--input-sentence-size", "-1"), ("--output", "")),
        *(("--user-defined-symbols", word) for word in ("", "a b", f"{'a' * 300} b")),
    ],
)
def test_a_value_that_cannot_be_is_named(capsys, flag, value):
    with pytest.raises(SystemExit, match="2"):
        main(["subwords", "learn", "text", "--output", "o", flag, value])
    assert f"argument {flag}: " in capsys.readouterr().err


def test_texts_behind_a_list_of_symbols_are_named(tmp_path, capsys):
    """argparse would take them as symbols, and say that the texts are missing."""
    text = tmp_path / "text"
    text.write_text("a text\n")
    with pytest.raises(SystemExit, match="2"):
        words = ("--user-defined-symbols", "<c>", str(text), "--output", "o")
        main(["subwords", "learn", *words])
    said = capsys.readouterr().err
    assert "argument --user-defined-symbols: " in said and str(text) in said
