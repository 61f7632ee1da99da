"""Archives: served over HTTP on loopback, resumed, checked, unpacked, and trained on."""

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from commands import run_step, step_here, succeeded
from test_recipes import ROOT, commands, recipe, refusal, server

assert server  # a fixture

SPLITS = {"train": 60, "dev": 8, "test": 6}
LONG = " ".join("x" * 700)  # The last sentence of each test set: longer than the model's positions.


def sentences(language: str, split: str) -> bytes:
    numbers = (f"{i * len(split)}" for i in range(SPLITS.get(split, 10)))
    lines = [f"{language} {' '.join(n)} {language}" for n in numbers]
    return "".join(f"{x}\n" for x in [*lines, LONG][: None if split == "test" else -1]).encode()


def tar(files: dict[str, bytes], compression: str = "gz") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=f"w:{compression}") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return content.getvalue()


def opus100() -> bytes:
    """The official archive's layout, with a zero-shot pair, and a pair without validation and test."""
    files = {}
    for pair in ("af-en", "en-fr", "an-en"):
        for split in SPLITS if pair != "an-en" else ["train"]:
            for language in pair.split("-"):
                name = f"opus-100-corpus/v1.0/supervised/{pair}/opus.{pair}-{split}.{language}"
                files[name] = sentences(language, split)
    files["opus-100-corpus/v1.0/zero-shot/ar-de/opus.ar-de-test.ar"] = b"nothing for us\n"
    return tar(files)


def configuration(folder: Path, name: str, server, archives: list[dict], **changes) -> dict:
    """The recipe as it is, but for the archives' addresses and ``changes``; selects it."""
    (folder / "datasets").mkdir(parents=True)
    for source in ("common.yaml", "paper.yaml", "methods"):
        (folder / source).symlink_to(ROOT / "configs" / source)
    parent = yaml.safe_load((ROOT / "configs/nllb.yaml").read_text())
    own = yaml.safe_load((ROOT / f"configs/datasets/{name}.yaml").read_text())
    for content in (parent, own):
        if "raw" in content:
            content["raw"]["archives"] = [
                {"url": f"http://127.0.0.1:{server.server_port}/{archive['file']}"} | archive
                for archive in archives
            ]
    for key, change in changes.items():
        own[key] = own.get(key, {}) | change if isinstance(change, dict) else change
    (folder / "nllb.yaml").write_text(yaml.safe_dump(parent))
    (folder / "datasets" / f"{name}.yaml").write_text(yaml.safe_dump(own))
    return {"CONFIG_DIR": str(folder), "GPUS": "0", "WORKERS": "1", "OMP_NUM_THREADS": "1"}


def small_opus100(tmp_path: Path, server, **archive) -> dict:
    server.files["opus.tar.gz"] = opus100()
    return configuration(
        *(tmp_path / "configs", "opus100", server, [{"file": "opus.tar.gz"} | archive]),
        pairs=["en-af", "en-fr"],
        shards=2,
        train={"max-update": 2, "num-workers": 0, "arch": "smoe_transformer_tiny"},
    )


TRAINED = sentences("fr", "train").decode().splitlines()


def shard_lines(folder: Path) -> list[list[str]]:
    """The French training text of each shard."""
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    files = [str(folder / shard / "train.en-fr.fr") for shard in ("shard0", "shard1")]
    shards = [data_utils.load_indexed_dataset(file, dictionary) for file in files]
    return [[dictionary.string(line, "sentencepiece") for line in shard] for shard in shards]


@pytest.mark.soak
def test_opus100_from_archive_to_training(tmp_path, server):
    given = small_opus100(tmp_path, server)
    size = len(server.files["opus.tar.gz"])
    server.bytes_per_reply = size // 5 + 1
    assert "opus.tar.gz (" in refusal(recipe(tmp_path, "prepare", "opus100", **given))
    data = tmp_path / "data/opus100"
    there = sorted(path.name for path in (data / "download").iterdir())
    assert there == ["opus.tar.gz.part", "opus.tar.gz.part.version"]

    server.starts.clear()
    prepared = succeeded(recipe(tmp_path, "prepare", "opus100", "--vocab-size", "60", **given))
    assert server.starts[0] == 3 * server.bytes_per_reply and len(server.starts) == 2
    assert (data / "download/opus.tar.gz").read_bytes() == server.files["opus.tar.gz"]
    assert json.loads((data / "sizes.json").read_text()) == {"en-af": 60, "en-fr": 60}
    unpacked = {path.name for path in (data / "unpacked").rglob("*") if path.is_file()}
    assert len(unpacked) == 12 and "opus.af-en-dev.af" in unpacked
    assert (data / "raw/test.en-af.en").read_bytes() == sentences("en", "test")
    assert (data / "raw/valid.en-fr.fr").read_bytes() == sentences("fr", "dev")
    assert not list(data.glob("**/*.partial"))
    assert shard_lines(data / "bin") == [TRAINED[0::2], TRAINED[1::2]]
    assert not (data / "bin/shard1/valid.en-fr.fr.bin").exists()
    assert "1 lines of data/opus100/raw/test.en-fr.fr have more than 510 pieces" in prepared.stderr
    assert (data / "raw/test.en-fr.fr").read_text().endswith(f"{LONG}\n")

    succeeded(recipe(tmp_path, "train", "opus100", "smoe-2-2", **given))
    log = (tmp_path / "runs/opus100/smoe-2-2/train.log").read_text()
    assert "num of shards: {'main:af-en': 2" in log


