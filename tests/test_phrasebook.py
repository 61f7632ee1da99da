"""The built-in corpus: its files, its splits, and the grammar of its five languages."""

import os
import subprocess
import sys

import pytest

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.phrasebook import (
    catalan,
    english,
    malay,
    sotho,
    tagalog,
    write_corpus,
)
from smoe_fairseq.recipes.phrasebook.lexicon import ADJECTIVES, NOUNS, PLACES, TIMES, VERBS
from smoe_fairseq.recipes.phrasebook.meaning import Clause, Pair, Person, Thing

OTHERS = ("nso", "msa", "tgl", "cat")
SIZES = {"train": 800, "valid": 60, "test": 70}
RENDERERS = {
    "eng": english.render,
    "nso": sotho.render,
    "msa": malay.render,
    "tgl": tagalog.render,
    "cat": catalan.render,
}

ME, YOU, WE, THEY, MARIA, PAU = map(Person, ("I", "you", "we", "they", "Maria", "Pau"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_corpus(folder, **SIZES)


def lines(folder, split, other, language):
    return (folder / f"{split}.eng-{other}.{language}").read_text("utf-8").splitlines()


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "smoe_fairseq.recipes.phrasebook", *map(str, words)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
    )


def test_files_and_counts(corpus):
    folder, counts = corpus
    assert counts == {
        f"{split}.eng-{other}.{language}": size
        for split, size in SIZES.items()
        for other in OTHERS
        for language in ("eng", other)
    }
    assert sorted(os.listdir(folder)) == sorted(counts)
    for name, count in counts.items():
        content = (folder / name).read_bytes().decode()
        assert content.count("\n") == count and content.endswith("\n")


def test_pairs_say_the_same(corpus):
    folder, _ = corpus
    for split in SIZES:
        assert len({tuple(lines(folder, split, other, "eng")) for other in OTHERS}) == 1


def test_no_sentence_comes_twice(corpus):
    folder, _ = corpus
    for other in OTHERS:
        for language in ("eng", other):
            text = [line for split in SIZES for line in lines(folder, split, other, language)]
            assert len(set(text)) == sum(SIZES.values())


def test_shape_of_sentences(corpus):
    folder, _ = corpus
    for other in OTHERS:
        for language in ("eng", other):
            for line in lines(folder, "train", other, language):
                assert 3 <= len(line.split()) <= 16
                assert line[0].isupper() and line[-1] in ".?" and line == " ".join(line.split())


def test_the_whole_lexicon_is_used(corpus):
    folder, _ = corpus
    text = " ".join(lines(folder, "train", "cat", "eng"))
    text = f" {text.replace('.', '').replace('?', '').replace(',', '')} "
    for row in [*ADJECTIVES.values(), *NOUNS.values(), *PLACES.values(), *TIMES.values()]:
        assert f" {row.english} " in text
    for verb in VERBS.values():
        assert any(f" {form} " in text for form in (verb.english_past, verb.english_ing))


def test_same_seed_same_files_from_the_command(corpus, tmp_path):
    folder, counts = corpus
    sizes = [word for split, size in SIZES.items() for word in (f"--{split}", size)]
    result = command(tmp_path / "new" / "folder", *sizes)
    assert result.returncode == 0, result.stderr
    for name in counts:
        assert (tmp_path / "new" / "folder" / name).read_bytes() == (folder / name).read_bytes()


def test_another_seed_gives_another_corpus(corpus, tmp_path):
    write_corpus(tmp_path, **SIZES, seed=2)
    first, second = (set(lines(f, "train", "nso", "eng")) for f in (corpus[0], tmp_path))
    assert len(first & second) < len(first) / 4


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--train", "0"), ("--train is 0", "1 or more")),
        (("--test", "-3"), ("--test is -3", "1 or more")),
        (("--train", "2000000"), ("--train", "at most 100000")),
        (("--seed", "-1"), ("--seed is -1", "0 or more")),
        (("--valid", "many"), ("--valid", "many")),
    ],
)
def test_bad_numbers_end_with_one_sentence(tmp_path, flags, told):
    result = command(tmp_path / "out", *flags)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert all(part in result.stderr.splitlines()[-1] for part in told)
    assert not (tmp_path / "out").exists()


def test_output_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("mine")
    result = command(tmp_path / "taken")
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert "OUTPUT_DIR" in sentence and str(tmp_path / "taken") in sentence
    assert (tmp_path / "taken").read_text() == "mine"


