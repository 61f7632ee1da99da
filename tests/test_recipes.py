"""Recipes through their scripts: what they print, run, write and refuse."""

import gzip
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from commands import (
    bash_functions,
    bash_torchrun,
    contents,
    refused,
    run_step,
    step_here,
    succeeded,
    touch_binarised,
)
from sampling import soak

from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.recipes.commands import RECIPES

ROOT = Path(__file__).parents[1]
refusal = refused  # the one sentence with which a recipe ended
# Without which a data set cannot be trained.
TRAIN = {"arch": "smoe_transformer_tiny", "lr": 0.01, "max-tokens": 500, "max-update": 9}


def recipe(
    cwd: Path, script: str, *words: str, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """Runs what ``scripts/SCRIPT.sh WORDS`` calls in ``cwd``, forked, or in this process (commands.py).

    fresh: the script itself, and the commands that it runs, are started from nothing, as by a user.
    """
    environment = surroundings(fresh) | {"CONFIG_DIR": str(ROOT / "configs")} | environment
    if not fresh and script in RECIPES:
        # What starts others, and what sacreBLEU reads once.
        apart = {"train", "study", "report", "demo"}
        apart |= {"evaluate"} if "SACREBLEU" in environment else set()
        dry = environment.get("DRY_RUN") or "--dry-run" in words
        start = run_step if script in apart and not dry else step_here
        return start(script, *words, cwd=cwd, **environment)
    return subprocess.run(
        [ROOT / "scripts" / f"{script}.sh", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


def surroundings(fresh: bool = False) -> dict[str, str]:
    """The environment of a recipe."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAW", "DATA_DIR", "RUN_DIR")}
    functions = {} if fresh else bash_functions()
    return inherited | functions | {"PATH": path, "NO_PROXY": "127.0.0.1"}


def table(cwd: Path, dataset: str, **environment: str) -> str:
    """What ``scripts/table.sh DATASET`` prints."""
    return recipe(cwd, "table", dataset, **environment).stdout


def commands(result: subprocess.CompletedProcess, program: str) -> list[list[str]]:
    """The words of each printed command of a program."""
    assert result.returncode == 0, result.stderr
    return [shlex.split(x) for x in result.stdout.splitlines() if x.startswith(f"{program} ")]


def value(words: list[str], flag: str) -> str:
    """What follows the last occurrence of a flag."""
    return words[len(words) - words[::-1].index(flag)]


def write_dataset(folder: Path, name: str, **content) -> dict[str, str]:
    """A folder of recipes with one more data set; returns the environment that selects it.

    Its subwords have no bytes among them, which would be more than all others of so little text.
    """
    if not content.get("pretrained"):  # a model with subwords
        content["subwords"] = {"byte-fallback": False, **content.get("subwords", {})}
    (folder / "datasets").mkdir(parents=True)
    for source in ("common.yaml", "methods"):
        (folder / source).symlink_to(ROOT / "configs" / source)
    (folder / "datasets" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return {"CONFIG_DIR": str(folder)}


def test_the_demo_ignores_no_words(tmp_path):
    result = recipe(tmp_path, "demo", "dense", "--max-update", "5", fresh=True, DRY_RUN="1")
    assert result.returncode == 2 and "--max-update" in result.stderr


def tiny_place(folder: Path, data: Path, **train) -> dict[str, str]:
    """The environment of a machine without a GPU, where a tiny data set has been prepared in ``folder``."""
    sizes = {"arch": "smoe_transformer_tiny", "encoder-embed-dim": 32, "encoder-ffn-embed-dim": 48}
    train = {**sizes, "lr": 0.01, "num-workers": 0, **train}
    given = write_dataset(folder / "configs", "tiny", pairs=["src-tgt"], raw={}, train=train)
    (folder / "data/tiny").mkdir(parents=True)
    (folder / "data/tiny/bin").symlink_to(data)
    return given | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | bash_torchrun()


def write_text(folder: Path, pair: str, **lines: int) -> Path:
    """Numbers written out as a corpus: ``lines`` sentences for each split."""
    folder.mkdir(exist_ok=True, parents=True)
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


def test_a_folder_of_ones_own_is_the_only_one(tmp_path):
    given = {"DRY_RUN": "1", "GPUS": "0"}
    result = recipe(tmp_path, "train", "phrasebook", "dense", "--save-dir", "own", **given)
    (words,) = commands(result, "fairseq-train")
    assert value(words, "--save-dir") == "own" and value(words, "--log-file") == "own/train.log"
    assert commands(result, "mkdir") == [["mkdir", "-p", "own"]]


def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path):
    """A recipe and each of its steps start in half a second where torch would take them three."""
    program = """
import sys
sys.modules.update(dict.fromkeys(("torch", "scipy", "fairseq")))
from smoe_fairseq.recipes.__main__ import main
for words in ("prepare multi30k", "train multi30k moe", "evaluate m4 moe"):
    sys.argv[1:] = words.split()
    main()
"""
    given = surroundings(fresh=True) | {"DRY_RUN": "1", "GPUS": "0"}
    given |= {"CONFIG_DIR": str(ROOT / "configs")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert result.returncode == 0 and "fairseq-generate" in result.stdout, result.stderr


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
    for bad in ("-1", "99999999999"):
        given = {"DRY_RUN": "1", "SEED": bad}
        refused(recipe(tmp_path, "train", "multi30k", "moe", **given), f"--seed {bad}")


@pytest.mark.parametrize("method", ["smoe", "smoe-4-0", "moe-4", "../methods/moe", ""])
def test_unknown_method(tmp_path, method):
    sentence = refusal(recipe(tmp_path, "train", "phrasebook", method, DRY_RUN="1"))
    assert all(name in sentence for name in (repr(method), "dense", "moe", "smoe-A-B-..."))


@pytest.mark.parametrize("script", ["train", soak("slurm")])
def test_a_script_may_be_given_to_sh(tmp_path, script):
    """Which is not bash everywhere."""
    command = ["sh", ROOT / f"scripts/{script}.sh", "phrasebook", "moe", "--dry-run"]
    given = surroundings(fresh=True) | {"GPUS": "0"}
    result = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert "fairseq-train data/phrasebook/bin" in result.stdout, result.stderr


def test_a_recipe_is_no_rank_of_torchrun(tmp_path):
    given = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}
    sentence = refusal(recipe(tmp_path, "train", "phrasebook", "moe", **given))
    assert "torchrun" in sentence and "--gpus" in sentence


def test_unknown_dataset(tmp_path):
    known = sorted(file.stem for file in (ROOT / "configs/datasets").glob("*.yaml"))
    for name in ("multi31k", "configs/datasets/multi30k.yaml"):
        sentence = refusal(recipe(tmp_path, "train", name, "moe"))
        assert f"'{name}'" in sentence and "configs/datasets" in sentence
        assert "mean multi30k?" in sentence and ", ".join(known) in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", "-rank-0"])
def test_without_its_last_checkpoint_a_run_goes_on_from_the_newest(tmp_path, suffix):
    folder = tmp_path / "runs/multi30k/moe"
    folder.mkdir(parents=True)
    for name in ("1_10", "2_20", "1_5", "_best"):
        (folder / f"checkpoint_{name.strip('_')}{suffix}.pt").touch()
    given = {"DRY_RUN": "1", "GPUS": "0"}
    printed = recipe(tmp_path, "train", "multi30k", "moe", **given).stdout
    assert "--restore-file runs/multi30k/moe/checkpoint_2_20.pt" in printed
    start = ("--finetune-from-model", str(tmp_path / "upcycled.pt"))  # which both cannot be given
    assert recipe(tmp_path, "train", "multi30k", "moe", *start, **given).stdout == printed
    (folder / f"checkpoint_last{suffix}.pt").touch()
    assert "--restore-file" not in recipe(tmp_path, "train", "multi30k", "moe", **given).stdout
    # With a file, the same command goes on with what was saved since; crash.pt is newer.
    file = tmp_path / "crash.pt"
    file.touch()
    words, lasts = ("train", "multi30k", "moe", "--restore-file", str(file)), []
    for time in (1, 3):
        os.utime(file, (time, time))
        os.utime(folder / f"checkpoint_last{suffix}.pt", (2, 2))
        lasts.append(
            recipe(tmp_path, *words, **given).stdout.split("--restore-file ")[-1].split()[0]
        )
    assert lasts == ["checkpoint_last.pt", str(file)]
    # The file that it began with may have been copied since without its times.
    own = {"method": "moe", "dictionary": "", "flags": {}, "restored": fingerprint(file)}
    (folder / "identity.json").write_text(json.dumps(own))
    printed = recipe(tmp_path, *words, "--reset-optimizer", **given).stdout
    assert "--restore-file checkpoint_last.pt" in printed and "--reset" not in printed
    last = folder / f"checkpoint_last{suffix}.pt"
    last.write_bytes(b"PK, and the rest is lost")
    os.utime(file, (1, 1))
    for given_words in (words[:3], words, (*words[:3], *start)):
        sentence = refusal(recipe(tmp_path, *given_words, **given))
        assert f"{last.relative_to(tmp_path)} is cut off" in sentence


@pytest.mark.parametrize("method, told", [("smoe-44", True), ("smoe-4-4", False)])
def test_a_name_of_one_stratum_is_told(tmp_path, method, told):
    given = {"DRY_RUN": "1", "GPUS": "0"}
    said = recipe(tmp_path, "train", "multi30k", method, **given)
    assert said.returncode == 0 and ("44 experts" in said.stderr) == told


def test_steps_out_of_order_name_the_missing_step(tmp_path):
    assert "scripts/prepare.sh multi30k" in refusal(recipe(tmp_path, "train", "multi30k", "moe"))
    sentence = refusal(recipe(tmp_path, "evaluate", "multi30k", "moe"))
    assert "checkpoint_best.pt is missing" in sentence and "scripts/train.sh" in sentence
    assert "scripts/train.sh" in refusal(recipe(tmp_path, "table", "multi30k"))
    (tmp_path / "runs/multi30k/moe").mkdir(parents=True)
    (tmp_path / "runs/multi30k/moe/checkpoint_last-rank-0.pt").touch()
    assert "--checkpoint last" in refusal(recipe(tmp_path, "evaluate", "multi30k", "moe"))


@pytest.mark.parametrize("words", ["prepare tiny", "train tiny dense", "study tiny dense"])
@pytest.mark.parametrize("name", ["dict.c.txt", "valid.a-b.b.idx", "train.a-b.a.bin"])
def test_what_a_prepared_data_set_lacks_is_named(tmp_path, words, name):
    given = write_dataset(tmp_path / "configs", "tiny", pairs=["a-b", "c-a"], raw={})
    binary = touch_binarised(tmp_path, "tiny", "a-b", "a-c")
    (binary / name).unlink() if name.endswith("idx") else (binary / name).write_text("")
    assert name in refusal(step_here(*words.split(), cwd=tmp_path, GPUS="0", **given))


def test_a_resumed_run_keeps_the_checkpoints_that_it_has(tmp_path):
    folder = tmp_path / "runs/multi30k/moe"
    folder.mkdir(parents=True)
    for name in ("checkpoint_1_4.pt", "checkpoint_1_8.pt", "checkpoint2.pt"):
        (folder / name).touch()
    given, flag = {"DRY_RUN": "1", "GPUS": "0"}, "--keep-interval-updates"
    for typed, number in (((), "2"), ((flag, "1"), "1")):
        printed = succeeded(recipe(tmp_path, "train", "multi30k", "moe", *typed, **given)).stdout
        assert re.findall(rf"{flag} (\S+)", printed)[-1] == number
        assert "--no-epoch-checkpoints" in printed
    of_epochs = recipe(tmp_path, "train", "multi30k", "moe", "--keep-last-epochs", "2", **given)
    assert "--no-epoch-checkpoints" not in of_epochs.stdout


def test_a_home_that_no_shell_has_expanded(tmp_path):
    """As in the ENV of a Dockerfile."""
    given = {"HOME": str(tmp_path), "RUN_DIR": "~/runs", "DRY_RUN": "1", "GPUS": "0"}
    printed = recipe(tmp_path, "train", "m4", "moe", **given)
    assert printed.returncode == 0 and f"--save-dir {tmp_path}/runs/m4/moe" in printed.stdout


def test_text_that_is_there_already_may_not_be_empty(tmp_path):
    write_text(tmp_path / "data/tiny/raw", "en-fr", train=5, valid=5, test=0)
    given = write_dataset(tmp_path / "configs", "tiny", pairs=["en-fr"], raw={})
    assert "test.en-fr.en is empty: " in refusal(recipe(tmp_path, "prepare", "tiny", **given))


def prepare_from(tmp_path: Path, raw: Path, *flags: str) -> subprocess.CompletedProcess:
    given = write_dataset(tmp_path / "configs", "tiny", pairs=["en-fr"], raw={})
    words, given = ("prepare", "tiny", *flags), surroundings() | given | {"RAW": str(raw)}
    return run_step(*words, cwd=tmp_path, **given)  # of which a process of its own learns subwords


@pytest.mark.parametrize("kind", ["itself", "within", "links", "notes", "subwords"])
def test_text_is_not_replaced_by_its_preparation(tmp_path, kind):
    (tmp_path / "data/tiny").mkdir(parents=True)
    raw = write_text(tmp_path / "data/tiny/raw", "en-fr", train=300, valid=5, test=5)
    (raw / "train.en-fr.en").write_text("two  blanks\n" * 300)
    source, named = raw, raw
    if kind == "within":
        source = named = write_text(raw / "original", "en-fr", train=300, valid=5, test=5)
    elif kind == "links":
        (source := tmp_path / "links").mkdir()
        for file in raw.iterdir():
            (source / file.name).symlink_to(file)
        named = source / "train.en-fr.en"
    elif kind in ("notes", "subwords"):
        source = write_text(tmp_path / "text", "en-fr", train=300, valid=5, test=5)
    if kind == "notes":
        (named := raw / "notes").touch()
    (sizes := raw.with_name("sizes.json")).write_text("{}")
    before = contents(raw)
    flags = ["--vocab-size", "4"] if kind == "subwords" else []  # too few
    sentence = refusal(prepare_from(tmp_path, source, *flags))
    assert ("--vocab-size 4" if flags else str(named.relative_to(tmp_path))) in sentence
    assert contents(raw) == before and not list(tmp_path.glob("data/tiny/*.partial"))
    assert sizes.read_text() == "{}"
    if kind == "itself":
        given = {"CONFIG_DIR": str(tmp_path / "configs"), "DRY_RUN": "1"}
        succeeded(recipe(tmp_path, "prepare", "tiny", RAW="not yet there", **given))


class Files(http.server.BaseHTTPRequestHandler):
    """Serves ``server.files``, at most ``server.bytes_per_reply`` of it before it hangs up."""

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])
        content = self.server.files.get(self.path.strip("/"))
        if self.headers.get("If-Range", self.server.version) != self.server.version:
            start = 0
        self.server.starts.append(start)
        if content is None:
            self.send_error(self.server.status)
            return
        beyond = 0 < start >= len(content)
        self.send_response(416 if beyond else 206 if start else 200)
        if self.server.measured:
            self.send_header("Content-Length", str(max(0, len(content) - start)))
        if beyond:
            self.send_header("Content-Range", f"bytes */{len(content)}")
        if self.server.version:
            self.send_header("ETag", self.server.version)
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
        server.bytes_per_reply, server.version, server.starts = 10**9, '"1"', []
        server.measured = True
        # The argument is how often it looks whether it is to end.
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


def fetch_from(tmp_path: Path, address: str, **raw) -> subprocess.CompletedProcess:
    """Prepares a data set that is to be downloaded, as far as its text."""
    raw = {"files": "{split}.{language}", "splits": {"valid": "dev"}} | raw
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
    assert "/train.en (" in sentence and "--raw folder" in sentence
    folder = tmp_path / "data/remote/download"
    assert {p.name for p in folder.iterdir()} == {"train.en.part", "train.en.part.version"}
    assert (folder / "train.en.part").read_bytes() == server.files["train.en"][:600]

    server.bytes_per_reply = 10**9
    fetch_from(tmp_path, address)  # As far as sentencepiece, which two pieces are too few for.
    assert server.starts[:4] == [0, 200, 400, 600]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == server.files
    assert len(list((tmp_path / "data/remote/raw").glob("[!.]*"))) == 6


@pytest.mark.parametrize(
    "content", [b"", b"\n<!DOCTYPE html><p>Log in", gzip.compress(bytes(10**5), mtime=0)[:-9]]
)
def test_a_bad_download_does_not_stay(tmp_path, server, content):
    address = f"127.0.0.1:{server.server_port}"
    good = {f"{name}.gz": gzip.compress(text) for name, text in server.files.items()}
    server.files, server.measured = dict.fromkeys(good, content), content[:1] in (b"", b"\n")
    names = {"files": "{split}.{language}.gz"}
    assert "/train.en.gz has " in refusal(fetch_from(tmp_path, address, **names))
    folder = tmp_path / "data/remote/download"
    assert not list(folder.iterdir())
    server.files = good
    fetch_from(tmp_path, address, **names)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good
    if server.measured:  # of an earlier version
        (folder / "train.en.gz").write_bytes(content)
        shutil.rmtree(tmp_path / "data/remote/raw")
        assert "download/train.en.gz has " in refusal(fetch_from(tmp_path, address, **names))


@pytest.mark.parametrize("version", ['"2"', ""])
def test_versions_of_a_download_are_not_mixed(tmp_path, server, version):
    address = f"127.0.0.1:{server.server_port}"
    server.version = '"1"' if version else ""
    server.bytes_per_reply = 200
    refusal(fetch_from(tmp_path, address))
    server.files = {name: content.swapcase() for name, content in server.files.items()}
    server.version, server.bytes_per_reply = version, 10**9
    fetch_from(tmp_path, address)
    folder = tmp_path / "data/remote/download"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == server.files


@pytest.mark.parametrize("status, attempts", [(404, 1), (503, 3)])
def test_only_a_failure_of_the_server_is_tried_again(tmp_path, server, status, attempts):
    server.files, server.status = {}, status
    assert f"{status}" in refusal(fetch_from(tmp_path, f"127.0.0.1:{server.server_port}"))
    assert server.starts == [0] * attempts


@pytest.mark.parametrize("key, value", [("arch", "smoe_transformer_small"), ("max-updates", 9)])
def test_settings_of_the_training_are_checked_before_the_text(tmp_path, key, value):
    settings = {"arch": "smoe_transformer_tiny", key: value}
    given = write_dataset(tmp_path / "configs", "mine", pairs=["en-fr"], train=settings)
    write_text(tmp_path / "text", "en-fr", train=30, valid=20)
    said = step_here("prepare", "mine", cwd=tmp_path, RAW="text", **given)
    refused(said, "mine.yaml", f"train.{key}", value)
    assert not (tmp_path / "data").exists()


def test_no_module_of_the_current_folder_is_run(tmp_path):
    (tmp_path / "yaml.py").write_text("open('run', 'w')")
    given = write_dataset(
        tmp_path / "configs", "mine", pairs=["en-fr"], raw={}, subwords={"vocab-size": 9}
    )
    printed = succeeded(recipe(tmp_path, "prepare", "mine", DRY_RUN="1", RAW="text", **given))
    step = next(line for line in printed.stdout.splitlines() if line.startswith("python "))
    subprocess.run(["bash", "-c", step], cwd=tmp_path, env=surroundings(fresh=True))
    refusal(recipe(tmp_path, "prepare", "mine", fresh=True, RAW="text", **given))
    assert not (tmp_path / "run").exists()
