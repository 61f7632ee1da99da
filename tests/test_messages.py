"""The data set of a program's messages, from a tiny archive of .po files to text in the shared layout."""

import json

import pytest
import yaml
from commands import step_here, succeeded
from test_recipes import ROOT, refusal, write_dataset
from test_recipes_archives import tar

from smoe_fairseq.recipes.data.messages import hash_position, plain

SETTINGS = yaml.safe_load((ROOT / "configs/datasets/libreoffice.yaml").read_text())["raw"]
LETTERS = "abcdefghij"


def message(english: str, translation: str, before: str = "", context: str = "") -> str:
    quoted = [json.dumps(text, ensure_ascii=False) for text in (english, translation)]
    context = f"msgctxt {json.dumps(context)}\n" if context else ""
    return f"{before}{context}msgid {quoted[0]}\nmsgstr {quoted[1]}\n\n"


def texts(count: int) -> list[str]:
    """Of which every other test holds out some."""
    return [" ".join("word" + LETTERS[int(digit)] for digit in f"{i:03}") for i in range(count)]


def archive(path, files: dict[str, str]) -> None:
    header = message("", "Content-Type: text/plain; charset=UTF-8\n")
    path.write_bytes(tar({name: (header + text).encode() for name, text in files.items()}, "xz"))


@pytest.fixture
def given(tmp_path):
    messages = SETTINGS["messages"] | {
        "valid": {"share": 0.1, "most": 20},
        "test": {"share": 0.2, "most": 30},
    }
    raw = SETTINGS | {"messages": messages, "codes": {"ptbr": "pt_br"}}
    return write_dataset(tmp_path / "configs", "tiny", pairs=["en-cy", "en-ptbr"], raw=raw)


def gather(tmp_path, given, source="source.tar.xz"):
    return step_here("gather", "tiny", source, "raw", cwd=tmp_path, **given)


def pairs(tmp_path, split: str, language: str) -> dict[str, str]:
    names = (tmp_path / f"raw/{split}.en-{language}.{side}" for side in ("en", language))
    english, translations = (name.read_text("utf-8").splitlines() for name in names)
    assert len(english) == len(translations)
    return dict(zip(english, translations, strict=True))


def test_texts_are_held_out_by_their_english_string_in_all_languages(tmp_path, given):
    """Whatever the order of the archive's files; those beyond a language's most are left out."""
    first, second = (
        "".join(message(text, f"{language} {text}") for text in texts(300))
        for language in ("cy", "pt")
    )
    files = {
        "translations/source/cy/b/messages.po": first,
        "translations/source/cy/a/c/ui.po": message("Wordd wordd, WORDD!", "cy gwahanol"),
        "translations/source/pt-BR/messages.po": second,
        "translations/source/sl/messages.po": message("one two three", "ena dva tri"),
    }
    made = []
    for order in (files, dict(reversed(files.items()))):
        archive(tmp_path / "source.tar.xz", order)
        succeeded(gather(tmp_path, given))
        made.append(
            {
                (split, language): pairs(tmp_path, split, language)
                for split in ("train", "valid", "test")
                for language in ("cy", "ptbr")
            }
        )
    assert made[0] == made[1]
    found = made[0]
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        seen, unseen = (
            {hash_position(text) for lang in ("cy", "ptbr") for text in found[split, lang]}
            for split in (one, other)
        )
        assert not seen & unseen
    assert hash_position("Wordd wordd, WORDD!") == hash_position("wordd wordd wordd")
    sizes = {key: len(value) for key, value in found.items()}
    assert sizes["test", "cy"] == sizes["test", "ptbr"] == 30
    assert sizes["valid", "cy"] == sizes["valid", "ptbr"] == 20
    assert 190 < sizes["train", "ptbr"] < 230
    assert json.loads((tmp_path / "sizes.json").read_text()) == {
        "en-cy": sizes["train", "cy"],
        "en-ptbr": sizes["train", "ptbr"],
    }


def test_messages_without_a_translation_of_their_own_are_left_out(tmp_path, given):
    odd = [
        message("one fuzzy text here", "un", "#, fuzzy\n"),
        message("one obsolete text here", "un").replace("msg", "#~ msg").rstrip("\n") + "\n\n",
        'msgid "one plural text"\nmsgid_plural "many plural texts"\nmsgstr[0] "un"\nmsgstr[1] "lot"\n\n',
        message("one untranslated text here", ""),
        message("one text unchanged", "one text unchanged"),
        message("two words", "dau air"),
        message("two words 12 34", "dau air 12 34"),
        message("a text translated twice", "y cyntaf", context="a"),
        message("a text translated twice", "yr ail", context="b"),
        message("a separator\u2028in it", "gwahanydd\u2028ynddo"),
    ]
    others = [message(text, f"cy {text}") for text in texts(100)]
    language = "".join([*odd, *others])
    po = {f"translations/source/{code}/a.po": language for code in ("cy", "pt-BR")}
    archive(tmp_path / "source.tar.xz", po)
    succeeded(gather(tmp_path, given))
    left = {}
    for split in ("train", "valid", "test"):
        left |= pairs(tmp_path, split, "cy")
    assert left.pop("a text translated twice", "y cyntaf") == "y cyntaf"
    assert left.pop("a separator in it", "gwahanydd ynddo") == "gwahanydd ynddo"
    assert left.keys() <= set(texts(100))


@pytest.mark.parametrize(
    "message, text",
    [
        ("~File and _Edit, Pla_ce", "File and Edit, Place"),
        ("%AVERAGE_VALUE of HID_X in com_sun_star", "%AVERAGE_VALUE of HID_X in com_sun_star"),
        ('"LibreOffice_", "_Tools"', '"LibreOffice_", "Tools"'),
        ('<ahelp hid=".">Opens <emph>File</emph>.</ahelp>', "Opens File."),
        ('\\<emph\\>Old\\</emph\\> \\"escapes\\"', 'Old "escapes"'),
        ("<bookmark_value>one</bookmark_value><bookmark_value>two</bookmark_value>", "one two"),
        ("first\\n second<br/>third\tfourth", "first second third fourth"),
        ("Tools &amp; Options, a < b > c, $1 of %2", "Tools & Options, a < b > c, $1 of %2"),
    ],
)
def test_marks_of_the_interface_are_taken_off(message, text):
    assert plain(message) == text


@pytest.mark.parametrize(
    "files, words",
    [
        ({"po/cy.po": message("one two three", "un dau tri")}, "translations/source/LANGUAGE"),
        ({f"translations/source/{code}/a.po": "" for code in ("cy", "sl")}, "pt_br"),
        (
            {f"translations/source/{code}/a.po": message("One", "Un") for code in ("cy", "pt-BR")},
            "en-cy",
        ),
        ({"translations/source/cy/a.po": "nonsense\n"}, "a.po"),
        ({"translations/source/cy/a.po": 'msgid "One"\nmsgstr "Un\n'}, "a.po"),
    ],
)
def test_an_archive_of_another_kind_is_refused(tmp_path, given, files, words):
    archive(tmp_path / "source.tar.xz", files)
    sentence = refusal(gather(tmp_path, given))
    assert words in sentence and "source.tar.xz" in sentence
    assert not (tmp_path / "raw").exists()


def test_a_folder_without_an_archive_is_named(tmp_path, given):
    (tmp_path / "empty").mkdir()
    said = refusal(gather(tmp_path, given, "empty"))
    assert "empty has no archives: --raw has to name one" in said
