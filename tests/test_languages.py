"""What the names of languages mean."""

import pytest

from smoe_fairseq.languages import (
    are_languages,
    assign,
    code_of,
    is_unspaced,
    meant,
    spelled_twice,
    spellings,
    words_in,
)


@pytest.mark.parametrize(
    ("wanted", "names", "found"),
    [
        ("en de", "de-DE en-US", "en-US de-DE"),
        ("en de", "German English", "English German"),
        ("eng deu", "DE en", "en DE"),
        ("en de", "deu_Latn eng_Latn", "eng_Latn deu_Latn"),
        ("nob arb", "ar no", "no ar"),
        ("nb nn", "nn nb", "nb nn"),
        ("nn en", "no en", "None en"),
        ("pt pt-BR", "pt-BR pt-PT", "pt-PT pt-BR"),
        ("pt pt_BR", "pt-br", "None pt-br"),
        ("zh en", "zh-TW zh-CN en", "zh-CN en"),
        ("zho_Hans zho_Hant", "zh-TW zh-CN", "zh-CN zh-TW"),
        ("zho_Hans en", "zh-TW en", "None en"),
        ("en-GB de", "en-US de", "None de"),
        ("xx de", "XX yy", "XX None"),
        ("tgl msa", "zsm fil", "fil zsm"),
    ],
)
def test_names_of_one_language_are_assigned_to_it(wanted, names, found):
    made = assign(tuple(wanted.split()), tuple(names.split()))
    assert " ".join(map(str, made)) == found


@pytest.mark.parametrize(
    ("names", "found"),
    [("ibo ig igbo Igbo ibo_Latn", "ibo_Latn"), ("zh Chinese", "zho_Hans zho_Hant")]
    + [
        ("zh-TW zho_Hant", "zho_Hant"),
        ("no nb", "nob_Latn"),
        ("Tagalog tl fil", "tgl_Latn"),
        ("xx de", ""),
    ],
)
def test_those_of_a_models_languages_that_a_name_means(names, found):
    known = "ibo_Latn zho_Hans zho_Hant nob_Latn nno_Latn tgl_Latn".split()
    for name in names.split():
        assert " ".join(meant(name, known)) == found, name


def test_a_line_of_languages_is_told_from_sentences():
    assert are_languages(("French", "ita"))
    for sentences in [("German", "Deutsch"), ("Yes", "Ja"), ("xx", "yy"), ("A", "en"), ("", "de")]:
        assert not are_languages(sentences)


def test_code_and_script_of_languages():
    names = "zho_Hans cmn jpn kor deu_Latn Tibetan ptbr nso"
    assert " ".join(map(code_of, names.split())) == "zh zh ja ko de bo ptbr nso"
    unspaced = "zh yue ja tha_Thai lo khm my bod dz"
    assert all(map(is_unspaced, unspaced.split()))
    assert not any(map(is_unspaced, "ko vi en ar hi am ka xx".split()))


@pytest.mark.parametrize(
    ("name", "codes"),
    [("en", "en eng"), ("deu_Latn", "deu_Latn de deu"), ("nso", "nso"), ("xx", "xx")]
    + [
        ("tgl", "tgl fil tl"),
        ("tl", "tl fil tgl"),
        ("nob", "nob nb no nor"),
        ("no", "no nb nor nob"),
    ],
)
def test_spellings(name, codes):
    assert set(spellings(name)) == set(codes.split()) and spellings(name)[0] == name


@pytest.mark.parametrize(
    ("text", "words"),
    [("two words", 2), ("zwei Wörter", 2), ("中文字", 2), ("ひらがなABC", 3), ("ภาษาไทย", 2)]
    + [("བོད་སྐད།", 2), ("한국어 문장", 2), ("日本 and 語", 3)],
)
def test_lengths_are_by_script(text, words):
    assert words_in(text) == words


def test_codes_of_one_language_are_told_apart_from_its_variants():
    names = "fr fra fra_Latn pt pt-BR zh_Hans zh_Hant nb no sh sr src tgt".split()
    assert spelled_twice(names) == [("fr", "fra"), ("fr", "fra_Latn"), ("fra", "fra_Latn")]
