"""``smoe translate``: equal to fairseq-generate, line for line, and one sentence for what cannot be used."""

import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import PLUGIN, SCRIPTS, SMOE, changed, generation, refused, run, smoe
from programs import HANGS, wait_until
from sampling import soak
from test_translator import evaluated

from smoe_fairseq.analysis.inputs import load
from smoe_fairseq.analysis.sentence import run_pair
from smoe_fairseq.models import SMoETransformerModel

SEARCH = ("--beam", 2, "--max-len-b", 10)  # as the recipe's evaluation was told
RUN = "runs/tiny/smoe-2-2"


def typed(text: bytes):
    """The standard input of this process."""
    return mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def translate(folder, *words, text: str, check=True):
    """What is written, and what is said."""
    output = Path(folder) / "translated.txt"
    output.unlink(missing_ok=True)
    with typed(text.encode()):
        result = smoe("translate", *words, "--output", output, cwd=folder, check=check)
    return output.read_text() if output.exists() else None, result.stdout


@pytest.fixture(scope="module")
def folder(prepared, tmp_path_factory) -> Path:
    """The trained run with all that it needs, in a folder of its own."""
    folder = tmp_path_factory.mktemp("translate")
    (folder / "run").mkdir()
    data = prepared / "data/tiny/bin"
    best = prepared / RUN / "checkpoint_best.pt"
    for file in (best, data / "spm.model", *data.glob("dict.*.txt")):
        shutil.copy(file, folder / "run")
    return folder


def test_the_translations_are_those_of_fairseq_generate(prepared, folder):
    text, expected = evaluated(prepared, "en-fr")
    words = ("run", "--from", "en", "--to", "fr", *SEARCH)
    found, said = translate(folder, *words, text="".join(f"{line}\n" for line in text))
    assert found.splitlines() == expected and re.search(r"^12 lines in [\d.]+ s", said, re.M)
    # However many at a time; with threads, too.
    for more in (("--max-tokens", 1), ("--max-tokens", 40)):
        again, _ = translate(folder, *words, *more, text="\n".join(text))
        assert again == found


@pytest.mark.soak
def test_a_translation_does_not_wait_for_torchs_compiler(folder):
    words = ("smoe", "translate", "run", "--from", "en", "--to", "fr", *SEARCH)
    result = run(*words, cwd=folder, stdin="1 2\n", fresh=True, PYTHONPROFILEIMPORTTIME="1")
    assert " torch\n" in result.stdout and " torch._dynamo\n" not in result.stdout


@pytest.fixture(scope="module")
def other_weights(multilingual, tmp_path_factory) -> Path:
    """A checkpoint of the same languages with other weights."""
    generator, drawn = torch.Generator().manual_seed(1), {}

    def change(state):
        for name, weight in state["model"].items():
            if weight.is_floating_point() and weight.dim() > 1:
                key = weight.data_ptr()  # the same for shared embeddings
                if key not in drawn:
                    drawn[key] = weight + 0.05 * torch.randn(weight.shape, generator=generator)
                state["model"][name] = drawn[key]

    return changed(multilingual, tmp_path_factory.mktemp("ensemble") / "other.pt", change)


@pytest.mark.parametrize("direction, models", [("cc-aa", 1), soak("aa-bb", 2)])
def test_every_hypothesis_is_that_of_fairseq_generate(
    multilingual, other_weights, three_languages, tmp_path, direction, models
):
    """Scores and words, of several languages and of the mean of two models."""
    runs = (multilingual, other_weights)[:models]
    source, target = direction.split("-")
    data = ("--source-lang", source, "--target-lang", target, "--lang-pairs", direction)
    task = ("--task", "translation_multi_simple_epoch", "--encoder-langtok", "tgt")
    langs = ("--langs", "aa,bb,cc", "--gen-subset", "valid", "--nbest", 3)
    output = run(
        *("fairseq-generate", *generation(three_languages, ":".join(map(str, runs)))),
        *("--user-dir", PLUGIN, *task, *data, *langs, "--num-workers", 0),
    ).stdout
    text = dict(re.findall(r"^S-(\d+)\t(.*)$", output, re.M))
    lines = {int(n): line.removeprefix(f"__{target}__ ") for n, line in text.items()}
    # The longest line has more tokens than --max-len-b and would be divided: see there.
    short = [n for n in sorted(lines) if len(lines[n].split()) <= 12]
    words = ("--data", three_languages, "--from", source, "--to", target)
    search = ("--beam", 3, "--max-len-b", 12, "--nbest", 3)
    found, _ = translate(tmp_path, *runs, *words, *search, text="\n".join(lines[n] for n in short))
    wanted = re.findall(r"^D-(\d+)\t(\S+)\t(.*)$", output, re.M)
    wanted = [(short.index(int(n)) + 1, float(s), w) for n, s, w in wanted if int(n) in short]
    rows = [line.split("\t") for line in found.splitlines()]
    assert len(rows) == 3 * len(short) and len(short) >= 5
    for (line, score, words_), (number, expected, translation) in zip(
        rows, sorted(wanted, key=lambda row: row[0]), strict=True
    ):
        assert int(line) == number and words_ == translation
        assert float(score) == pytest.approx(expected, abs=1e-4)
    options = {"source_lang": source, "target_lang": target, "beam": 3, "max_len_b": 12}
    model = SMoETransformerModel.from_pretrained([*runs], data_name_or_path=three_languages)
    best = model.translate([lines[n] for n in short], **options)
    assert best == [words_ for _, _, words_ in rows[::3]]


