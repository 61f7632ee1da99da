"""Recipes through their scripts: what they print, run, write and refuse."""

import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sacrebleu
import yaml
from commands import bash_functions, bash_torchrun, run

from smoe_fairseq.recipes import scores

ROOT = Path(__file__).parents[1]
DATASETS = {"phrasebook": 8, "multi30k": 6}
METHODS = {
    "dense": {"--moe-freq": "0"},
    "moe": {"--smoe-strata": "8"},
    "smoe-4-4": {"--smoe-strata": "4-4"},
    "smoe-2-2-2-2": {"--smoe-strata": "2-2-2-2"},
}


def recipe(
    cwd: Path, script: str, *words: str, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """Runs ``scripts/SCRIPT.sh WORDS`` in ``cwd``, with this Python where the checkout has none.

    fresh: the commands that it runs are started from nothing, as they are for a user.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAW", "DATA_DIR", "RUN_DIR")}
    if not fresh and "DRY_RUN" not in environment:
        inherited |= bash_functions()
    return subprocess.run(
        [ROOT / "scripts" / f"{script}.sh", *words],
        cwd=cwd,
        env=inherited | {"PATH": path, "NO_PROXY": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
    )


def table(cwd: Path, dataset: str, **environment: str) -> str:
    """What ``scripts/table.sh DATASET`` prints, which by itself has to import fairseq first."""
    folders = {"CONFIG_DIR": str(ROOT / "configs"), "DATA_DIR": "data", "RUN_DIR": "runs"}
    return run("smoe", "table", dataset, cwd=cwd, **folders | environment).stdout


def commands(result: subprocess.CompletedProcess, program: str) -> list[list[str]]:
    """The words of each printed command of a program."""
    assert result.returncode == 0, result.stderr
    return [shlex.split(x) for x in result.stdout.splitlines() if x.startswith(f"{program} ")]


def value(words: list[str], flag: str) -> str:
    """What follows the last occurrence of a flag."""
    return words[len(words) - words[::-1].index(flag)]


def refusal(result: subprocess.CompletedProcess) -> str:
    """The one sentence with which a recipe ended."""
    assert result.returncode == 1, result.stdout + result.stderr
    (sentence,) = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return sentence


def write_dataset(folder: Path, name: str, **content) -> dict[str, str]:
    """A folder of recipes with one more data set; returns the environment that selects it."""
    (folder / "datasets").mkdir(parents=True)
    for source in ("common.yaml", "methods"):
        (folder / source).symlink_to(ROOT / "configs" / source)
    (folder / "datasets" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return {"CONFIG_DIR": str(folder)}


def write_text(folder: Path, pair: str, **lines: int) -> Path:
    """Numbers written out as a corpus: ``lines`` sentences for each split."""
    folder.mkdir(exist_ok=True)
    first, second = pair.split("-")
    for start, (split, count) in enumerate(lines.items()):
        numbers = [f"{1000 * start + i}" for i in range(count)]
        (folder / f"{split}.{pair}.{first}").write_text(
            "".join(f"{' '.join(n)} is a number\n" for n in numbers)
        )
        (folder / f"{split}.{pair}.{second}").write_text(
            "".join(f"le nombre  {' '.join(reversed(n))}\u2028!\n" for n in numbers)
        )
    return folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_dry_run_prints_training(tmp_path, dataset, method):
    given = {"DRY_RUN": "1", "GPUS": "0"}  # else torch is imported to count them
    result = recipe(tmp_path, "train", dataset, method, "--max-update", "7", **given)
    (words,) = commands(result, "fairseq-train")
    assert words[1] == f"data/{dataset}/bin"
    assert Path(value(words, "--user-dir")).name == "smoe_fairseq"
    assert value(words, "--task") == "translation_multi_simple_epoch"
    assert value(words, "--encoder-langtok") == "tgt"
    assert value(words, "--arch").startswith("smoe_transformer")
    assert value(words, "--criterion") == "smoe_label_smoothed_cross_entropy"
    assert value(words, "--save-dir") == f"runs/{dataset}/{method}"
    assert len(value(words, "--lang-pairs").split(",")) == DATASETS[dataset]
    assert value(words, "--max-update") == "7"
    assert {flag: value(words, flag) for flag in METHODS[method]} == METHODS[method]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dataset", DATASETS)
def test_dry_run_prints_preparation_and_evaluation(tmp_path, dataset):
    given = {"DRY_RUN": "1", "DATA_DIR": "d", "WORKERS": "3"}
    prepared = recipe(tmp_path, "prepare", dataset, **given)
    steps = {words[3]: words for words in commands(prepared, "python") if len(words) > 4}
    assert steps["binarise"][4:6] == [dataset, f"d/{dataset}/bin.partial/text"]
    shared = [name for name, words in steps.items() if "--workers" in words]
    assert shared == [name for name in steps if name in ("gather", "encode", "binarise")]
    assert all(value(steps[name], "--workers") == "3" for name in shared)
    evaluated = recipe(tmp_path, "evaluate", dataset, "moe", DRY_RUN="1")
    assert len(commands(evaluated, "fairseq-generate")) == DATASETS[dataset]
    assert "d/" in prepared.stdout and "data/" not in prepared.stdout
    assert list(tmp_path.iterdir()) == []


def test_strata_of_a_family_and_words_at_the_end(tmp_path):
    result = recipe(tmp_path, "train", "multi30k", "smoe-4-12", "--lr", "1", DRY_RUN="1")
    (words,) = commands(result, "fairseq-train")
    assert value(words, "--smoe-strata") == "4-12"
    assert words[-2:] == ["--lr", "1"]


def test_a_seed_has_a_run_of_its_own(tmp_path):
    """But for the data set's own, whether it is given or not."""
    for given, folder in (("", "moe"), ("1", "moe"), ("2", "moe.seed-2")):
        environment = {"DRY_RUN": "1", "GPUS": "0", "SEED": given}
        result = recipe(tmp_path, "train", "multi30k", "moe", **environment)
        (words,) = commands(result, "fairseq-train")
        assert value(words, "--seed") == (given or "1")
        assert value(words, "--save-dir") == f"runs/multi30k/{folder}"
        evaluated = recipe(tmp_path, "evaluate", "multi30k", "moe", **environment)
        for words in commands(evaluated, "fairseq-generate"):
            assert value(words, "--path") == f"runs/multi30k/{folder}/checkpoint_best.pt"
    for bad in ("two", "-1", "1.5", "99999999999"):
        sentence = refusal(recipe(tmp_path, "train", "multi30k", "moe", DRY_RUN="1", SEED=bad))
        assert f"SEED={bad}: expected a whole number from 0 to" in sentence


@pytest.mark.parametrize("workers", ["0", "two", "-1"])
def test_workers_that_are_no_number(tmp_path, workers):
    sentence = refusal(recipe(tmp_path, "prepare", "phrasebook", DRY_RUN="1", WORKERS=workers))
    assert f"WORKERS={workers}: expected a whole number of at least 1" in sentence


@pytest.mark.parametrize("method", ["smoe", "smoe-", "smoe-0-4", "moe-4", "../methods/moe", ""])
def test_unknown_method(tmp_path, method):
    sentence = refusal(recipe(tmp_path, "train", "phrasebook", method, DRY_RUN="1"))
    assert all(name in sentence for name in (repr(method), "dense", "moe", "smoe-A-B-..."))


@pytest.mark.parametrize("script", ["prepare", "train", "evaluate", "table"])
def test_unknown_dataset(tmp_path, script):
    method = ["moe"] if script in ("train", "evaluate") else []
    sentence = refusal(recipe(tmp_path, script, "multi31k", *method))
    assert "'multi31k'" in sentence and "m15, m4, multi30k, opus100, phrasebook" in sentence
    assert list(tmp_path.iterdir()) == []


def test_steps_out_of_order_name_the_missing_step(tmp_path):
    assert "scripts/prepare.sh multi30k" in refusal(recipe(tmp_path, "train", "multi30k", "moe"))
    sentence = refusal(recipe(tmp_path, "evaluate", "multi30k", "moe"))
    assert "checkpoint_best.pt is missing" in sentence and "scripts/train.sh" in sentence
    assert "scripts/train.sh" in refusal(recipe(tmp_path, "table", "multi30k"))


def test_data_set_file_with_an_unknown_key(tmp_path):
    given = write_dataset(tmp_path / "configs", "odd", pairs=["a-b"], trian={})
    sentence = refusal(recipe(tmp_path, "train", "odd", "moe", DRY_RUN="1", **given))
    assert "odd.yaml" in sentence and "train" in sentence


def prepare_from(tmp_path: Path, raw: Path) -> subprocess.CompletedProcess:
    given = write_dataset(tmp_path / "configs", "tiny", pairs=["en-fr"], raw={})
    return recipe(tmp_path, "prepare", "tiny", RAW=str(raw), **given)


@pytest.mark.parametrize("name", ["train.en-fr.fr", "valid.en-fr.en"])
def test_missing_raw_file_is_named(tmp_path, name):
    raw = write_text(tmp_path / "text", "en-fr", train=5, valid=5, test=5)
    (raw / name).unlink()
    assert str(raw / name) in refusal(prepare_from(tmp_path, raw))
    assert not (tmp_path / "data/tiny/raw").exists()


def test_sides_of_different_length_are_named(tmp_path):
    raw = write_text(tmp_path / "text", "en-fr", train=5, valid=5, test=5)
    (raw / "test.en-fr.fr").write_text("one line\n")
    sentence = refusal(prepare_from(tmp_path, raw))
    assert "test.en-fr.en" in sentence and "test.en-fr.fr" in sentence
    assert not (tmp_path / "data/tiny/raw").exists()


@pytest.mark.parametrize("name", ["train.en-fr.fr", "valid.en-fr.en", "test.en-fr.en"])
def test_text_without_lines_is_named(tmp_path, name):
    raw = write_text(tmp_path / "text", "en-fr", train=5, valid=5, test=5)
    for language in ("en", "fr"):
        (raw / f"{name[:-3]}.{language}").write_text("")
    first = f"{raw}/{name[:-3]}.en is empty: en-fr needs at least one line to {name.split('.')[0]}"
    assert first in refusal(prepare_from(tmp_path, raw))
    assert not (tmp_path / "data/tiny/raw").exists()
    own = tmp_path / "data/tiny/raw"  # text that is there already is looked at too
    own.parent.mkdir(parents=True, exist_ok=True)
    raw.rename(own)
    given = {"CONFIG_DIR": str(tmp_path / "configs")}
    assert ".en is empty: " in refusal(recipe(tmp_path, "prepare", "tiny", **given))


def test_training_text_without_a_whole_pair_is_named(tmp_path):
    raw = write_text(tmp_path / "text", "en-fr", train=2, valid=5, test=5)
    (raw / "train.en-fr.en").write_text("a\n\n")
    (raw / "train.en-fr.fr").write_text(" \nb\n")
    sentence = refusal(prepare_from(tmp_path, raw))
    assert "train.en-fr.en and" in sentence and "no line with text on both sides" in sentence


def test_damaged_archive_is_named(tmp_path):
    raw = write_text(tmp_path / "text", "en-fr", train=5, valid=5, test=5)
    (raw / "test.en-fr.fr").rename(raw / "test.en-fr.fr.gz")
    assert "test.en-fr.fr.gz is damaged" in refusal(prepare_from(tmp_path, raw))


def test_raw_has_to_be_a_folder(tmp_path):
    assert "RAW" in refusal(prepare_from(tmp_path, tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A run from raw text to scores: one pair with test data, one without, three updates."""
    folder = tmp_path_factory.mktemp("tiny")
    raw = write_text(folder / "text", "en-fr", train=300, valid=20, test=12)
    write_text(raw, "en-de", train=300, valid=20)
    given = write_dataset(
        *(folder / "configs", "tiny"),
        pairs=["en-fr", "en-de"],
        raw={},
        subwords={"vocab-size": 60},
        train={
            **{"arch": "smoe_transformer_tiny", "max-tokens": 500, "max-update": 3},
            **{"lr": 0.01, "warmup-updates": 1, "num-workers": 0},
        },
        generate={"max-tokens": 1000, "max-len-b": 10, "num-workers": 0},
    )
    given |= {"OMP_NUM_THREADS": "1"}
    results = {
        "prepare": recipe(folder, "prepare", "tiny", RAW=str(raw), **given),
        "train": recipe(folder, "train", "tiny", "smoe-2-2", **given),
        "evaluate": recipe(folder, "evaluate", "tiny", "smoe-2-2", "--beam", "2", **given),
        "table": recipe(folder, "table", "tiny", **given),
        "again": recipe(folder, "prepare", "tiny", RAW=str(raw), **given),
    }
    for result in results.values():
        assert result.returncode == 0, result.stdout + result.stderr
    return folder, results


def test_prepared_text_is_the_raw_text(tiny):
    from fairseq.data import Dictionary, data_utils

    folder, results = tiny
    binary = folder / "data/tiny/bin"
    dictionaries = {(binary / f"dict.{lang}.txt").read_text() for lang in ("en", "fr", "de")}
    assert dictionaries == {(binary / "dict.txt").read_text()}
    dictionary = Dictionary.load(str(binary / "dict.txt"))
    for split, language in (("train", "en"), ("valid", "fr"), ("test", "fr")):
        name = f"{split}.en-fr.{language}"
        data = data_utils.load_indexed_dataset(str(binary / name), dictionary)
        decoded = [dictionary.string(line, "sentencepiece") for line in data]
        assert decoded == (folder / "data/tiny/raw" / name).read_text().splitlines()
        assert decoded == [" ".join(x.split()) for x in open(folder / "text" / name, newline="\n")]
    assert not list(folder.glob("data/**/*.partial"))
    assert "prepared already" in results["again"].stdout


def test_scores_are_those_of_the_translations_against_raw_references(tiny):
    folder, results = tiny
    run = folder / "runs/tiny/smoe-2-2"
    content = json.loads((run / "scores.json").read_text())
    assert list(content["scores"]) == ["fr-en", "en-fr"]
    for direction, score in content["scores"].items():
        target = direction.split("-")[1]
        generated = (run / "test" / direction / "generate-test.txt").read_text().splitlines()
        found = [line.split("\t") for line in generated if line.startswith("D-")]
        ordered = [text for _, _, text in sorted(found, key=lambda words: int(words[0][2:]))]
        assert (run / f"test/{direction}.txt").read_text().splitlines() == ordered
        references = (folder / f"text/test.en-fr.{target}").read_text().split("\n")[:-1]
        bleu = sacrebleu.corpus_bleu(ordered, [references], force=True)
        expected = bleu.score
        assert score["bleu"] == pytest.approx(expected, abs=0.005)
        assert score["sentences"] == 12 and "tok:13a" in score["signature"]
        assert score["length_ratio"] == pytest.approx(bleu.sys_len / bleu.ref_len, abs=0.0005)
        said = f"# {direction}: BLEU {expected:.2f}, {score['length_ratio']:.2f} of the references' length"
        assert said in results["evaluate"].stdout
        warned = f"warning: the translations of {direction}" in results["evaluate"].stderr
        assert warned == (not 0.8 <= score["length_ratio"] <= 1.2)
    assert content["checkpoint"] == "checkpoint_best.pt"
    assert content["generate"].endswith("--beam 2")
    assert not (run / "test.partial").exists()


def test_a_score_without_lengths_is_shown_without():
    """As in files from before they were kept."""
    assert str(scores.Score(30.0, "s", 3)) == "BLEU 30.00"
    assert str(scores.Score(30.0, "s", 3, 1.234)) == "BLEU 30.00, 1.23 of the references' length"
    odd = [
        r for r in (0.7, 0.8, 1.0, 1.2, 1.3, None) if scores.Score(30.0, "s", 3, r).has_odd_length
    ]
    assert odd == [0.7, 1.3]


def test_direction_without_test_data_is_reported_and_left_out(tiny):
    _, results = tiny
    assert "test.en-de" in results["prepare"].stderr
    assert all(f"warning: {d}" in results["evaluate"].stderr for d in ("de-en", "en-de"))
    assert "| smoe-2-2 |" in results["table"].stdout.splitlines()[2]
    assert results["table"].stdout.splitlines()[2].count(" - |") == 3  # two directions, average


def test_experts_of_several_processes_are_evaluated_as_those_of_one(tiny):
    folder, results = tiny
    given = dict(CONFIG_DIR=str(folder / "configs"), RUN_DIR="sharded", OMP_NUM_THREADS="1")
    given |= bash_torchrun()
    flags = ["--cpu", "--expert-parallel"]
    trained = recipe(folder, "train", "tiny", "smoe-2-2", *flags, GPUS="2", **given)
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    run = folder / "sharded/tiny/smoe-2-2"
    assert (run / "checkpoint_best-rank-1.pt").exists()
    for _ in range(2):  # the second time over what the first one wrote
        evaluated = recipe(folder, "evaluate", "tiny", "smoe-2-2", "--cpu", **given)
        assert evaluated.returncode == 0, evaluated.stderr
    assert commands(evaluated, "smoe")[0][1] == "consolidate"
    assert list(json.loads((run / "scores.json").read_text())["scores"]) == ["fr-en", "en-fr"]


def test_training_goes_to_terminal_and_log(tiny):
    folder, results = tiny
    log = (folder / "runs/tiny/smoe-2-2/train.log").read_text()
    assert "requested_capacity" in log and "requested_capacity" in results["train"].stdout


class Files(http.server.BaseHTTPRequestHandler):
    """Serves ``server.files``, at most ``server.bytes_per_reply`` of it before it hangs up."""

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])
        content = self.server.files[self.path.strip("/")]
        self.server.starts.append(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + self.server.bytes_per_reply])

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        server.files = {
            f"{split}.{language}": f"{language} {split}\n".encode() * 100
            for split in ("train", "dev", "test")
            for language in ("en", "fr")
        }
        server.bytes_per_reply = 10_000
        server.starts = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def fetch_from(tmp_path: Path, address: str, **raw) -> subprocess.CompletedProcess:
    """Prepares a data set that is to be downloaded, as far as its text."""
    raw |= {"files": "{split}.{language}", "splits": {"valid": "dev"}}
    raw |= {"url": f"http://{address}/{{file}}"}
    if not (tmp_path / "configs").exists():
        write_dataset(
            tmp_path / "configs", "remote", pairs=["en-fr"], raw=raw, subwords={"vocab-size": 2}
        )
    return recipe(tmp_path, "prepare", "remote", CONFIG_DIR=str(tmp_path / "configs"))


def test_interrupted_download_resumes(tmp_path, server):
    address = f"127.0.0.1:{server.server_port}"
    server.bytes_per_reply = 200
    sentence = refusal(fetch_from(tmp_path, address))
    assert "/train.en (" in sentence and "RAW=folder" in sentence
    folder = tmp_path / "data/remote/download"
    assert [path.name for path in folder.iterdir()] == ["train.en.part"]
    assert (folder / "train.en.part").read_bytes() == server.files["train.en"][:600]

    server.bytes_per_reply = 10_000
    fetch_from(tmp_path, address)  # As far as sentencepiece, which two pieces are too few for.
    assert server.starts[:4] == [0, 200, 400, 600]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == server.files
    assert len(list((tmp_path / "data/remote/raw").iterdir())) == 6


def test_corrupt_download_is_refused(tmp_path, server):
    address = f"127.0.0.1:{server.server_port}"
    sentence = refusal(fetch_from(tmp_path, address, sha256={"train.en": "0" * 64}))
    assert "/train.en has the SHA-256 checksum" in sentence
    assert list((tmp_path / "data/remote/download").iterdir()) == []


def test_offline_names_the_alternative(tmp_path, server):
    address = f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    sentence = refusal(fetch_from(tmp_path, address))
    assert "/train.en (" in sentence and "RAW=folder" in sentence
    assert list((tmp_path / "data/remote/download").iterdir()) == []
