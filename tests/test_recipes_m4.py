"""m4 on real sentences: a folder of parallel text, from there to a filled table; all eight directions."""

import json
from itertools import islice

import pytest
from test_recipes import ROOT, recipe, table

NTREX = ROOT.parent / "shared/data/ntrex-m4"
LANGUAGES = ("eng", "nso", "msa", "tgl", "cat")
LINES = 400  # Of 1,997: the first; 100 of them are for training.
DIRECTIONS = [
    "nso-eng",
    "msa-eng",
    "tgl-eng",
    "cat-eng",
    "eng-nso",
    "eng-msa",
    "eng-tgl",
    "eng-cat",
]


@pytest.mark.soak
@pytest.mark.skipif(not NTREX.is_dir(), reason=f"{NTREX} (NTREX in the M4 languages) is not there")
def test_m4_from_text_to_table(tmp_path):
    text = {}
    (tmp_path / "text").mkdir()
    for language in LANGUAGES:
        with open(NTREX / f"{language}.txt", encoding="utf-8", newline="\n") as lines:
            text[language] = list(islice(lines, LINES))
        (tmp_path / f"text/{language}.txt").write_text("".join(text[language]), "utf-8")
    given = {"GPUS": "0", "OMP_NUM_THREADS": "1", "WORKERS": "1"}

    def run(script: str, *words: str, **environment: str):
        result = recipe(tmp_path, script, *words, **given, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    run("prepare", "m4", "--vocab-size", "2000", RAW=str(tmp_path / "text"))
    raw = tmp_path / "data/m4/raw"
    assert len(list(raw.glob("[!.]*"))) == 24
    for split, lines in (
        ("train", slice(0, 100)),
        ("valid", slice(100, 200)),
        ("test", slice(200, 400)),
    ):
        expected = [" ".join(line.split()) for line in text["tgl"][lines]]
        assert (raw / f"{split}.eng-tgl.tgl").read_text("utf-8").splitlines() == expected

    flags = {"arch": "smoe_transformer_tiny", "max-update": 12, "max-tokens": 1500, "lr": 0.005}
    flags |= {
        "update-freq": 1,
        "warmup-updates": 6,
        "num-workers": 0,
        "validate-interval-updates": 0,
    }
    run("train", "m4", "smoe-4-4", *(str(x) for k, v in flags.items() for x in (f"--{k}", v)))
    log = (tmp_path / "runs/m4/smoe-4-4/train.log").read_text("utf-8")
    assert "num_updates 12" in log and "requested_capacity" in log

    # So few updates teach no words: the reference's first pieces are given.
    flags = ["--beam", "1", "--prefix-size", "8", "--max-len-a", "0", "--max-len-b", "12"]
    run("evaluate", "m4", "smoe-4-4", *flags)
    scores = json.loads((tmp_path / "runs/m4/smoe-4-4/scores.json").read_text())["scores"]
    assert list(scores) == DIRECTIONS
    assert {score["sentences"] for score in scores.values()} == {200}
    test = tmp_path / "runs/m4/smoe-4-4/test"
    for direction in DIRECTIONS:
        reference = text[direction.split("-")[1]][200:]
        translated = (test / f"{direction}.txt").read_text("utf-8").splitlines()
        starts = [a[:3] == b[:3] for a, b in zip(reference, translated, strict=True)]
        assert sum(starts) > 150, direction  # In order, without a language's token.
        assert 0 < scores[direction]["bleu"] < 100

    lines = [line for line in table(tmp_path, "m4").splitlines() if line.startswith("|")]
    header, row = ([cell.strip() for cell in line.split("|")] for line in (lines[0], lines[2]))
    cells = dict(zip(header, row, strict=True))
    assert cells["method"] == "smoe-4-4"
    assert {direction: cells[direction] for direction in DIRECTIONS} == {
        direction: f"{score['bleu']:.2f}" for direction, score in scores.items()
    }