def test_a_model_of_fairseqs_own_translates_too(pre_norm, corpus, raw_corpus, tmp_path):
    """By its own generator; without the plugin's name anywhere."""
    output = run("fairseq-generate", *generation(corpus, pre_norm)).stdout
    expected = dict(re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, re.M))
    text = (raw_corpus / "test.src").read_text()
    words = (pre_norm, "--data", corpus, "--beam", 3, "--max-len-b", 12)
    found, _ = translate(tmp_path, *words, text=text)
    assert found.splitlines() == [expected[n] for n in sorted(expected, key=int)]
    found, _ = translate(tmp_path, *words, "--json", text=text.split("\n")[0])
    assert json.loads(found)["requested"] is None


def test_json_has_scores_and_requested_capacity(prepared, folder):
    text, _ = evaluated(prepared, "fr-en")
    words = ("run", "--from", "fr", "--to", "en", *SEARCH, "--json", "--nbest", 2)
    # A line end of some programs, which is blank text, is none of JSON's.
    found, _ = translate(folder, *words, text=f"{text[0]}\n\u2028\n{text[1]}\n")
    first, empty, second = map(json.loads, found.splitlines())
    assert [first["source"], empty["source"], second["source"]] == [text[0], "\u2028", text[1]]
    assert [h["text"] for h in empty["hypotheses"]] == ["", ""] and empty["line"] == 2
    model, task = load(folder / "run/checkpoint_best.pt", folder / "run")
    for line in (first, second):
        assert line["tokens"][0] == "__en__" and line["tokens"][-1] == "</s>"
        assert [len(line["hypotheses"]), line["parts"]] == [2, 1]
        for hypothesis in line["hypotheses"]:
            assert hypothesis["tokens"][-1] == "</s>"
            scores, tokens = hypothesis["scores"], hypothesis["tokens"]
            assert hypothesis["score"] == pytest.approx(sum(scores) / len(tokens), abs=1e-4)
            # As `smoe analyze` finds it for the same pair.
            source = torch.tensor([[task.source_dictionary.index(t) for t in line["tokens"]]])
            target = [task.target_dictionary.index(t) for t in tokens]
            given = torch.tensor([[target[-1], *target[:-1]]])
            encoder, decoder = run_pair(
                model,
                task,
                {
                    "src_tokens": source,
                    "src_lengths": torch.tensor([source.shape[1]]),
                    "prev_output_tokens": given,
                },
            )
            assert line["requested"] == encoder.requested[0]
            assert hypothesis["requested"] == [*decoder.requested[0][1:], None]


def test_lines_of_any_length(folder):
    """Long ones are divided where a sentence ends; without ends, between words; without words, anywhere."""
    words = ("run", "--from", "fr", "--to", "en", *SEARCH, "--divide-above", 18)
    sentences = ["1 2 est .", "3 4 est un nombre .", "5 6 ."]
    letters = "\u33c2 " * 20  # of three bytes
    text = [" ".join(sentences), "1 " * 40, "12" * 300, "7 8", letters, ""]
    found, said = translate(folder, *words, text="\n".join(text) + "\n")
    joined, *others, blank = found.splitlines()
    assert len(others) == 4 and all(others[:3]) and blank == ""
    assert re.findall(r"^line (\d) is long: translated in \d+ parts$", said, re.M) == [*"1235"]
    pairs = [" ".join(sentences[:2]), " ".join(sentences[1:])]
    _, said = translate(folder, *words, "--sentences", text="\n".join(text[:2]))
    assert re.findall(r"^line (\d) is long", said, re.M) == ["2"]  # the first has short sentences
    alone, _ = translate(folder, *words, text="\n".join([*sentences, *pairs]))
    first, second, third, one, other = alone.splitlines()
    assert joined in (f"{first} {second} {third}", f"{one} {third}", f"{first} {other}")


