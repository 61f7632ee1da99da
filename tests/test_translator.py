"""`SMoETransformerModel.from_pretrained(RUN).translate([...])` and what needs no flag with a checkpoint."""

import copy
import importlib.util
import math
import multiprocessing
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import (
    PLUGIN,
    changed,
    config_of,
    generation,
    hypotheses,
    preprocess,
    refused,
    run,
    sentence_of,
    smoe,
    train,
)
from programs import HANGS
from test_compat import run_without
from test_training import train as train_smoe

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models import SMoETransformerModel
from smoe_fairseq.translate import load
from smoe_fairseq.translate.load import TrainedModel
from smoe_fairseq.translate.readout import Hypothesis, Translation, joined
from smoe_fairseq.translate.sentences import divide, split_sentences
from smoe_fairseq.translate.text import BatchTranslator, Options
from smoe_fairseq.translate.threads import in_threads

SEARCH = {"beam": 2, "max_len_b": 10}  # as the recipe's evaluation was told


@pytest.fixture(scope="module")
def model(prepared):
    return SMoETransformerModel.from_pretrained(prepared / "runs/tiny/smoe-2-2")


def test_each_batch_has_one_thread(model, monkeypatch):
    """torch has as many as before when the last caller is done, in whatever order they end."""
    model.translate(["1"], **SEARCH, source_lang="en", target_lang="fr")  # packs the weights
    before, seen = torch.get_num_threads(), set()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda *_: seen.add(torch.get_num_threads())
    )
    torch.set_num_threads(2)
    try:
        for threads in (1, 3):
            monkeypatch.setattr(BatchTranslator, "threads", threads)
            texts = ["1 2 3 4 5 6 7 8 9"] * 100
            model.translate(texts, **SEARCH, source_lang="en", target_lang="fr")
        first, second = (in_threads(lambda _: None, range(2), 1) for _ in range(2))
        next(first), next(second)
        list(first)
        assert torch.get_num_threads() == 1
        list(second)
        assert seen == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        hook.remove()


def evaluated(prepared: Path, direction: str) -> tuple[list[str], list[str]]:
    """Raw text of the test set, and its translations by the recipe: fairseq-generate's."""
    source = direction.split("-")[0]
    text = (prepared / f"text/test.en-fr.{source}").read_text().split("\n")[:-1]
    done = prepared / f"runs/tiny/smoe-2-2/test/{direction}.txt"
    return text, done.read_text().splitlines()


@pytest.mark.parametrize("direction", ["en-fr", "fr-en"])
def test_raw_text_is_translated_as_by_the_recipe(prepared, model, direction):
    text, expected = evaluated(prepared, direction)
    source, target = direction.split("-")
    found = model.translate(text, source_lang=source, target_lang=target, **SEARCH)
    assert found == expected and all(found) and "\u2581" not in "".join(found)
    generated = (prepared / f"runs/tiny/smoe-2-2/test/{direction}/generate-test.txt").read_text()
    scores = {number: score for number, (score, _) in hypotheses(generated).items()}
    assert len(set(scores.values())) == len(text)  # so each depends on all of its text
    tokens = [model.encode(sentence) for sentence in text]
    results = model.generate(tokens, source_lang=source, target_lang=target, **SEARCH)
    for number, result in enumerate(results):
        assert result[0]["score"].item() / math.log(2) == pytest.approx(scores[number], abs=1e-4)
    assert model.translate(text[0], source_lang=source, target_lang=target, **SEARCH) == expected[0]
    assert model.translate([], source_lang=source, target_lang=target) == []


def test_the_default_device_does_not_matter(prepared):
    """As of a notebook with ``torch.set_default_device("cuda")``."""
    text, expected = evaluated(prepared, "en-fr")
    with torch.device("meta"):
        again = SMoETransformerModel.from_pretrained(prepared / "runs/tiny/smoe-2-2")
        found = again.translate(text[:3], source_lang="en", target_lang="fr", **SEARCH)
    assert found == expected[:3]