def test_nothing_appears_before_all_is_written(tmp_path, monkeypatch):
    write_corpus(tmp_path, train=5, valid=5, test=5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_bytes = type(tmp_path).write_bytes

    def full_disk(path, content):
        if path.name.startswith("test.eng-cat"):
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(type(tmp_path), "write_bytes", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        write_corpus(tmp_path, train=9, valid=9, test=9, seed=3)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


EXPECTED = [
    (
        Clause(
            Thing("teacher"),
            "read",
            Thing("book", adjective="big", demonstrative="this"),
            negative=True,
        ),
        "The teacher is not reading this big book.",
        "Morutiši ga a bale puku ye ye kgolo.",
        "Guru tidak sedang membaca buku besar ini.",
        "Hindi binabasa ng guro ang malaking librong ito.",
        "El mestre no llegeix aquest llibre gran.",
    ),
    (
        Clause(ME, "buy", Thing("cat", True, "white", number=2), "past", time="yesterday"),
        "I bought the two white cats yesterday.",
        "Ke rekile dikatse tše pedi tše ditšhweu maabane.",
        "Saya sudah membeli dua ekor kucing putih semalam.",
        "Binili ko ang dalawang puting pusa kahapon.",
        "Vaig comprar els dos gats blancs ahir.",
    ),
    (
        Clause(YOU, "open", Thing("window", owner="we"), "future", question=True),
        "Will you open our window?",
        "Na o tla bula lefasetere la rena?",
        "Adakah kamu akan membuka tingkap kami?",
        "Bubuksan mo ba ang aming bintana?",
        "Obriràs la nostra finestra?",
    ),
    (
        Clause(Thing("child", True), "sleep", question=True, want=True, place="school"),
        "Do the children want to sleep at school?",
        "Na bana ba nyaka go robala sekolong?",
        "Adakah budak-budak mahu tidur di sekolah?",
        "Gusto bang matulog ng mga bata sa paaralan?",
        "Els nens volen dormir a l'escola?",
    ),
    (
        Clause(THEY, "help", PAU, negative=True, want=True),
        "They do not want to help Pau.",
        "Ga ba nyake go thuša Pau.",
        "Mereka tidak mahu membantu Pau.",
        "Ayaw nilang tulungan si Pau.",
        "No volen ajudar en Pau.",
    ),
    (
        Clause(
            Thing("elephant", demonstrative="that"),
            "eat",
            Thing("apple", True, "red", owner="they"),
            "past",
            negative=True,
            time="last week",
        ),
        "That elephant did not eat their red apples last week.",
        "Tlou yeo ga se ya ja diapola tša bona tše dikhubedu beke ye e fetilego.",
        "Gajah itu tidak makan epal-epal merah mereka minggu lepas.",
        "Hindi kinain ng elepanteng iyon ang kanilang mga pulang mansanas noong nakaraang linggo.",
        "Aquell elefant no va menjar les seves pomes vermelles la setmana passada.",
    ),
    (
        Clause(ME, "run", tense="future", negative=True, place="market"),
        "I will not run at the market.",
        "Nka se kitime mmarakeng.",
        "Saya tidak akan berlari di pasar.",
        "Hindi ako tatakbo sa palengke.",
        "No correré al mercat.",
    ),
    (
        Pair(
            Clause(MARIA, "laugh"),
            Clause(Thing("policeman", True), "draw", Thing("tree", True, "old"), "past"),
            "because",
        ),
        "Maria is laughing because the policemen drew the old trees.",
        "Maria o a sega ka gobane maphodisa a thadile mehlare ya kgale.",
        "Maria sedang ketawa kerana polis-polis sudah melukis pokok-pokok lama.",
        "Tumatawa si Maria dahil iginuhit ng mga pulis ang mga lumang puno.",
        "La Maria riu perquè els policies van dibuixar els arbres vells.",
    ),
    (
        Clause(WE, "clean", Thing("chair", True, number=3), place="river", question=True),
        "Are we cleaning the three chairs near the river?",
        "Na re hlwekiša ditulo tše tharo kgauswi le noka?",
        "Adakah kami sedang membersihkan tiga buah kerusi berhampiran sungai?",
        "Nililinis ba namin ang tatlong silya malapit sa ilog?",
        "Netegem les tres cadires a prop del riu?",
    ),
]


@pytest.mark.parametrize("meaning, eng, nso, msa, tgl, cat", EXPECTED, ids=[e[1] for e in EXPECTED])
def test_grammar(meaning, eng, nso, msa, tgl, cat):
    rendered = {language: render(meaning) for language, render in RENDERERS.items()}
    assert rendered == {"eng": eng, "nso": nso, "msa": msa, "tgl": tgl, "cat": cat}


@pytest.mark.parametrize(
    ("noun", "plural", "expected"),
    [
        ("child", False, "ngwana yo mogolo"),
        ("child", True, "bana ba bagolo"),
        ("tree", False, "mohlare wo mogolo"),
        ("tree", True, "mehlare ye megolo"),
        ("box", False, "lepokisi le legolo"),
        ("box", True, "mapokisi a magolo"),
        ("chair", False, "setulo se segolo"),
        ("chair", True, "ditulo tše dikgolo"),
        ("dog", False, "mpša ye kgolo"),
        ("dog", True, "dimpša tše dikgolo"),
        ("bread", False, "borotho bjo bogolo"),
    ],
)
def test_sotho_adjectives_agree_with_the_noun_class(noun, plural, expected):
    assert sotho.noun_phrase(Thing(noun, plural, "big")) == expected


def test_meanings_that_some_language_cannot_express():
    with pytest.raises(ValueError, match="needs a time"):
        Clause(ME, "sleep", tense="past", negative=True)
    with pytest.raises(ValueError, match="present"):
        Clause(ME, "sleep", tense="future", want=True)
    with pytest.raises(ValueError, match="one of"):
        Thing("dog", owner="I", demonstrative="this")
    with pytest.raises(ValueError, match="plural"):
        Thing("dog", number=2)
