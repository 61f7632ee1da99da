"""Data of a form: what fits, what does not, and the key that the sentence names."""

import re

import pytest

from smoe_fairseq.cli import main
from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import Number, Settings, choice, fault, read_json

FORM = {
    "name": str,
    "sizes": [Number(1, 4, whole=True)],
    "rate?": (float, None),
    "pairs": {str: re.compile("[a-z]+-[a-z]+")},
    "two?": [float, str],
    "either?": (str, {"a": str}),
    "more?": {"deep": {"is": bool}},
}
RIGHT = {"name": "a", "sizes": [1, 4], "pairs": {"x": "en-de"}, "unknown": [{}]}


@pytest.mark.parametrize(
    "more", [{}, {"rate": None}, {"rate": 1}, {"more": {"deep": {"is": True}}}]
)
def test_what_has_the_form(more):
    assert fault(RIGHT | more, FORM) is None


@pytest.mark.parametrize(
    "wrong, key",
    [
        ({"name": 1}, "name"),
        ({"sizes": [1, 5]}, "sizes[1]"),
        ({"sizes": [True]}, "sizes[0]"),
        ({"sizes": {}}, "sizes"),
        ({"two": [1]}, "two"),
        ({"two": [1, 1]}, "two[1]"),
        ({"either": {"a": 1}}, "either.a"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": 10**400}, "rate"),
        ({"rate": False}, "rate"),
        ({"pairs": {"x": "en-de\n"}}, "pairs.x"),
        ({"pairs": ["x"]}, "pairs"),
        ({"more": {"deep": {"is": 1}}}, "more.deep.is"),
        ({"more": {"deep": {}}}, "more.deep.is"),
        ({"more": None}, "more"),
    ],
)
def test_what_has_another_form_is_named(wrong, key):
    assert fault(RIGHT | wrong, FORM).startswith(f"{key} is ")


@pytest.mark.parametrize("missing", ["name", "pairs"])
def test_what_is_missing_is_named(missing):
    given = {key: value for key, value in RIGHT.items() if key != missing}
    assert fault(given, FORM) == f"{missing} is missing"


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"a": "\xe4"}', b"1"])
def test_a_file_that_is_no_json_of_the_form(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{file}"):
        read_json(file, {}, "delete it")


def test_a_mark_of_a_windows_editor_is_passed_over(tmp_path):
    (file := tmp_path / "scores.json").write_text('\ufeff{"a": 1}\r\n', "utf-8")
    assert read_json(file, {"a": int}) == {"a": 1}


def test_an_unknown_key_or_command_has_the_nearest_name_in_its_message(capsys):
    assert "subwords?" in fault({"subword": {}}, Settings(subwords={}, train={}))
    assert choice("sme-4_4", ["moe-top-4", "smoe-A-B-..."]).startswith("did you mean smoe-A-B-...?")
    with pytest.raises(SystemExit) as ended:
        main(["tabel"])
    assert ended.value.code == 2 and "table?" in capsys.readouterr().err
