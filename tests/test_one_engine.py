"""One search behind every way in: Python, ``smoe translate`` and fairseq-generate agree, options too."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import SCRIPTS, smoe
from test_translate import folder, translate  # noqa: F401  (a fixture)
from test_translator import evaluated

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models import SMoETransformerModel
from smoe_fairseq.translate.text import BatchTranslator, Options

GIVEN = {"beam": 4, "max_len_b": 10, "source_lang": "en", "target_lang": "fr"}
WORDS = ("--from", "en", "--to", "fr", "--beam", 4, "--max-len-b", 10)


@pytest.fixture
def model(folder):  # noqa: F811
    return SMoETransformerModel.from_pretrained(folder / "run")


@pytest.fixture(scope="module")
def text(prepared) -> list[str]:
    return evaluated(prepared, "en-fr")[0]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"nbest": 3, "lenpen": 0.6}, ("--nbest", 3, "--lenpen", 0.6)),
        ({"sampling": True, "sampling_topk": 5, "seed": 3, "nbest": 2}, ()),
        ({"int8": True, "nbest": 1}, ("--int8", "--nbest", 1)),
        ({"prefix": "1 2", "nbest": 2}, ("--prefix", "1 2", "--nbest", 2)),
    ],
)
def test_python_and_the_command(folder, model, text, options, words):  # noqa: F811
    words = words or ("--sampling", "--sampling-topk", 5, "--seed", 3, "--nbest", 2)
    rows, _ = translate(folder, "run", *WORDS, *words, text="\n".join(text))
    want = [line.split("\t") for line in rows.splitlines()]
    found = [
        (str(number), f"{hypothesis.score:.4f}", hypothesis.text)
        for number, each in enumerate(model.translations(text, **GIVEN, **options), 1)
        for hypothesis in each.hypotheses
    ]
    assert found == [tuple(row) for row in want]
    best = model.translate(text, **GIVEN, **{**options, "nbest": 1})
    assert best == [row[2] for row in want][:: options["nbest"]]


def test_weights_stay_as_they_are_and_int8_is_of_a_call(model, text, monkeypatch):
    from smoe_fairseq.translate import packed

    monkeypatch.setattr(packed, "MIN_WEIGHTS", 1)
    before = {name: x.clone() for name, x in model.models[0].state_dict().items()}
    plain = model.translate(text, **GIVEN)
    assert len(model.translate(text, int8=True, **GIVEN)) == len(plain)
    assert model.translate(text, **GIVEN) == plain
    after = model.models[0].state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert model.double().models[0].encoder.embed_tokens.weight.dtype == torch.float64
    assert not model.engines


@pytest.mark.parametrize("dtype", ["double", "half"])
def test_weights_of_other_types_are_not_packed(model, text, monkeypatch, dtype):
    from smoe_fairseq.translate import packed

    monkeypatch.setattr(packed, "MIN_WEIGHTS", 1)
    plain = model.translate(text[:3], **GIVEN)
    found = getattr(model, dtype)().translate(text[:3], **GIVEN)
    assert len(found) == 3 and (dtype != "double" or found == plain)


def test_fairseqs_own_options_use_fairseqs_search(model, text):
    direction = {"source_lang": "en", "target_lang": "fr"}
    groups = model.translate(text, beam=4, max_len_b=10, diverse_beam_groups=2, **direction)
    assert len(groups) == len(text)
    assert len(model.sample(text[:2], beam=2, max_len_b=5, **direction)) == 2
    with pytest.raises(UsageError, match="text 2"):
        model.translate([text[0], None], **GIVEN)
    with pytest.raises(UsageError, match="beams"):
        model.translate(text, beams=3, **direction)


def test_threads_that_ask_for_other_languages_do_not_meet(model, text):
    """The direction belongs to the call."""
    translator = BatchTranslator(model, max_tokens=60)
    options = Options(beam=2, max_len_b=10)
    want = {to: translator.translate_batch(text, "en", to, options) for to in ("fr", "de")}
    assert want["fr"] != want["de"]

    def ask(to: str) -> list:
        return [translator.translate_batch(text, "en", to, options) for _ in range(3)]

    with ThreadPoolExecutor() as threads:
        for to, found in zip(want, threads.map(ask, want), strict=True):
            assert all(each == want[to] for each in found)


def test_models_of_other_subwords_are_no_ensemble(folder, multilingual):  # noqa: F811
    command = ("translate", folder / "run", multilingual, "--to", "fr")
    result = smoe(*command, check=False)
    assert result.returncode == 1 and len(result.stdout.splitlines()) == 1


def test_a_prefix_begins_every_translation(folder, text):  # noqa: F811
    """Of a divided line, the first part's alone."""
    long = " ".join(f"{line}." for line in text)
    words = ("--prefix", "1 2", "--divide-above", 30, "--json")
    found, _ = translate(folder, "run", *WORDS, *words, text="\n".join([*text, long]))
    rows = [json.loads(line) for line in found.splitlines()]
    assert rows[-1]["parts"] > 1
    for row in rows:
        assert all(each["text"].startswith("1 2") for each in row["hypotheses"])
        assert all(len(each["scores"]) == len(each["tokens"]) for each in row["hypotheses"])
    words = ("--prefix", "1 2", "--max-len-a", 0, "--max-len-b", 1)
    _, said = translate(folder, "run", *WORDS, *words, text=text[0], check=False)
    assert "error: --prefix" in said and "--max-len-b" in said
    long = " ".join("1" * 2000)  # of more tokens than the model's limit
    words = ("--prefix", long, "--max-len-a", 1e308)
    _, said = translate(folder, "run", *WORDS, *words, text=text[0], check=False)
    assert "error: --prefix" in said and "1023 subwords" in said


def test_line_by_line_each_line_is_answered_before_the_next(folder, text):  # noqa: F811
    """A program that waits for the answer, as a pipe of its own; in UTF-8, whatever the terminal takes."""
    lines = [*text[:2], "1 \N{SNOWMAN}"]
    command = [SCRIPTS / "smoe", "translate", "run", *WORDS, "--line-by-line", "--json"]
    given = {"cwd": folder, "encoding": "utf-8", "env": os.environ | {"PYTHONIOENCODING": "ascii"}}
    given |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    found = []
    with subprocess.Popen(list(map(str, command)), **given) as process:
        for line in lines:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            found.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait() == 0
    assert [row["source"] for row in found] == lines
    at_once, _ = translate(folder, "run", *WORDS, text="\n".join(lines))
    assert [row["hypotheses"][0]["text"] for row in found] == at_once.splitlines()


def test_defaults_are_those_of_fairseqs_flags():
    from fairseq.dataclass.configs import GenerationConfig

    fairseqs = vars(GenerationConfig())
    ours = {name: value for name, value in vars(Options()).items() if name in fairseqs}
    assert len(ours) > 10 and ours == {name: fairseqs[name] for name in ours}
