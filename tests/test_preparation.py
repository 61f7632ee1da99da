"""The steps of preparation by several processes: files as by one, and as fairseq-preprocess writes them."""

import gzip
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from commands import PLUGIN, contents, refused, run, step_here, succeeded
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from programs import HANGS, started, wait_until
from test_full_disk import limited
from test_recipes import surroundings, write_dataset, write_text
from test_recipes_archives import step
from test_signals import ended

from smoe_fairseq.errors import UsageError
from smoe_fairseq.progress import progress
from smoe_fairseq.recipes.data import subwords, text_files
from smoe_fairseq.recipes.data.subwords import learn

PAIRS = ["en-fr", "en-de"]
LETTERS = [chr(0x10330 + i) for i in range(17)]
WORDS = [
    a + b + c for a in LETTERS[:12] for b in LETTERS[12:] for c in ("", "n", "s", "é", "шо", "語")
]
ODD = [
    *("", " ", "a\u2028b", "tab\tand\u3000wide", "☃ unseen ☃", "<unk> <s> </s> <pad>"),
    "a\x85b\x1cc",
]


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """So that several processes have work with little text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "CHUNK", 1 << 15)
        yield


def text(draw: random.Random, lines: int, words: int) -> str:
    made = [" ".join(draw.choices(WORDS, k=draw.randint(1, words))) for _ in range(lines)]
    return "".join(f"{line}\n" for line in [*made, *ODD, made[0]])


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """A publisher's text of two pairs, of which one is large enough to keep three processes busy."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(7)
    for pair, lines in zip(PAIRS, (700, 40), strict=True):
        for split, count in (("train", lines), ("valid", 30), ("test", 30)):
            for language in pair.split("-"):
                content = text(draw, count, 60).encode()
                name = folder / f"{split}.{pair}.{language}"
                if (pair, language) == ("en-de", "de"):
                    name.with_name(f"{name.name}.gz").write_bytes(gzip.compress(content))
                else:
                    name.write_bytes(content)
    assert (folder / "train.en-fr.en").stat().st_size > 3 * text_files.CHUNK
    (folder / "test.en-de.de.gz").unlink()  # half of a test set is none
    return folder


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    return write_dataset(tmp_path_factory.mktemp("c") / "configs", "tiny", pairs=PAIRS, raw={})


@pytest.fixture(scope="module")
def prepared(raw, given, tmp_path_factory) -> Path:
    """The steps with one process: text, a model, its pieces in two shards and in one, these binarised."""
    folder = tmp_path_factory.mktemp("prepared")
    step(folder, given, "gather", "tiny", raw, "raw")
    learn(folder / "raw", folder, vocab_size=300, character_coverage=0.99)
    for shards in ("2", "1"):
        flags = ("--shards", shards, "--longest", "50")
        step(folder, given, "encode", "spm.model", "raw", f"text{shards}", *flags)
    step(folder, given, "binarise", "tiny", "text1", "dict.txt", "bin1")
    return folder


def test_more_shards_than_lines_are_refused(tmp_path, given, prepared):
    """A training would end as soon as it comes to an empty one."""
    flags = ("--shards", "1000", "--longest", "50")
    out = tmp_path / "text"
    said = step(prepared, given, "encode", "spm.model", "raw", out, *flags, check=False)
    refused(said, "shards", "raw/train.")
    assert not out.exists()


def test_pieces_do_not_depend_on_the_processes(tmp_path, given, prepared):
    flags = ("--shards", "2", "--longest", "50", "--workers", "3")
    said = step(prepared, given, "encode", "spm.model", "raw", tmp_path / "text", *flags).stdout
    assert contents(tmp_path / "text") == contents(prepared / "text2")
    model = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "spm.model"))
    for name in ("train.en-fr.fr", "valid.en-fr.fr", "train.en-de.de"):
        lines = (prepared / "raw" / name).read_text("utf-8").split("\n")[:-1]
        pieces = [model.encode(line, out_type=str) for line in lines]
        if name.startswith("train"):
            dealt = [pieces[::2], pieces[1::2]]
        else:
            dealt = [[line[:50] for line in pieces]]
            cut = sum(len(line) > 50 for line in pieces)
            assert cut and f"{cut} lines of raw/{name} have more than 50 pieces" in said
        for i, lines in enumerate(dealt):
            found = (tmp_path / f"text/shard{i}" / name).read_text("utf-8")
            assert found == "".join(" ".join(line) + "\n" for line in lines)


def preprocess(text: Path, dictionary: Path, output: Path, pair: str, splits) -> None:
    """fairseq's own."""
    source, target = pair.split("-")
    run(
        *("fairseq-preprocess", "--source-lang", source, "--target-lang", target),
        *(word for s in splits for word in (f"--{s}pref", text / f"{s}.{pair}")),
        *("--srcdict", dictionary, "--tgtdict", dictionary),
        *("--destdir", output, "--workers", "1"),
    )