def test_limits_of_a_translation_beyond_the_models(folder):
    words = ("run", "--from", "fr", "--to", "en", "--beam", 1)
    far = ("--max-len-a", "1e308", "--max-len-b", 10**40)
    plain, _ = translate(folder, *words, "--max-len-b", 2000, text="1 2\n")
    assert translate(folder, *words, *far, text="1 2\n")[0] == plain


def test_text_as_it_comes(folder):
    """No last line end, Windows' line ends, blanks, and characters that there were none of in training."""
    words = ("run", "--to", "fr", *SEARCH)
    plain, _ = translate(folder, *words, text="1 2\n3 4\n")
    assert translate(folder, *words, text="1 2\r\n3 4")[0] == plain
    odd = "   \n\t\n\u200b\n☃ 𝄞\u2028 1\n"
    found, _ = translate(folder, *words, text=odd)
    assert found.split("\n")[:3] == ["", "", ""] and found.count("\n") == 4
    assert translate(folder, *words, text="")[0] == ""
    rows, _ = translate(folder, *words, "--sentences", "--nbest", 2, text="1 2 .\t3 4 .\n")
    assert [row.count("\t") for row in rows.splitlines()] == [2, 2]


@pytest.mark.soak
def test_the_mark_with_which_an_editor_begins_a_file_is_no_text():
    from smoe_fairseq.translate.command import text_lines

    lines = io.BytesIO("\ufeffone\n\ufefftwo\n".encode())
    assert [text_lines(lines, 1, n) for n in (1, 2, 3)] == [["one"], ["\ufefftwo"], []]


REFUSED = {  # by what the sentence names
    "--to xx": ("run", "--to", "xx"),
    "--from": ("run",),
    "--to en": ("run", "--to", "en"),
    "none": ("none", "--to", "fr"),
    "checkpoint_best.pt": (".", "--to", "fr"),
    "dictionaries": ("run", "--to", "fr", "--data", "."),
    "--nbest 6": ("run", "--to", "fr", "--nbest", 6),
    "--device abacus": ("run", "--to", "fr", "--device", "abacus"),
    "--sampling-topk": ("run", "--to", "fr", "--sampling-topk", 3),
    "--seed 3": ("run", "--to", "fr", "--seed", 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_named(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    refused(smoe("translate", *REFUSED[name], check=False), name)


def test_an_output_that_is_no_text_is_not_replaced(folder, tmp_path):
    copy = tmp_path / "model"
    copy.write_bytes(before := (folder / "run/spm.model").read_bytes()[:1000])
    words = ("translate", "run", "--to", "fr", "--output", copy)
    refused(smoe(*words, cwd=folder, check=False), f"--output {copy}")
    assert copy.read_bytes() == before


def test_an_earlier_translation_is_replaced(folder, tmp_path):
    (output := tmp_path / "text").write_text("PKW\n")  # which begins as an archive does
    with typed(b"1 2\n"):
        smoe("translate", "run", "--to", "fr", "--output", output, cwd=folder)
    assert output.read_text() != "PKW\n"


def test_a_text_in_place_of_a_run_is_told_where_it_goes(folder, tmp_path):
    (text := tmp_path / "text").write_text("1 2\n")
    result = smoe("translate", "run", text, "--to", "fr", cwd=folder, check=False)
    assert result.returncode == 2 and f"< {text}" in result.stdout


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--beam", "0"), ("--lenpen", "nan"), ("--max-len-b", "x"), ("--nbest", "0")),
        *(("--lenpen", "1000"), ("--prefix", "\udcff"), ("--sampling-topp", "0")),
    ],
)
def test_values_of_flags_that_are_none(flag, value):
    result = smoe("translate", "run", flag, value, check=False)
    assert result.returncode == 2 and f"argument {flag}" in result.stdout
    assert ascii(value)[1:-1] in result.stdout


def command_of(*words) -> list[str]:
    return [str(SCRIPTS / "smoe"), "translate", "run", "--to", "fr", *map(str, (*SEARCH, *words))]


class Typed:
    """Started, with what it is given to translate to be written; a signal is sent to the program itself."""

    def __init__(self, folder, *words, **environment):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.log = tempfile.TemporaryFile("w+")
        reading, writing = os.pipe()
        files = (reading, self.log.fileno(), self.log.fileno())
        self.program = SMOE.start(command_of(*words), environment, folder, files)
        os.close(reading)
        self.stdin = open(writing, "wb")

    def poll(self) -> int | None:
        return self.program.wait(0)

    def communicate(self) -> tuple[str]:
        self.log.seek(0)
        return (self.log.read(),)

    def end(self, number: int = 0) -> tuple[int, str]:
        """By a signal, or by itself: the exit status, and what was said."""
        if number:
            os.kill(self.program.pid, number)
            self.program.wait(HANGS)
        with suppress(BrokenPipeError):
            self.stdin.close()
        return self.program.wait(HANGS), *self.communicate()


def test_a_line_that_is_not_utf8_is_named(folder):
    with typed(b"1 2\n3 \xff4\n"):
        result = smoe(*command_of("--output", "not-utf8.txt")[1:], cwd=folder, check=False)
    refused(result, "line 2 of standard input", "position 3")
    assert not list(folder.glob("not-utf8*"))


def test_an_interruption_of_a_search(folder):
    words = ("--output", "never.txt", "--max-tokens", 200)
    process = Typed(folder, *words, OMP_NUM_THREADS="2")
    process.stdin.write(b"1 2 3 4 5 6 7 8 9\n" * 3999)
    process.stdin.flush()
    wait_until(lambda: list(folder.glob("never.txt.partial")), process)
    process.stdin.write(b"1\n" * 2)  # what is asked for at once, and one more
    process.stdin.flush()
    status, said = process.end(signal.SIGINT)
    assert status == 130 and "Traceback" not in said
    assert not (folder / "never.txt").exists()
    (folder / "never.txt.partial").unlink(missing_ok=True)  # if the search was quicker


def change_last_word(state) -> None:
    state["model"]["decoder.embed_tokens.weight"][-1].add_(1)


CHANGES = {  # of what translations depend on
    "checkpoint_best.pt": lambda file: changed(file, file, change_last_word),
    "dict.en.txt": lambda file: file.write_text(file.read_text().replace(" 1\n", " 2\n", 1)),
    "spm.model": lambda file: file.write_bytes(file.read_bytes() + b"\x12\x00"),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, soak(signal.SIGKILL)])