def test_m4_from_text(tmp_path, server):
    """A folder of NLLB's text and of Flores-200 as it is published."""
    files = {f"train.eng-nso.{code}": sentences(code, "train") for code in ("eng", "nso")}
    for split in ("dev", "devtest"):
        for code in ("eng_Latn", "nso_Latn", "zsm_Latn"):
            name = f"flores200_dataset/{split}/{code}.{split}"
            files[name] = sentences(code[:3], split)
    for name, content in files.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_bytes(content)
    given = configuration(tmp_path / "configs", "m4", server, [], pairs=["eng-nso"], shards=2)
    words = ("prepare", "m4", "--vocab-size", "60")
    succeeded(recipe(tmp_path, *words, RAW=str(tmp_path / "text"), **given))
    raw = tmp_path / "data/m4/raw"
    assert len(list(raw.glob("[!.]*"))) == 6
    assert (raw / "train.eng-nso.nso").read_bytes() == sentences("nso", "train")
    assert (raw / "test.eng-nso.eng").read_bytes() == sentences("eng", "devtest")
    assert (raw / "valid.eng-nso.nso").read_bytes() == sentences("nso", "dev")
    trained = recipe(tmp_path, "train", "m4", "moe", DRY_RUN="1", **given)
    (words,) = commands(trained, "fairseq-train")
    assert words[1] == "data/m4/bin/shard0:data/m4/bin/shard1"


@pytest.mark.parametrize("known", [{"sha256": "0" * 64}, {"size": 7}])
def test_download_of_wrong_content_is_refused(tmp_path, server, known):
    given = small_opus100(tmp_path, server, **known)
    sentence = refusal(recipe(tmp_path, "prepare", "opus100", **given))
    assert "/opus.tar.gz has " in sentence and "as expected" in sentence
    download = tmp_path / "data/opus100/download"
    assert list(download.iterdir()) == []
    (download / "opus.tar.gz").write_bytes(b"put here by hand")
    assert "opus.tar.gz has " in refusal(recipe(tmp_path, "prepare", "opus100", **given))


@pytest.mark.parametrize("url", ["www/opus.tar.gz", "http://me:secret@127.0.0.1/opus.tar.gz"])
def test_an_address_that_cannot_be_read_is_refused(tmp_path, server, url):
    sentence = refusal(
        recipe(tmp_path, "prepare", "opus100", **small_opus100(tmp_path, server, url=url))
    )
    assert "url" in sentence and "opus.tar.gz" in sentence and "secret" not in sentence
    assert not (tmp_path / "data/opus100/download").exists()


def test_a_checksum_in_capital_letters(tmp_path, server):
    checksum = hashlib.sha256(opus100()).hexdigest().upper()
    given = small_opus100(tmp_path, server, sha256=checksum)
    step(tmp_path, given, "fetch", "opus100", tmp_path / "got")
    assert (tmp_path / "got/opus.tar.gz").is_file()


def test_download_that_only_lacked_its_name_is_not_repeated(tmp_path, server):
    given = small_opus100(tmp_path, server)
    download = tmp_path / "data/opus100/download"
    download.mkdir(parents=True)
    (download / "opus.tar.gz.part").write_bytes(server.files["opus.tar.gz"])
    (download / "opus.tar.gz.part.version").write_text(server.version)
    step(tmp_path, given, "fetch", "opus100", download)
    assert server.starts == [len(server.files["opus.tar.gz"])]
    assert (download / "opus.tar.gz").read_bytes() == server.files["opus.tar.gz"]


def step(tmp_path: Path, given: dict, *words, check=True) -> subprocess.CompletedProcess:
    """One of the steps that a recipe prints, in this process; ``stdout`` holds stderr too."""
    result = step_here(*words, cwd=tmp_path, **given | {"NO_PROXY": "127.0.0.1"})
    result.stdout += result.stderr
    assert result.returncode == 0 or not check, result.stdout
    return result


def test_tokenizer_that_cannot_be_fetched(tmp_path):
    """sacreBLEU's model for flores200: the sentence says what to put where."""
    given = {"SACREBLEU": str(tmp_path / "here"), "https_proxy": "http://127.0.0.1:9"}
    result = run_step("tokenizer", "flores200", cwd=tmp_path, **given | {"NO_PROXY": ""})
    assert f"put it at {tmp_path}/here/models/flores200sacrebleuspm" in refusal(result)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