def test_binarised_as_by_fairseq_preprocess(tmp_path, given, prepared):
    """Pieces in two shards."""
    text, output = prepared / "text2", tmp_path / "fairseq"
    for folder, pair, splits in (
        ("shard0", "en-fr", ("train", "valid", "test")),
        ("shard0", "en-de", ("train", "valid")),
        ("shard1", "en-fr", ("train",)),
        ("shard1", "en-de", ("train",)),
    ):
        preprocess(text / folder, prepared / "dict.txt", output / folder, pair, splits)
    expected = {name: c for name, c in contents(output).items() if not name.endswith(".log")}
    words = ["binarise", "tiny", text, prepared / "dict.txt", tmp_path / "bin"]
    said = step(tmp_path, given, *words, "--workers", "3").stdout
    found = {n: c for n, c in contents(tmp_path / "bin").items() if Path(n).name != "dict.sha256"}
    assert sorted(found) == sorted(expected)
    assert all(content == expected[name] for name, content in found.items())
    known = {line.split()[0] for line in (prepared / "dict.txt").read_text("utf-8").splitlines()}
    pieces = [piece for file in text.glob("*/*.*-*.*") for piece in file.read_text("utf-8").split()]
    assert f"{sum(piece not in known | {'<pad>'} for piece in pieces):,} of them unknown" in said


def test_a_run_that_resumes_draws_as_many_sentences_of_each_pair(tmp_path, given, prepared):
    """As one that has loaded all shards, which here differ in size."""
    shutil.copytree(prepared / "text2", tmp_path / "text")
    for language in ("en", "fr"):
        file = tmp_path / f"text/shard1/train.en-fr.{language}"
        file.write_text("".join(file.read_text("utf-8").splitlines(True)[:50]), "utf-8")
    step(
        tmp_path,
        given,
        "binarise",
        "tiny",
        tmp_path / "text",
        prepared / "dict.txt",
        tmp_path / "bin",
    )
    words = [f"{tmp_path}/bin/shard0:{tmp_path}/bin/shard1", "--user-dir", PLUGIN]
    words += ["--task", "translation_multi_simple_epoch", "--langs", "en,de,fr"]
    words += ["--lang-pairs", "en-fr,en-de", "--arch", "smoe_transformer_tiny"]
    words += ["--sampling-method", "temperature", "--sampling-temperature", 3]
    words += ["--max-source-positions", 99, "--max-target-positions", 99]
    args = options.parse_args_and_arch(options.get_training_parser(), [*map(str, words)])

    def drawn(*epochs: int) -> tuple[int, list[float]]:
        task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
        for epoch in epochs:
            task.load_dataset("train", epoch=epoch, combine=True)
        return len(task.datasets["train"]), task.datasets["train"].sample_ratios.tolist()

    assert drawn(1, 2, 3) == drawn(3) and drawn(1, 2) == drawn(2)
    assert drawn(2)[0] < drawn(1)[0]


@pytest.mark.soak
def test_large_dictionaries_have_larger_numbers(tmp_path, given, prepared):
    """From 65,500 words on."""
    words = [*WORDS, *(f"w{i}" for i in range(65500 - 4 - len(WORDS)))]
    (tmp_path / "dict.txt").write_text("".join(f"{word} 3\n" for word in words), "utf-8")
    for split in ("train", "valid"):
        for pair in PAIRS:
            for language in pair.split("-"):
                (tmp_path / f"text/{split}.{pair}.{language}").parent.mkdir(exist_ok=True)
                (tmp_path / f"text/{split}.{pair}.{language}").write_text("w7 w65000 w9\n")
    step(tmp_path, given, "binarise", "tiny", "text", "dict.txt", "bin")
    for pair in PAIRS:
        splits = ("train", "valid")
        preprocess(tmp_path / "text", tmp_path / "dict.txt", tmp_path / "fairseq", pair, splits)
    (tmp_path / "fairseq/preprocess.log").unlink()
    found = {n: c for n, c in contents(tmp_path / "bin").items() if Path(n).name != "dict.sha256"}
    assert found == contents(tmp_path / "fairseq")
    assert (tmp_path / "bin/train.en-fr.en.bin").stat().st_size == 4 * 4


def test_pieces_that_are_missing_are_named(tmp_path, given, prepared):
    shutil.copytree(prepared / "text2", tmp_path / "text")
    (tmp_path / "text/shard1/train.en-de.de").unlink()
    words = ["binarise", "tiny", "text", prepared / "dict.txt", "bin"]
    refused(step(tmp_path, given, *words, check=False), "text/shard1/train.en-de.de")
    (tmp_path / "text/shard1/train.en-de.de").write_bytes(b"\xff\n")
    refused(step(tmp_path, given, *words, check=False), "text/shard1/train.en-de.de", "UTF-8")
    assert not list((tmp_path / "bin/shard1").glob("train.en-de.de*"))