def test_an_interrupted_translation_continues(folder, tmp_path, number):
    """And leaves the file that is to be replaced as it was; to the last digit as without interruption."""
    shutil.copytree(folder / "run", tmp_path / "run")
    output, kept = tmp_path / "kept.txt", tmp_path / "kept.txt.partial"
    output.write_text("as it was\n")
    text = "".join(f"{i % 10} {i % 7}\n" for i in range(400))
    words = ("--json", "--max-tokens", 100, "--output", output.name)
    process = Typed(tmp_path, *words)
    process.stdin.write(text.encode())
    process.stdin.close()
    wait_until(lambda: kept.exists() and kept.read_bytes().count(b"\n") > 20, process)
    status, said = process.end(number)
    assert output.read_text() == "as it was\n" and "Traceback" not in said
    assert number == signal.SIGKILL or status == 128 + number and kept.name in said
    head, *parts = map(json.loads, kept.read_text().splitlines()[:20])
    last = max(number for number, *_ in parts)
    words = command_of(*words)[1:]

    def refuse(*more, stdin=text):
        refused(run("smoe", *words, *more, cwd=tmp_path, stdin=stdin, check=False), str(kept))

    for other in ("9 9\n" * 400, "\n".join(text.splitlines()[: last - 1])):
        refuse(stdin=other)
    refuse("--lenpen", 2)
    for name, change in CHANGES.items():
        file = tmp_path / "run" / name
        before = file.read_bytes()
        change(file)
        refuse()
        file.write_bytes(before)
    number, _, (line,) = parts[5]
    parts[5][2] = [line.replace('"parts": 1', '"parts": 7')]  # is not translated again
    lines = "".join(f"{json.dumps(each)}\n" for each in (head, *parts))
    kept.write_text(lines + '[3, "cut o')
    run("smoe", *words, cwd=tmp_path, stdin=text)
    expected = translate(tmp_path, *words[1:-2], text=text)[0].splitlines()
    expected[number - 1] = parts[5][2][0]
    assert output.read_text().splitlines() == expected and '"parts": 7' in parts[5][2][0]
    assert not kept.exists()


@pytest.mark.parametrize("content", ["my notes", '{"a": 1}\n'])
def test_a_file_of_the_users_is_left_alone(folder, tmp_path, content):
    own = tmp_path / "out.partial"
    own.write_text(content)
    words = command_of("--output", tmp_path / "out")[1:]
    refused(smoe(*words, cwd=folder, check=False), str(own))
    assert own.read_text() == content


def test_an_output_is_of_one_command(folder):
    process = Typed(folder, "--output", "shared.txt")
    wait_until((folder / "shared.txt.partial").exists, process)
    words = command_of("--output", "shared.txt")[1:]
    refused(smoe(*words, cwd=folder, check=False), "shared.txt.partial")
    process.end(signal.SIGTERM)
    assert not list(folder.glob("shared*"))  # nothing was translated