def test_from_another_folder_and_by_a_file(prepared, tmp_path, monkeypatch):
    """The training has had its data at a relative path, and it is told nothing of that."""
    monkeypatch.chdir(tmp_path)
    text, expected = evaluated(prepared, "en-fr")
    best = prepared / "runs/tiny/smoe-2-2/checkpoint_best.pt"
    saved = torch.load(best, weights_only=True)["cfg"]["task"]
    assert not os.path.isabs(saved["data"] if isinstance(saved, dict) else saved.data)
    given = {"source_lang": "en", "target_lang": "fr"}
    by_file = SMoETransformerModel.from_pretrained(str(best), **given, **SEARCH)
    assert by_file.translate(text) == expected
    assert not by_file.training  # no dropout


@pytest.mark.soak
def test_with_all_that_it_needs_in_one_folder(prepared, tmp_path, monkeypatch):
    """Or with subwords of other text, of none, or without any beside its dictionaries."""
    folder = tmp_path / "12:30"  # fairseq separates paths by colons
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_, data = prepared / "runs/tiny/smoe-2-2", prepared / "data/tiny/bin"
    for file in (run_ / "checkpoint_best.pt", data / "spm.model", *data.glob("dict.*.txt")):
        shutil.copy(file, folder)
    text, expected = evaluated(prepared, "en-fr")
    direction = {"source_lang": "en", "target_lang": "fr"}
    loaded = SMoETransformerModel.from_pretrained(str(folder), **direction)
    assert loaded.translate(text, **SEARCH) == expected

    (tmp_path / "other.txt").write_text("zyx wvu tsr qpo nml kji\n" * 20)
    other = (tmp_path / "other.txt", "--vocab-size", 30, "--output", tmp_path / "other")
    run("smoe", "subwords", "learn", *other)
    for content in ((tmp_path / "other/spm.model").read_bytes(), b"no model", None):
        (folder / "spm.model").unlink()
        if content is not None:
            (folder / "spm.model").write_bytes(content)
        with pytest.raises(UsageError, match=r"spm\.model"):
            SMoETransformerModel.from_pretrained(folder)
    elsewhere = SMoETransformerModel.from_pretrained(folder, data_name_or_path=data, **direction)
    assert elsewhere.translate(text, **SEARCH) == expected