@pytest.mark.parametrize(
    "content", ["one\n", "one 1\none 2\n", "one two\n", "<unk> 1\n", "\udcff 1\n"]
)
def test_what_is_no_dictionary_is_named(tmp_path, given, prepared, content):
    (tmp_path / "dict.txt").write_bytes(content.encode("utf-8", "surrogateescape"))
    words = ["binarise", "tiny", prepared / "text1", "dict.txt", "bin"]
    refused(step(tmp_path, given, *words, check=False), "dict.txt")
    assert not (tmp_path / "bin").exists()


def test_a_bar_at_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("encode", 100) as advance:
        advance(50)
    assert re.search(r"encode: +\d+%", capsys.readouterr().err)


def test_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr("smoe_fairseq.progress._REPORT_SECONDS", 0)
    with progress("encode", 100, "lines") as advance:
        advance(50)
    assert capsys.readouterr().err.startswith("encode: 50 of 100 lines | ")


MODELS = {"unigram": 21, "bpe": 6}  # bytes of memory for each byte of text


@pytest.mark.parametrize("kind", MODELS)
def test_subwords_that_take_more_memory_than_there_is(tmp_path, monkeypatch, prepared, kind):
    files = list((prepared / "raw").glob("train.*"))
    size = sum(file.stat().st_size for file in files)
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    monkeypatch.setattr(subwords, "machine_memory", lambda: MODELS[kind] * size // 5)
    options = {"vocab_size": 300, "model_type": kind, "character_coverage": 0.99}
    with pytest.raises(UsageError) as refusal:
        learn(prepared / "raw", tmp_path / "out", **options)
    fewer = int(str(refusal.value).rpartition("--input-sentence-size ")[2])
    assert f"{lines:,} lines of {prepared / 'raw'}" in str(refusal.value)
    assert 0.7 * lines / 5 < fewer < lines / 5 and not (tmp_path / "out").exists()
    learn(prepared / "raw", tmp_path / "out", **options, input_sentence_size=fewer)
    assert (tmp_path / "out/spm.model").exists()


# Ends before the end


def test_a_signal_while_sentencepiece_learns(tmp_path, monkeypatch, prepared):
    """It ends the process at once, though no handler of Python would run before the end of the call."""
    found, lines, own = [], subwords.readers.lines, signal.getsignal(signal.SIGTERM)

    def text(file):
        yield from lines(file)
        found.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(subwords.readers, "lines", text)
    learn(prepared / "raw", tmp_path / "out", vocab_size=300)
    assert found[-1] == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize(
    "name, made",
    [
        ("gather", ("raw/", "sizes.json", "left_out.json")),
        ("encode", ("text1/",)),
        ("binarise", ("bin1/",)),
    ],
)
def test_full_disk(tmp_path, raw, given, prepared, name, made):
    given_to = {
        "gather": ["tiny", raw],
        "encode": ["--longest", "50", prepared / "spm.model", prepared / "raw"],
        "binarise": ["tiny", prepared / "text1", prepared / "dict.txt"],
    }
    words = [name, *given_to[name], f"out/{made[0]}"]
    program = ("python", "-m", "smoe_fairseq.recipes", *words)
    said = refused(limited(30_000, *program, cwd=tmp_path, **given))
    assert said.startswith("error: out/")
    whole = {f"out/{n}": c for n, c in contents(prepared).items() if n.startswith(made)}
    kept = contents(tmp_path)
    assert kept.items() <= whole.items() and (name != "gather" or not kept)
    step(tmp_path, given, *words)
    assert contents(tmp_path) == whole


def test_an_interrupted_preparation_continues(tmp_path, monkeypatch):
    """Also one that replaces another; with edited text or other settings it begins again."""
    text = write_text(tmp_path / "text", "en-fr", train=300, valid=20, test=12)
    given = write_dataset(tmp_path / "c", "tiny", pairs=["en-fr"], raw={})
    data, partial = tmp_path / "data/tiny", tmp_path / "data/tiny/bin.partial"

    def prepare(size: str = "60"):
        words = ("prepare", "tiny", "--raw", str(text), "--vocab-size", size)
        return step_here(*words, cwd=tmp_path, **surroundings() | given)

    def interrupted(at: str = "subwords.encode_files") -> int | None:
        """As by SIGTERM, once subwords are learnt, or at another function; the time of their model."""
        shutil.rmtree(data / "bin", ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(
                f"smoe_fairseq.recipes.data.{at}", lambda *_: sys.exit(128 + signal.SIGTERM)
            )
            stopped = prepare()
            assert stopped.returncode == 128 + signal.SIGTERM
        assert "the same command continues" in stopped.stdout
        model = partial / "spm.model"
        return model.stat().st_mtime_ns if model.exists() else None

    def continues() -> bool:
        done = succeeded(prepare())
        assert sorted(path.name for path in data.iterdir() if path.is_dir()) == ["bin", "raw"]
        return "preparation continues" in done.stdout

    assert interrupted("prepare.recipe") is None  # the program that learns subwords
    assert continues()
    found, _ = contents(data / "bin"), shutil.rmtree(data / "bin")
    assert not continues() and contents(data / "bin") == found
    (data / "sizes.json").write_text("{}")
    learned = interrupted()
    assert (data / "raw.partial").exists() and (data / "sizes.json").read_text() == "{}"
    assert continues() and (data / "bin/spm.model").stat().st_mtime_ns == learned
    assert contents(data / "bin") == found and "300" in (data / "sizes.json").read_text()
    assert not (data / "raw/sizes.json").exists()
    learned = interrupted()
    file = text / "train.en-fr.en"
    lines = file.read_text().splitlines(keepends=True)
    lines[150] = " ".join(reversed(lines[150].split())) + "\n"  # of the same size
    file.write_text("".join(lines))
    assert interrupted() != learned
    (partial / "spm.model").write_bytes(b"of other settings")
    succeeded(prepare("55"))
    assert (data / "bin/spm.model").stat().st_size > 99
    assert lines[150] in (data / "raw/train.en-fr.en").read_text()


# A step whose processes tell their numbers, and then take long for a unit.
ENDLESS = """
import os, sys, time
from pathlib import Path
from smoe_fairseq.recipes.data.text_files import parallel_map
from smoe_fairseq.errors import ends_with_sentence
from smoe_fairseq.files import whole_folder

def work(unit):
    Path(f"pids/{os.getpid()}").touch()
    time.sleep(0.02 if unit < 60 else 600)
    return unit

@ends_with_sentence()
def main():
    with whole_folder(Path("out")) as partial, parallel_map(work, 3, 1 << 30) as each:
        for unit in each(range(10_000)):
            (partial / str(unit)).touch()

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.fixture
def endless(tmp_path):
    """A step once its three processes work, and these."""
    (tmp_path / "pids").mkdir()
    (tmp_path / "endless.py").write_text(ENDLESS)
    process = started([sys.executable, "endless.py"], tmp_path, process_group=0)

    def pids():
        return [int(path.name) for path in (tmp_path / "pids").iterdir()]

    wait_until(lambda: len(pids()) == 3, process)
    yield process, pids()
    process.kill()
    process.communicate()


def test_a_process_that_is_killed(tmp_path, endless):
    process, pids = endless
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 1
    wait_until(lambda: all(map(ended, pids)))
    assert output.startswith("error: ") and output.count("\n") == 1 and "--workers" in output
    assert not list(tmp_path.glob("out*"))


def test_interrupted_at_a_terminal(tmp_path, endless):
    """Which sends the signal to all of the group."""
    process, pids = endless
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=HANGS)
    assert (process.returncode, output) == (130, "")
    wait_until(lambda: all(map(ended, pids)))
    assert not list(tmp_path.glob("out*"))


def test_ended_while_a_process_starts(tmp_path, prepared):
    """Which has read a part of what it is sent."""
    text = (prepared / "raw/train.en-fr.en").read_bytes()
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/train.en-fr.en").write_bytes((3 << 20) // len(text) * text)  # for three
    words = ("encode", str(prepared / "spm.model"), "raw", "text", "--workers", "3")
    command = [sys.executable, "-P", "-m", "smoe_fairseq.recipes", *words]
    process = started(command, tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) > 1, process)
    process.terminate()
    output, _ = process.communicate(timeout=HANGS)
    assert (process.returncode, output) == (128 + signal.SIGTERM, "")


# A worker that has sent the length of its result, and not yet the result.
HALF = """
import os, struct, sys, time
from pathlib import Path
from smoe_fairseq.recipes.data.text_files import workers_for

def work(unit):
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        frame = frame.f_back
    os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1000))
    Path("begun").touch()
    time.sleep(600)

def make():
    return work

if __name__ == "__main__":
    with workers_for(make, count=2) as submit:
        submit(0)
        while not Path("begun").exists():
            time.sleep(0.01)
        sys.exit(7)
"""


def test_an_end_in_the_middle_of_a_result(tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    process = subprocess.run([sys.executable, "half.py"], cwd=tmp_path, timeout=HANGS)
    assert process.returncode == 7


def test_workers_do_not_outlive_what_started_them(endless):
    process, pids = endless
    process.kill()
    process.wait()
    wait_until(lambda: all(map(ended, pids)))