def test_a_copy_has_its_own_weights(prepared):
    model = SMoETransformerModel.from_pretrained(prepared / "runs/tiny/smoe-2-2")
    given = {"source_lang": "en", "target_lang": "fr", "max_len_b": 9}
    before = model.translations(["a b"], **given)[0].hypotheses[0].score
    with pytest.raises(TypeError, match="from_pretrained"):
        pickle.dumps(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.models[0].decoder.layers[0].fc1.weight.add_(1)
    assert other.translations(["a b"], **given)[0].hypotheses[0].score != before
    assert model.translations(["a b"], **given)[0].hypotheses[0].score == before


def test_a_forked_process_translates_on_one_thread(model):
    """It would wait forever for its parent's other threads."""

    def translate():
        model.translate(["1 2"], source_lang="fr", **SEARCH)
        sys.exit(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    process = multiprocessing.get_context("fork").Process(target=translate)
    try:
        process.start()
        process.join(HANGS)
        assert process.exitcode == 1
    finally:
        process.kill()
        torch.set_num_threads(before)


def test_texts_that_are_no_list(model):
    direction = {"source_lang": "fr", "target_lang": "en"}
    for texts in ({"a": "1 2"}, {"1 2", "3"}, [7], None, ["\ud800"]):
        for options in ({}, {"verbose": True}):
            with pytest.raises((UsageError, TypeError)):
                model.translate(texts, **direction, **options)


def test_directions(model):
    for words, sentence in (
        ({}, "source_lang=None, target_lang=None: several directions are possible"),
        ({"source_lang": "en"}, "several directions"),
        ({"source_lang": "English"}, "several directions"),
        (
            {"source_lang": "en", "target_lang": "xx"},
            "target_lang='xx': xx is not one of the model's languages: expected de, en, fr",
        ),
        ({"target_lang": "xx"}, "xx is not"),
        ({"source_lang": "en", "target_lang": "en"}, "no such direction"),
    ):
        assert sentence in sentence_of(model.translate, ["1 2 is a number"], **words)
    assert model.translate(["1 2"], source_lang="fr", **SEARCH)  # to English alone
    one, other = (  # never seen
        model.translate(["1 2"], source_lang=source, target_lang=target, **SEARCH)
        for source, target in (("fr", "de"), ("fra_Latn", "German"))
    )
    assert one == other != [""]


def test_another_direction_than_that_of_a_bilingual_model(two_updates):
    for given in (
        {"source_lang": "en"},
        {"source_lang": "tgt"},
        {"source_lang": "tgt", "target_lang": "src"},
    ):
        with pytest.raises(UsageError, match=f"'{given['source_lang']}'.* expected src-tgt"):
            SMoETransformerModel.from_pretrained(two_updates, **given)
    assert SMoETransformerModel.from_pretrained(two_updates, source_lang="src")


def test_codes_of_languages_may_have_hyphens(two_updates, hyphens):
    direction = {"source_lang": "English", "target_lang": "zh_CN"}
    expected = SMoETransformerModel.from_pretrained(two_updates).translate(["ax by"], **SEARCH)
    model = SMoETransformerModel.from_pretrained(hyphens, **direction)
    for name in (None, "zh-CN", "Chinese"):
        assert model.translate(["ax by"], target_lang=name, **SEARCH) == expected
    with pytest.raises(UsageError, match="no such direction; expected one of en-zh-CN"):
        model.translate(["ax by"], target_lang="CN")


def test_the_text_of_fairseqs_search_is_that_of_ours(multilingual, three_languages):
    """Without the token of the language, and empty for a blank sentence."""
    given = {"source_lang": "bb", "target_lang": "aa", "langtoks": {"main": ("tgt", "tgt")}}
    model = SMoETransformerModel.from_pretrained(
        multilingual, data_name_or_path=three_languages, **given
    )
    texts, search = ["bb1 bb2", " ", "bb3"], {"beam": 4, "max_len_b": 5, "min_len": 3}
    expected = model.translate(texts, **search)
    assert model.translate(texts, verbose=True, **search) == expected
    assert expected[0] and not expected[1] and "__aa__" not in expected[0]
    assert model.translate([" "], diverse_beam_groups=2, **search) == [""]
    with pytest.raises(UsageError, match="encoder_langtok"):  # of which fairseq has made langtoks
        SMoETransformerModel.from_pretrained(multilingual, encoder_langtok="src")


def test_a_language_of_no_direction_in_training(multilingual, three_languages, tmp_path):
    """It has the dictionary of the side, even with ``--decoder-langtok``."""

    few = lambda state: config_of(state, "task").update(lang_pairs=["aa-bb"])  # noqa: E731
    given = {"data_name_or_path": three_languages, "langtoks": {"main": ("tgt", "tgt")}}
    one, other = (
        SMoETransformerModel.from_pretrained(path, **given).translate(
            "aa1 aa2", source_lang="aa", target_lang="cc", beam=1, max_len_b=5
        )
        for path in (changed(multilingual, tmp_path / "few.pt", few), multilingual)
    )
    assert one == other


def test_what_a_program_gives_is_looked_at(model, prepared):
    texts = ["1 2", "3 4"]
    expected = model.translate(texts, source_lang="fr", **SEARCH)
    assert model.translate(iter(texts), source_lang="fr", **SEARCH) == expected
    for given, named in (
        ({"beam": "5"}, "beam"),
        ({"beam": 2.0}, "beam"),
        ({"lenpen": None}, "lenpen"),
        ({"prefix": ["1"]}, "prefix"),
        ({"prefix": "\u4e2d"}, "--prefix '\u4e2d'"),
        ({"prefix": "1 "}, "--prefix '1 '"),
        ({"temperature": 0}, "--temperature 0"),
        ({"nbest": 9}, "--nbest 9"),
        ({"prefix": "1", "diverse_beam_groups": 2}, "prefix"),
        ({"sampling_topk": 5}, "--sampling-topk 5"),
        ({"sentences": ["a \ud800 b"]}, r"\\ud800"),
        ({"sentences": [None]}, "None"),
        ({"beam": 0, "verbose": True}, "--beam 0"),
        ({"sentences": [None], "verbose": True}, "None"),
        ({"target_lang": ["en"]}, "'en'"),
        ({"constraints": "ordered"}, "constraints"),
        ({"lm_path": "nowhere.pt", "lm_weight": 3.0}, "lm_"),
        ({"prefix_size": 2}, "prefix_size"),
    ):
        with pytest.raises(UsageError, match=named):
            model.translate(**{"sentences": texts, "source_lang": "fr"} | given)
    assert len(model.translations("1 2", source_lang="fr", **SEARCH)) == 1
    with pytest.raises(UsageError, match="diverse_beam_groups"):
        model.translations(texts, source_lang="fr", diverse_beam_groups=2)
    assert model.translate("1 2", beam=np.int64(2), source_lang="fr", lenpen=np.float64(1.0))
    with pytest.raises(UsageError, match="empty"):
        SMoETransformerModel.from_pretrained([])
    run, only_fairseqs = prepared / "runs/tiny/smoe-2-2", {"match_source_len": True, **SEARCH}
    other = SMoETransformerModel.from_pretrained(run, **only_fairseqs)
    expected = model.translate(texts, source_lang="fr", **only_fairseqs)
    assert other.translate(texts, source_lang="fr") == expected
    with pytest.raises(UsageError, match="match_source_len"):
        other.translations(texts, source_lang="fr")
    with pytest.raises(UsageError, match="lm_path"):
        SMoETransformerModel.from_pretrained(run, lm_path="nowhere.pt")


def test_a_sentence_that_is_too_long_is_divided_or_named(model):
    assert model.translate(["1 2 3. " * 600], source_lang="fr", beam=1, max_len_b=2)
    with pytest.raises(UsageError, match="1024"):
        model.encode("1 2 3 " * 1000)


@pytest.mark.parametrize(
    "sentences, between",
    [
        (["今天天气很好。", "我们去公园散步。", "孩子们在玩。"] * 2, ""),
        (["One two three.", "Four five six!", "Seven?"], " "),
    ],
)
def test_a_long_text_is_divided_at_the_ends_of_sentences(sentences, between):
    """And nothing is put between those that stay together."""
    text = between.join(sentences)
    parts = divide(text, lambda part: len(part) <= 25)
    assert between.join(parts) == text and 1 < len(parts) <= len(sentences)
    assert all(part[-1] in "。.!?" for part in parts)


@pytest.mark.parametrize(
    "divided",  # | is where one ends, or a blank, which stays one
    [
        "He said “Go.”| |He left (at 3.30 p.m. on May 3.)| |Why?!| |No. 5 and Dr. No of the U.S. Army came.",
        'The "end."| |Is it?| |no!| |“Stop!” he said, etc. and so on.| |It was 42.| |It is 43...| |So what',
        "Am 3. Mai kam er, z. B. um 2 Uhr.| |»Ja.«| |« Non ! »| |„Geh.“| |Er ging.",
        "all is lower case.| |and stays so.|\n\n---\n  |a new line|\r\n|another",
        "他说：“走。”|然后（真的！）|他走了｡|好？！",
        "ลูกชายไปตลาดเมื่อวานนี้| |ชาวนาสี่คนอยากวาดหมู 3 ตัว สีดำ๚ะ๛| |จบ",
        "ក្មេងប្រុសទៅផ្សារ។| |កសិករបួននាក់៕| |ល",
        "ကောင်လေး၊ ဈေးသွားတယ်။|လယ်သမား။",
        "བུ་ཁྲོམ་ལ་འགྲོ། །|ཞིང་པ་བཞི།| |༄༅། །ཁ",
        "लड़का बाजार जाता है।| |चार किसान॥",
        "ልጁ ወደ ገበያ ሄደ።| |አራት ገበሬዎች፧|ነው",
        "ذهب الولد؟| |نعم.| |لا۔| |هذا",
        "Տղան գնում է։| |Չորս",
        "כאן.\u200f| |דג.\u200f| |\u202bכאן.\u202c| |\u2067דג.\u2069| |Here.\u200e| |There",
        "お茶を見る?|猫は魚を食べる!|Yahoo!ニュース",
        "!!!",
    ],
)
def test_ends_of_sentences(divided):
    parts = [part for part in divided.split("|") if part.strip("\r\n -")]
    assert split_sentences(divided.replace("|", ""))[0] == parts


@pytest.mark.parametrize("text", ["क्षेत्रक्षेत्र", "རྒྱལརྒྱལ", "👨‍👩‍👧‍👦👨‍👩‍👧‍👦", "a" + "\u0301" * 70])
def test_a_cut_is_between_letters_that_are_read_as_one(text):
    parts = divide(text, lambda part: len(part) <= 1)
    assert "".join(parts) == text and 1 < len(parts) <= 4
    assert all(len(part) <= 32 and (len(text) > 70 or part[0] in "कषतरརལ👨") for part in parts)


@pytest.mark.parametrize(
    "texts, gaps, expected",
    [
        (("今天很好。", "我们去，", "散步。”", "好"), " \n ", "今天很好。我们去，\n散步。”好"),
        (("Ein Hund.", "Zwei"), ("  ",), "Ein Hund.  Zwei"),
        (("Ein Hund.", "Zwei"), ("",), "Ein Hund. Zwei"),
        (("", "a"), " ", " a"),
    ],
)
def test_parts_are_joined_as_their_script_joins_sentences(texts, gaps, expected):
    parts = [Translation("", [Hypothesis(text, -1.0, ["x"], [-1.0])], []) for text in texts]
    (found,) = joined("", parts, ["\t", *gaps, "\n"], 1, 0.5).hypotheses
    assert found.text == f"\t{expected}\n"
    assert found.score == pytest.approx(-(len(texts) ** 0.5))


def test_each_sentence_of_a_text_by_itself(model):
    direction = {"source_lang": "en", "target_lang": "fr", **SEARCH}
    sentences = ["1 2 is a number .", "3 4 .", "5 ?"]
    alone = model.translations(sentences, **direction)
    text = "\n {}  {}\n\n{}\n"
    texts = [text.format(*sentences), " ", sentences[0]]
    whole, blank, one = model.translations(texts, by_sentence=True, **direction)
    translated = [each.hypotheses[0].text for each in alone]
    assert whole.hypotheses[0].text == text.format(*translated) and whole.parts == 3
    assert (blank.hypotheses[0].text, one.hypotheses[0].text) == ("", translated[0])
    # A sentence that is too long is divided, too.
    long, _ = model.translations(
        ["3 4 is, 5 6 is. 7", ""], by_sentence=True, divide_above=5, **direction
    )
    assert long.parts > 2


def test_a_limit_goes_before_a_minimum_and_a_prefix_before_repetitions(model):
    """Else no token is left to choose."""
    direction = {"source_lang": "en", "target_lang": "fr"}
    texts, short = ["1", "1 2 3 4 5 6"], {"min_len": 6, "max_len_a": 1, "max_len_b": 0}
    translated = model.translations(texts, **short, **direction)
    lengths = [len(each.hypotheses[0].tokens) for each in translated]
    assert lengths[0] < 6 <= lengths[1]
    with pytest.raises(UsageError, match="--min-len 5000"):
        model.translations(texts, min_len=5000, max_len_b=6000, **direction)
    once = {"prefix": "1 1", "no_repeat_ngram_size": 1}
    (repeated,) = model.translations(["1 2 3"], **once, **direction)
    assert repeated.hypotheses[0].text.startswith("1 1")


def test_subwords_of_subword_nmt(small_corpus, tmp_path, monkeypatch):
    """Words that begin with c or d are cut; the codes merge the letters of the others."""
    pytest.importorskip("subword_nmt")
    raw, data, run_ = (tmp_path / name for name in ("raw", "data", "run"))
    raw.mkdir()
    words = [f"{a}{b}" for a in "abcd" for b in "xyz"]
    line = " ".join(words) + "\n"
    for split in ("train", "valid", "test"):
        cut = re.sub(r"\b([cd])", r"\1@@ ", line)
        (raw / f"{split}.src").write_text(cut)
        (raw / f"{split}.tgt").write_text(cut.upper())
    preprocess(raw, data, "--joined-dictionary")
    train_smoe(data, run_, "--max-update", 1)

    def load():
        return SMoETransformerModel.from_pretrained(run_)

    with pytest.raises(UsageError, match="bpecodes"):
        load()
    merges = "".join(f"{a} {b}</w>\n" for each in words[:6] for a, b in (each, each.upper()))
    for content in ("a b c\n", "q q\n"):  # none, and of other words
        (data / "bpecodes").write_text(f"#version: 0.2\n{content}")
        with pytest.raises(UsageError, match="bpecodes"):
            load()
    (data / "bpecodes").write_text(f"#version: 0.2\n{merges}")
    (found,) = load().translations(["ax cy"], prefix="BY DZ", max_len_b=10)
    assert found.tokens == ["ax", "c@@", "y", "</s>"]
    (best,) = found.hypotheses
    assert best.tokens[:3] == ["BY", "D@@", "Z"] and best.text.startswith("BY DZ")
    export = ("smoe", "export", run_, "--to", "huggingface", "--output", tmp_path / "model")
    if importlib.util.find_spec("transformers"):
        refused(run(*export, check=False), str(data))
    monkeypatch.setitem(sys.modules, "subword_nmt.apply_bpe", None)
    with pytest.raises(UsageError, match="pip install subword-nmt"):
        load()


def test_one_direction_needs_no_other_word(two_updates, small_corpus):
    """Text of words, since there is no sentencepiece model beside the dictionary."""
    model = SMoETransformerModel.from_pretrained(two_updates)
    arguments = generation(small_corpus, two_updates / "checkpoint_best.pt")
    output = run("fairseq-generate", *arguments, "--user-dir", PLUGIN).stdout
    assert not re.search(r"warn.*mask|mask.*deprecat", output, re.IGNORECASE)
    lines = {
        kind: dict(re.findall(rf"^{kind}-(\d+)\t(?:\S+\t)?(.*)$", output, re.M)) for kind in "ST"
    }
    expected = dict(re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, re.M))
    numbers = sorted(expected, key=int)
    found = model.translate([lines["S"][n] for n in numbers], beam=3, max_len_b=12)
    assert found == [expected[n] for n in numbers] and len(numbers) == 50
    with pytest.raises(UsageError, match="no such direction; expected one of src-tgt"):
        model.translate(["ax"], target_lang="src")


def test_first_tokens_where_a_batch_begins_with_a_part_without_them(two_updates):
    """The second part of a line, which is the longer one."""
    model = SMoETransformerModel.from_pretrained(two_updates)
    options = Options(beam=2, max_len_b=6, divide_above=3, prefix="BY")
    (found,) = BatchTranslator(model).translate_batch(["ax. by cz dx"], options=options)
    assert found.parts == 2 and found.hypotheses[0].tokens[0] == "BY"


def test_runs_that_cannot_be_used(prepared, two_updates, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    best = prepared / "runs/tiny/smoe-2-2/checkpoint_best.pt"
    for name in ("empty", "set", "best-set", "cut", "folder", "link", "alone", "taskless"):
        (tmp_path / name).mkdir()
    for name in ("set/checkpoint_last-rank-0.pt", "best-set/checkpoint_best-rank-0.pt"):
        (tmp_path / name).touch()
    for name in ("best-set/checkpoint_last", "folder/checkpoint_last", "link/checkpoint_last"):
        shutil.copy(best, tmp_path / f"{name}.pt")
    shutil.copy(best, tmp_path / "alone")
    (tmp_path / "cut/checkpoint_last.pt").write_bytes(best.read_bytes()[:5000])
    (tmp_path / "folder/checkpoint_best.pt").mkdir()
    (tmp_path / "link/checkpoint_best.pt").symlink_to("nowhere")
    file = tmp_path / "taskless/checkpoint_best.pt"
    changed(best, file, lambda state: state["cfg"].pop("task"))
    for run_, words, sentence in (
        ("none", {}, "none is missing: expected the folder of a run"),
        ("empty", {}, "empty has no checkpoint_best.pt or checkpoint_last.pt"),
        ("empty", {"checkpoint_file": "x.pt"}, "empty has no x.pt"),
        ("set", {}, "set/checkpoint_last.pt is a set of --expert-parallel"),
        ("best-set", {}, "best-set/checkpoint_best.pt is a set of --expert-parallel"),
        ("cut", {}, "checkpoint_last.pt is cut off or not a checkpoint"),
        ("folder", {}, "folder/checkpoint_best.pt"),
        ("link", {}, "link/checkpoint_best.pt"),
        ("alone", {}, "data/tiny/bin, with the dictionaries that alone/checkpoint_best.pt was"),
        ("alone", {"data_name_or_path": "empty"}, "empty has no dictionaries"),
        ("taskless", {}, "checkpoint_best.pt: cfg.task is missing"),
        (str(two_updates), {"beams": 3}, "beams: unknown setting"),
        (str(prepared / "runs/tiny/smoe-2-2"), {"bpe": "subword_nmt"}, "bpe"),
    ):
        assert sentence in sentence_of(SMoETransformerModel.from_pretrained, run_, **words)


def test_dictionaries_of_the_languages_come_before_one_for_all(tmp_path):
    """That may be a copy for another program."""
    for name in ("run/dict.txt", "data/dict.en.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for saved, folder in {"data": "data", "": "run", "nowhere": "run"}.items():
        task = {"data": saved}
        assert load.data_of(tmp_path / "run/x.pt", task) == str(tmp_path / folder)
        task["fixed_dictionary"] = "data/dict.txt"
        assert load.data_of(tmp_path / "run/x.pt", task) == str(tmp_path / "run")


# fairseq's commands


def validation(data, path, *more):
    words = ("fairseq-validate", data, "--path", path, "--max-tokens", 300, "--cpu")
    return (*words, "--num-workers", 0, *more)


def losses(process) -> list[str]:
    return re.findall(r"valid on 'valid' subset \| loss (\S+)", process.stdout)


@pytest.mark.soak
def test_validation_takes_the_task_of_the_checkpoint(two_updates, small_corpus):
    command = validation(small_corpus, two_updates / "checkpoint_best.pt", "--user-dir", PLUGIN)
    with_task = losses(run(*command, "--task", "translation"))
    assert losses(run(*command)) == with_task and len(with_task) == 1
    failed = run_without("use_task_of_checkpoint", *map(str, command))
    assert failed.returncode == 1 and "KeyError: None" in failed.stdout


@pytest.mark.soak
def test_validation_of_several_directions(multilingual, three_languages):
    """Whose task has flags of its own."""
    more = ("--user-dir", PLUGIN, "--num-workers", 0)
    (loss,) = losses(run(*validation(three_languages, multilingual, *more)))
    assert float(loss) > 0


@pytest.mark.parametrize("age", ["cfg", "args"])
def test_validation_of_a_stock_model(corpus, pre_norm, tmp_path, age):
    from test_malicious_checkpoints import older, saved

    path = pre_norm
    if age == "args":
        path = saved(older(torch.load(pre_norm), user_dir=None), tmp_path / "older.pt")
    assert losses(run(*validation(corpus, path)))


def test_validation_says_what_is_missing(corpus, pre_norm, tmp_path):
    foreign = lambda state: config_of(state, "task").update(_name="other")  # noqa: E731
    changed(pre_norm, tmp_path / "foreign.pt", foreign)
    for path, words in (
        ("none.pt", "none.pt is missing"),
        ("foreign.pt", "--task other"),
    ):
        refused(run(*validation(corpus, tmp_path / path), check=False), words)
    refused(run("fairseq-validate", corpus, check=False), "--path")
    last = refused(run(*validation(corpus, pre_norm)[:4], "--cpu", check=False), "--max-tokens")
    assert "line" not in last
    assert "--task" in run("fairseq-validate", "--help").stdout


def test_without_its_plugin_every_command_says_so(sparse, small_corpus):
    generate = ("fairseq-generate", *generation(small_corpus, sparse))
    for command in (generate, validation(small_corpus, sparse)):
        refused(run(*command, check=False), "--user-dir", "smoe_transformer")


@pytest.mark.parametrize("kind, flag", [("model", "--arch"), ("task", "--task")])
def test_our_commands_name_what_is_of_another_plugin(prepared, tmp_path, kind, flag):
    def change(state):
        config_of(state, kind).update(_name="mine", arch="mine", task="mine")

    best, path = prepared / "runs/tiny/smoe-2-2/checkpoint_best.pt", tmp_path / "other.pt"
    changed(best, path, change)
    data = ("--data", prepared / "data/tiny/bin", "--from", "en", "--to", "fr")
    refused(smoe("translate", path, *data, check=False), path, f"{flag} mine")


def test_unknown_words_are_replaced_without_a_file_too():
    """fairseq takes the value of a bare ``--replace-unk`` for one."""
    from fairseq.utils import load_align_dict

    assert load_align_dict("@@ ") == {}


@pytest.mark.soak
def test_a_link_to_the_package_is_the_package(tmp_path):
    (tmp_path / "link").symlink_to(PLUGIN)
    run("fairseq-train", "--user-dir", tmp_path / "link", "--help", fresh=True)


def test_training_on_from_another_model_has_fairseqs_sentence(post_norm, corpus, tmp_path):
    """Of the same plugin, or none, the flags are what differs."""
    more = ("--restore-file", post_norm, "--encoder-layers", 1)
    result = train(corpus, tmp_path / "new", *more, check=False)
    assert result.returncode == 1
    words = f"error: Cannot load model parameters from checkpoint {post_norm}; please ensure that"
    assert words in result.stdout


@pytest.mark.soak
def test_convolutions_of_fairseq_take_any_beam(corpus, tmp_path):
    """fairseq fixes the beam as it loads the model; here each call chooses it."""
    words = """--arch fconv --encoder-embed-dim 16 --decoder-embed-dim 16 --decoder-out-embed-dim 16
        --optimizer nag --lr 0.1 --clip-norm 0.1 --max-tokens 400 --max-epoch 3 --cpu""".split()
    words += ["--encoder-layers", "[(16, 3)]", "--decoder-layers", "[(16, 3)]"]
    run("fairseq-train", corpus, *words, "--save-dir", tmp_path)
    path = tmp_path / "checkpoint_best.pt"
    model = TrainedModel.of_run(path, data=str(corpus))
    model.task.load_dataset("test")
    sources = [*model.task.dataset("test").src]
    for beam in (1, 3):
        said = run("fairseq-generate", *generation(corpus, path), "--beam", beam).stdout
        found = model.generate(sources, beam=beam, max_len_b=12)
        words = [model.tgt_dict.string(best["tokens"]) for best, *_ in found]
        assert words == [hypotheses(said)[number][1] for number in range(len(sources))]
