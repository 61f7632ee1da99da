"""Text in every format, cleaned, split and checked; and subwords that do not change it."""

import bz2
import csv
import gzip
import json
import lzma
import random
import sys
import unicodedata
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import yaml
from commands import refused, step_here, succeeded
from fairseq.data.indexed_dataset import MMapIndexedDataset
from sampling import soak
from test_recipes import write_dataset, write_text

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.data import prepare, readers
from smoe_fairseq.recipes.data.checks import TESTS
from smoe_fairseq.recipes.data.download import remote_files
from smoe_fairseq.recipes.data.elsewhere import read_datasets, sacrebleu_files
from smoe_fairseq.recipes.data.finding import find, hash_position
from smoe_fairseq.recipes.data.normalization import plain
from smoe_fairseq.recipes.data.raw import gather
from smoe_fairseq.recipes.data.subwords import learn_from
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.subwords import check_pieces

PAIRS = [("one two", "daya biyu"), ("a & b < c", "á ƙ\u200b ɗ"), ("the last", "na ƙarshe")]


def tmx(pairs, header="<header/>") -> str:
    units = "".join(
        f'<tu><tuv xml:lang="EN-us"><seg>{a.replace("&", "&amp;").replace("<", "&lt;")}</seg></tuv>'
        f'<tuv xml:lang="fr"><seg>autre</seg></tuv>'
        f'<tuv xml:lang="ha"><seg><bpt i="1">&lt;b&gt;</bpt>{b}<ept i="1">&lt;/b&gt;</ept></seg></tuv></tu>'
        for a, b in pairs
    )
    return f'<?xml version="1.0"?><tmx version="1.4">{header}<body>{units}</body></tmx>'


FORMATS = {
    "en-ha.tsv": lambda pairs: "".join(f"{a}\t{b}\n" for a, b in pairs),
    "ha-en.tsv": lambda pairs: "".join(f"{b}\t{a}\n" for a, b in pairs),
    "tsv": lambda pairs: "fr\tha\tEN\n" + "".join(f"x\t{b}\t{a}\n" for a, b in pairs),
    "en-ha.jsonl": lambda pairs: "".join(
        json.dumps({"translation": {"ha": b, "en": a}}) + "\n" for a, b in pairs
    ),
    "json": lambda pairs: (
        "".join(json.dumps({"en": a, "ha": b, "id": 7}) + "\n\n" for a, b in pairs)
        + '{"en": "alone"}\n'
    ),
    "tmx": tmx,
}


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Makes a data set of English and Hausa."""

    def make(pairs=("en-ha",), **content):
        for name, value in write_dataset(tmp_path / "c", "own", pairs=[*pairs], **content).items():
            monkeypatch.setenv(name, value)
        return load_dataset("own")

    return make


def lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text("utf-8").split("\n")[:-1]


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, "": bytes}


@pytest.mark.parametrize("ending, suffix", zip(FORMATS, cycle(COMPRESS)))
def test_a_format(tmp_path, dataset, ending, suffix):
    for split in ("train", "valid", "test"):
        content = FORMATS[ending]([*PAIRS, (split, split)])
        (tmp_path / f"{split}.{ending}{suffix}").write_bytes(COMPRESS[suffix](content.encode()))
    gather(dataset(), tmp_path, tmp_path / "data/raw")
    for split in ("train", "valid", "test"):
        expected = [*PAIRS, (split, split)]
        assert lines(tmp_path / "data/raw", f"{split}.en-ha.en") == [a for a, _ in expected]
        target = [b.replace("\u200b", "") for _, b in expected]
        assert lines(tmp_path / "data/raw", f"{split}.en-ha.ha") == target
    assert json.loads((tmp_path / "data/sizes.json").read_text()) == {"en-ha": 4}


def test_plain_text_compressed_in_several_ways(tmp_path, dataset):
    text = "".join(f"{n} words\n" for n in range(400)).encode()
    (tmp_path / "en.txt.xz").write_bytes(lzma.compress(b"\xef\xbb\xbf" + text))
    (tmp_path / "ha.txt.gz").write_bytes(gzip.compress(text))
    gather(dataset(), tmp_path, tmp_path / "raw")
    assert [len(lines(tmp_path / "raw", f"{s}.en-ha.en")) for s in ("train", "valid", "test")] == [
        *(100, 100, 200)
    ]
    assert lines(tmp_path / "raw", "train.en-ha.en")[0] == "0 words"  # without a byte order mark
    assert lines(tmp_path / "raw", "test.en-ha.en")[-1] == "399 words"


def test_zstandard_is_read_if_it_is_installed(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    file = tmp_path / "a.en-ha.tsv.zst"
    rows = [("a" * 99, f"{i}") for i in range(5000)]
    frames = ["".join(f"{a}\t{b}\n" for a, b in part).encode() for part in (rows[:9], rows[9:])]
    file.write_bytes(b"".join(map(zstandard.compress, frames)))
    assert [*readers.pairs({"en": file, "ha": file})] == rows
    whole = file.read_bytes()
    for damaged in (whole[:-2], whole[:9], b"nonsense"):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="a.en-ha.tsv.zst is damaged"):
            list(readers.pairs({"en": file, "ha": file}))


TUV = '<tmx><tu><tuv xml:lang="en"><seg>b</seg></tuv><tuv xml:lang="{}"><seg>{}</seg></tuv></tu></tmx>'


@pytest.mark.parametrize(
    "name, content",
    [
        ("train.zh_CN-en.tsv", "zh_CN\ten\na\tb\n"),
        # Columns without names are in the order of the file or folder.
        *((name, "b\ta\n") for name in ("train.eng-zho.tsv", "en_to_zh.tsv", "eng-zho/train.tsv")),
        ("train.zh-en.tsv", "en-US\tzho_Hans\nb\ta\n"),
        ("train.zh-en.tsv", '"English"\t"Chinese"\nb\ta\n'),
        ("train.zh-en.tsv", '"English"\t"Chinese"\n"b"\ta\n'),
        ("train.tsv", "en\tours\nb\ta\n"),
        ("train.zh-en.tsv", "Deutsch\ten-US\nb\ta\n"),
        ("train.zh-en.tsv", "fr\tit\nb\ta\n"),
        ("train.jsonl", '{"eng": "b", "zh-CN": "a", "zh-TW": "c"}\n'),
        ("train.tmx", TUV.format("cmn", "\x08a&#x1F;")),
        ("train.tmx", TUV.format("ours", "a")),
    ],
)
def test_names_of_languages(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    files = dict.fromkeys(("zh_CN", "en"), tmp_path / name)
    codes = {"zh_CN": "ours"} if "ours" in content else {}
    if "Deutsch" in content or "fr" in content:
        with pytest.raises(UsageError, match=rf"{name}, line 1\b"):
            [*readers.pairs(files, codes)]
    else:
        assert [*readers.pairs(files, codes)] == [("a", "b")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_all_streams_of_a_compressed_file_are_read(tmp_path, suffix):
    (tmp_path / "a.en").write_text("".join(f"{i}\n" for i in range(5000)))
    file, text = tmp_path / f"a{suffix}", (tmp_path / "a.en").read_bytes()
    first, second = COMPRESS[suffix](text[:999]), COMPRESS[suffix](text[999:])
    file.write_bytes(first + bytes(8) + second)
    assert "\n".join(readers.lines(file)).encode() + b"\n" == text
    damaged = second[:40] + bytes([second[40] ^ 255]) + second[41:]
    for end in (damaged, second[:-9], second[:40], b"more"):
        file.write_bytes(first + end)
        with pytest.raises(UsageError, match=f"a{suffix} is damaged"):
            [*readers.lines(file)]


@pytest.mark.parametrize("kind", ["folder", "loop"])
def test_a_name_that_is_no_file_is_named(tmp_path, dataset, kind):
    (tmp_path / "ha.txt").write_text("a\n" * 400)
    (tmp_path / "en.txt").mkdir() if kind == "folder" else (tmp_path / "en.txt").symlink_to(
        "en.txt"
    )
    with pytest.raises((UsageError, OSError), match="/en.txt"):
        gather(dataset(), tmp_path, tmp_path / "raw")


def test_text_under_other_names_than_the_data_sets_is_told(tmp_path, dataset, capsys):
    own = dataset(raw={"files": "x/{split}.{language}"})
    (tmp_path / "en-ha.tsv").write_text("a\tb\n" * 400)
    gather(own, tmp_path, tmp_path / "raw")
    assert "raw.files" in (told := capsys.readouterr().err) and "en-ha.tsv" in told
    (tmp_path / "en-ha.tsv").unlink()
    for name in (f"{s}.{x}.gz" for s in ("train", "valid", "test") for x in ("en", "ha")):
        (tmp_path / name).write_bytes(gzip.compress(name.encode()))
    gather(own, tmp_path, tmp_path / "raw")
    assert "raw.files" not in capsys.readouterr().err
    del own.raw["files"]
    own.raw["splits"] = {"test": "dev"}
    gather(own, tmp_path, tmp_path / "raw")
    assert "raw.splits" in (told := capsys.readouterr().err) and "test.en.gz" in told
    for name in ("eng", "hau"):  # before files whose languages are spelled as in the data set
        (tmp_path / f"dev.{name}").write_text("b\n")
    gather(own, tmp_path, tmp_path / "raw")
    assert lines(tmp_path / "raw", "test.en-ha.en") == ["b"]
    assert "raw.splits" not in capsys.readouterr().err


def test_variants_of_a_language_in_their_own_columns(tmp_path, dataset):
    chinese = ["eng_Latn-zho_Hans", "eng_Latn-zho_Hant"]
    columns = {"": "en\tzh\tzh_Hant\na\tb\tc\n"}
    files = {f".{pair}": f"en\tzh\na\t{side}\n" for pair, side in zip(chinese, "bc")}
    own = dataset(chinese)
    for kind in (columns, files):
        text = tmp_path / f"text{len(kind)}"
        text.mkdir()
        for split, (name, content) in product(("train", "valid", "test"), kind.items()):
            (text / f"{split}{name}.tsv").write_text(content)
        gather(own, text, tmp_path / "raw")
        for pair, side in zip(chinese, "bc"):
            assert lines(tmp_path / "raw", f"test.{pair}.{pair[-8:]}") == [side]


def test_variants_of_a_language_are_told(tmp_path, dataset, capsys):
    one, other = '{"en": "a", "ha-NG": "b"}\n', '{"en": "a", "ha-NE": "c"}\n'
    own, both = dataset(), '{"en": "a", "ha-NG": "b", "ha-NE": "c"}\n'
    file = tmp_path / "en-ha.jsonl"
    file.write_text((one + other) * 200)
    gather(own, tmp_path, tmp_path / "raw")
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "ha-NG" in line and "ha-NE" in line and "codes" not in line]
    assert len(told) == len({*told})
    file.write_text(other + both * 400)
    gather(own, tmp_path, tmp_path / "raw2")
    assert "raw: {codes:" in capsys.readouterr().err  # one of the two is not read
    file.write_text((other + both) * 400)
    gather(replace(own, raw=own.raw | {"codes": {"ha": "ha-NG"}}), tmp_path, tmp_path / "raw3")
    texts = [lines(tmp_path / "raw3", f"{split}.en-ha.ha") for split in ("train", "valid", "test")]
    assert {*sum(texts, [])} == {"b"} and "ha-N" not in capsys.readouterr().err


def test_files_are_found_by_the_meaning_of_their_names(tmp_path, dataset):
    for name in ("eng_Latn", "hau_Latn"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 400)
    gather(dataset(), tmp_path, tmp_path / "raw")
    assert (tmp_path / "raw/valid.en-ha.ha").read_text().startswith("hau_Latn\n")


def test_folders_of_pairs_with_and_without_splits(tmp_path, dataset):
    for pair in ("en-de", "en-ha"):
        (tmp_path / pair).mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"en-de/{split}.tsv").write_text("en\tde\na\tb\n")
    for language in ("en", "ha"):
        (tmp_path / f"en-ha/{language}.txt").write_text(f"{language}\n" * 400)
    gather(dataset(["en-de", "en-ha"]), tmp_path, tmp_path / "raw")
    assert [len(lines(tmp_path / "raw", f"valid.en-{x}.{x}")) for x in ("de", "ha")] == [1, 100]


NAMED = {  # files, and the settings with which alone they are found; None: there are none
    "dev": (["train.tsv", "dev.tsv", "test.tsv"], {"splits": {"valid": "dev"}}),
    "files": (["train.tsv", "dev.tsv"], {"files": "{split}.tsv", "splits": {"valid": "dev"}}),
    "lines": (["train", "dev", "test"], {"splits": {"valid": "dev"}}),
    "valid": (["train", "valid", "test"], {}),
    "txt": (["train.*.txt", "valid.*.txt"], {}),
    "meant": (["train.eng-hau.*", "valid.en-ha.*", "test.hau-eng.*"], {}),
    "meant lines": (["train.eng_Latn-hau_Latn.tsv", "valid.*"], {}),
    "pair": (["train.en-ha.*", "dev.en-ha.*"], {"splits": {"valid": "dev"}}),
    "one": (["eng-hau.*"], {}),
    "one in the other order": (["ha-en.*"], {}),
    "both": (["eng_to_ha.json", "dev.json"], {"splits": {"train": "eng_to_ha", "valid": "dev"}}),
    "sides": (
        ["train.src", "train.tgt", "valid.src", "valid.tgt"],
        {"files": "{split}.{code}", "codes": {"en": "src", "ha": "tgt"}},
    ),
    "memory": (["opus.tmx"], {"files": "opus.tmx"}),
    "memories": (["a.tmx", "b.tmx"], {"files": {"train": "a.tmx", "valid": "b.tmx"}}),
    "zip": (["corpus.zip"], None),
    "half": (["valid.en", "train.en"], None),
    "half folder": (["en-ha/valid.en", "en-ha/train.en"], None),
    "folders": (["en-ha/train.tsv", "en-ha/dev.json"], {"splits": {"valid": "dev"}}),
    "inner folders": (["tsv/en-ha/train.tsv", "tsv/en-ha/valid.tsv"], {}),
    "twice": (["tsv/en-ha/train.tsv", "json/en-ha/train.json"], None),
    "both orders": (["en-ha/train.tsv", "ha-en/train.tsv"], None),
    "others": (["train.en-sw.tsv", "dev.en-sw.tsv"], None),
    "twice in folders": (["en-ha.tsv", "en-ha/en-ha.tsv"], None),
    "twice in parts": (["*.txt", "en-ha/train.tsv"], None),
    "twice within a folder": (["en-ha/en-ha.tsv", "tsv/en-ha/en-ha.tsv"], None),
    "pattern": (["en-ha/train.tsv", "en-ha/valid.tsv"], {}),
    "order": (
        ["en-ha/en_to_ha.tsv", "en-ha/dev.tsv"],
        {"files": {"train": "{pair}/{first}_to_{second}.tsv", "valid": "{pair}/dev.tsv"}},
    ),
    "meant pattern": (
        ["tsv/eng-hau/eng_to_hau.tsv", "json/en-hau/dev.json"],
        {
            "files": {
                "train": "tsv/{pair}/{first}_to_{second}.tsv",
                "valid": "json/{pair}/dev.json",
                "test": "none/{pair}",
            }
        },
    ),
    "mixed codes": (["en-ha/eng_to_ha.tsv"], {"files": "{pair}/{first}_to_{second}.tsv"}),
    "meant folders": (["eng-hau/train.json", "eng-hau/valid", "eng-hau/test"], {}),
}


@pytest.mark.parametrize("kind", NAMED)
def test_names_that_files_have(tmp_path, dataset, kind):
    names, settings = NAMED[kind]
    text = [(f"en {i}", f"ha {i}") for i in range(400)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        of_both = next((form for ending, form in FORMATS.items() if name.endswith(ending)), None)
        if name.endswith((".src", ".tgt", ".zip", ".en")):
            (tmp_path / name).write_text("a\n" * 9)
        elif of_both:
            content = FORMATS["tsv" if name.endswith("tsv") else name.split(".")[-1]](text)
            (tmp_path / name).write_text(content)
        else:
            name = name if "*" in name else f"{name}.*"
            for side, ending in enumerate(("eng", "hau") if "eng" in name else ("en", "ha")):
                lines = "".join(f"{pair[side]}\n" for pair in text)
                (tmp_path / name.replace("*", ending)).write_text(lines)
    own = dataset()
    if settings != {}:
        wanted = r"expected (train|valid).en-ha.tsv, or .*{splits: {\1: .*{files: "
        wanted = r"/train\.ha is missing" if kind.startswith("half") else wanted
        listed = Path(names[-1]).name
        if kind.startswith(("twice", "both orders", "meant pattern")):
            wanted, listed = "both match", str(Path(names[-1]).parent)
        with pytest.raises(UsageError, match=wanted) as refused:
            gather(own, tmp_path, tmp_path / "raw")
        assert listed.split("*")[0] in str(refused.value)
        assert not (tmp_path / "raw").exists()
    if settings is not None:
        gather(replace(own, raw=own.raw | settings), tmp_path, tmp_path / "raw")
        assert lines_of_pairs(tmp_path / "raw/valid.en-ha")


def lines_of_pairs(prefix: Path) -> list[tuple[str, str]]:
    sides = (Path(f"{prefix}.{language}").read_text().splitlines() for language in ("en", "ha"))
    pairs = [*zip(*sides, strict=True)]
    assert pairs == [(a, a.replace("en", "ha")) for a, _ in pairs]
    return pairs


def test_line_breaks_and_tabs_in_quoted_cells(tmp_path):
    """As Python's csv module writes and reads them."""
    cells = [("a", "b"), ("one\ntwo", "c"), ("d", "one\n\ntwo"), ("x\ny", 'z "q"\n"w"'), ("e", "f")]
    cells += [("a\tb", "c"), ("d", "e\t \t"), ("x\ty", 'z\t "q"\t'), ("g", "h")]
    cells += [("a\nb\tc", "d")]
    files = dict.fromkeys(("en", "ha"), tmp_path / "train.tsv")
    for quoting in csv.QUOTE_MINIMAL, csv.QUOTE_ALL:
        with open(tmp_path / "train.tsv", "w", newline="") as file:
            write = csv.writer(file, "excel-tab", lineterminator="\n", quoting=quoting)
            write.writerows([("en", "ha"), *cells])
        read = [tuple(side.split() for side in pair) for pair in readers.pairs(files)]
        assert read == [tuple(side.split() for side in pair) for pair in cells]
        # What has its rows only where all cells are quoted.
        cells += [("a\tb\nc", "d"), ("e", "f\ng\th")]
    ends = ["a\tb\tc\n", 'a\t"b"\tc\n', 'a\t"b\tc\n', 'a\t"b\nc\n', '"a\nb\n', '"a\nb"\tc\td\n']
    dialogue = 'en\tha\n\u201ca\t"b\nc\td\ne\u201d\tf"\n'
    (tmp_path / "train.tsv").write_text(dialogue)
    assert [*readers.pairs(files)] == [tuple(x.split("\t")) for x in dialogue.splitlines()[1:]]
    for end in (*ends, 'a\t"b\nc"d\n'):
        (tmp_path / "train.tsv").write_text(f"en\tha\n{end}")
        with pytest.raises(UsageError, match=r"train.tsv, line [23]\b"):
            [*readers.pairs(files)]


def test_quotes_of_a_spreadsheet(tmp_path, dataset):
    cells = ['"he said ""hi"""', '"Hello," he said, "you."', '"a """b"', '"all"', '"x"" y"']
    cells.append('"end "')
    for split in ("train", "valid", "test"):
        text = "en\tha\n" + "".join(f"{i} {cell}\t{cell}\n" for i, cell in enumerate(cells))
        (tmp_path / f"{split}.tsv").write_text(text)
    gather(dataset(clean={"quotes": "strip"}), tmp_path, tmp_path / "raw")
    for split in ("train", "valid", "test"):
        found = lines(tmp_path / "raw", f"{split}.en-ha.ha")
        assert found == ['he said "hi"', cells[1], cells[2], "all", 'x" y', "end"]


def test_quotes_of_cells_that_are_all_quoted_are_removed_once(tmp_path, dataset):
    for split in ("train", "valid", "test"):
        text = '"en"\t"ha"\n"a"\t"""b"""\n'
        (tmp_path / f"{split}.tsv").write_text(text)
    own = dataset()
    for clean in ({}, {"quotes": "strip"}):
        place = tmp_path / f"raw-{len(clean)}"
        gather(replace(own, clean=clean), tmp_path, place)
        assert lines(place, "test.en-ha.ha") == ['"b"']


@pytest.mark.parametrize(
    "files",
    ["ECB.{pair}.{language}", {s: "ECB.{pair}.{language}" for s in ("train", "valid", "test")}],
)
@pytest.mark.parametrize("split", ["lines", "hash"])
def test_a_name_for_all_splits_is_one_text(tmp_path, dataset, files, split):
    for language in ("en", "ha"):
        text = "".join(f"{language} {i}\n" for i in range(900))
        (tmp_path / f"ECB.en-ha.{language}").write_text(text)
    raw = {"files": files, "split": split, "parallel": {"valid": 90, "test": 180}}
    gather(dataset(raw=raw, clean={"overlap": "drop"}), tmp_path, tmp_path / "raw")
    parts = [lines(tmp_path / "raw", f"{s}.en-ha.en") for s in ("train", "valid", "test")]
    assert sorted(sum(parts, [])) == sorted(f"en {i}" for i in range(900))


def test_a_hash_of_the_source_keeps_duplicates_in_one_split(tmp_path, dataset):
    draw = random.Random(1)
    sentences = [f"sentence number {draw.randint(0, 150)}" for _ in range(900)]
    text = "".join(f"{s}\t{i}\n" for i, s in enumerate(sentences))
    (tmp_path / "en-ha.tsv").write_text(text)
    raw = {"split": "hash", "parallel": {"valid": 90, "test": 180}}
    gather(dataset(raw=raw), tmp_path, tmp_path / "raw")
    found = {s: lines(tmp_path / "raw", f"{s}.en-ha.en") for s in ("train", "valid", "test")}
    assert sum(map(len, found.values())) == 900
    assert not set(found["train"]) & {*found["valid"], *found["test"]}
    assert 90 < len(found["test"]) < 300 and max(map(hash_position, found["test"])) < 0.2


SPLIT = {f"{split}.en-ha.tsv": "a b\tc d\n" for split in ("train", "valid", "test")}
CHINESE = {"pairs": ["eng_Latn-zho_Hans", "eng_Latn-zho_Hant"]}
SERBIAN = {"pairs": ["en-sr_Cyrl", "en-sr_Latn"]}
WHOLE = "a\tb\n" * 600
SIDES = dict.fromkeys(("a.en", "a.ha", "b.en", "b.ha", "dev.en", "dev.ha"), "text\n" * 9)
OF_SPLITS = {"train": "a.{language}", "valid": "b.{language}", "test": "a.{language}"}
REFUSED = [  # files, settings, and what names them
    ({"en-ha.tsv": WHOLE, "ha-en.tsv": WHOLE}, {}, "/ha-en.tsv"),
    ({"train.en-ha.tsv": WHOLE, "valid.en-ha.tsv": WHOLE, "en-ha.tsv": WHOLE}, {}, "/en-ha.tsv"),
    (SPLIT | {"train.en-ha.tsv.gz": gzip.compress(b"a\tb\n")}, {}, "train.en-ha.tsv and .*tsv.gz"),
    (SPLIT | {"train.en-ha.jsonl": "{}\n"}, {}, "train.en-ha.tsv and .*train.en-ha.jsonl"),
    (SPLIT | {"train.en-ha.en": "a\n", "train.en-ha.ha": "a\n"}, {}, "ha.en and .*train.en-ha.tsv"),
    ({"en-ha.tsv": WHOLE, "en.txt": WHOLE, "ha.txt": WHOLE}, {}, "en.txt and .*en-ha.tsv"),
    ({"train.en-US": "a\n", "train.en-GB": "a\n", "train.ha": "a\n"}, {}, "en-(US|GB).*en-(US|GB)"),
    # One text is not that of two languages.
    (dict.fromkeys(("train.tsv", "valid.tsv", "test.tsv"), "en\tzh\na\tb\n"), CHINESE, "zho_Hant"),
    ({f"{s}.en-zh.tsv": "a\tb\n" for s in ("train", "valid", "test")}, CHINESE, "zho_Hant"),
    ({f"{s}.jsonl": '{"en": "a", "sr": "b"}\n' for s in ("train", "valid")}, SERBIAN, "sr_Latn"),
    ({f"{s}.{x}": "a\n" for s in ("train", "valid") for x in ("en", "sr")}, SERBIAN, "sr_Latn"),
    # A file of both languages has a known ending.
    (
        dict.fromkeys(("train.txt", "valid.txt", "test.txt"), "a\tb\n"),
        {"raw": {"files": "{split}.txt"}},
        r"(train|valid|test)\.txt",
    ),
    # What would test on the training text.
    (SIDES, {"raw": {"files": OF_SPLITS}}, "raw.files"),
    (
        SIDES,
        {"raw": {"splits": {"train": "dev", "valid": "dev"}, "files": "{split}.{language}"}},
        "raw.files",
    ),
    ({}, {"source": {"datasets": "any", "splits": {"train": "a", "test": "a"}}}, "source.splits"),
    ({}, {"source": {"datasets": "any", "splits": {"valid": "train"}}}, "source.splits"),
    # All lines have the same source, and so one place.
    (
        {"en-ha.tsv": "".join(f"a title\t{i}\n" for i in range(900))},
        {"raw": {"split": "hash", "parallel": {"valid": 90, "test": 180}}},
        "en-ha.tsv.*split: hash",
    ),
    (SPLIT, {"clean": {"overlap": "drop"}}, "train.en-ha.tsv.*1 overlap"),
    (
        SPLIT | {"train.en-ha.tsv": "a\t\n\tb\n"},
        {},
        "train.en-ha.tsv: no line is kept .2 read, 2 empty",
    ),
    (SPLIT | {"train.en-ha.tsv": gzip.compress(b"a\tb\n")}, {}, "ha.tsv is compressed: .*.gz"),
    (
        {
            "train.en-ha.tsv.gz": gzip.compress(gzip.compress(b"a\tb\n")),
            "valid.en-ha.tsv": "a\tb\n",
        },
        {},
        "ha.tsv.gz is compressed: .*.gz",
    ),
    (
        {"train.en": "", "train.ha": "", "valid.en": "a\n", "valid.ha": "b\n"},
        {},
        "train.en and .*train.ha: no line is kept .none read.: en-ha needs one to train",
    ),
    (
        {"train.en": "1\n2\n3\n4\n", "train.ha": "1\n2\n", "valid.en": "a\n", "valid.ha": "b\n"},
        {},
        "train.ha 2 and train.en 4",
    ),
    (
        {"en.txt": "a\n" * 5, "ha.txt": "a\n" * 5},
        {"raw": {"parallel": {"valid": 2, "test": 3}}},
        "en.txt has 5 .*raw.parallel",
    ),
]


# Entities are not resolved, for they may name a file; without them the text lacks words.
ENTITY = """<!DOCTYPE tmx [<!ENTITY e {}>]><tmx><body><tu><tuv xml:lang="en"><seg>a <b>&e;</b></seg></tuv>
    <tuv xml:lang="ha"><seg>b</seg></tuv></tu></body></tmx>"""
for declared in ('SYSTEM "/etc/hostname"', '"a word"'):
    files = {f"{split}.tmx": ENTITY.format(declared) for split in ("train", "valid", "test")}
    REFUSED.append((files, {}, r"\.tmx.*&e;"))

UNREADABLE = [
    *(("train.tsv", b"en\tha\na\tb\nc\n", 3), ("train.tsv", b"a\tb\n", 1)),
    ("train.tsv", b"en\ten\tha\na\tb\tc\n", 1),
    ("train.en-ha.tsv", b"source\ttarget\na\tb\n", 1),
    *(("train.en-ha.tsv", b"a\tb\tc\n", 1), ("train.en-ha.tsv", b"a\tb\n\xff\tc\n", 2)),
    ("train.jsonl", b'{"en": "a", "ha": "b"}\n{"en": "a"\n', 2),
    *(("train.jsonl", x, 1) for x in (b'{"en": "a", "ha": 5}\n', b"[" * 100_000, b'["a", "b"]\n')),
    ("train.jsonl", b'{"en": "a", "fr": "b"}\n', 0),
    *(("train.tmx", tmx(PAIRS)[:-30].encode(), 0), ("train.tmx", b"<tmx/>", 0)),
    ("train.tmx", tmx(PAIRS).replace("a", "&nbsp;", 1).encode(), 0),
    ("train.tmx", tmx(PAIRS).replace("<seg>", "").replace("</seg>", "").encode(), 0),
    ("train.tmx.gz", gzip.compress(tmx(PAIRS).encode())[:-20], 0),
    ("train.en-ha.tsv", b'<refset setid="wmt" trglang="ha">\n<doc>\n', 0),
    ("train.en-ha.tsv.gz", b"a\tb\n", 0),
]  # name, content and, unless it is 0, line
for name, content, line in UNREADABLE:
    files = {f"{split}.en-ha.tsv": "a\tb\n" for split in ("valid", "test")} | {name: content}
    REFUSED.append((files, {}, f"{name}, line {line}" if line else name))


@pytest.mark.parametrize("files, settings, named", REFUSED, ids=range(len(REFUSED)))
def test_text_that_is_refused(tmp_path, dataset, files, settings, named):
    own = dataset(**settings)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=named) as refused:
        gather(own, tmp_path, tmp_path / "raw")
    assert "\n" not in str(refused.value) and not (tmp_path / "raw").exists()


def test_what_is_left_out_of_training(tmp_path, dataset):
    rows = [
        *[("a b", "c d")] * 3,
        *(("same", "same"), ("", "x"), ("y", "\u200b"), ("in the test", "other"), ("v", "other")),
        *(("short", "w " * 10), ("w " * 30, "x " * 30), ("stays", "too")),
    ]
    (tmp_path / "train.en-ha.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in rows))
    (tmp_path / "valid.en-ha.tsv").write_text("v\tv\n")
    (tmp_path / "test.en-ha.tsv").write_text("in the test\tt\n\tempty\n")
    clean = dict.fromkeys(("repeated", "equal", "overlap"), "drop")
    clean |= {"max-ratio": 9, "max-words": 20}
    own = dataset(clean=clean)
    gather(own, tmp_path, tmp_path / "raw")
    assert lines(tmp_path / "raw", "train.en-ha.en") == ["a b", "stays"]
    assert lines(tmp_path / "raw", "test.en-ha.ha") == ["t", "empty"]
    assert json.loads((tmp_path / "left_out.json").read_text())["en-ha"] == {
        **{"read": 11, "kept": 2, "empty": 2, "repeated": 2, "equal": 1, "overlap": 2},
        **{"max-ratio": 1, "max-words": 1},
    }
    gather(replace(own, clean={"empty": "drop"}), tmp_path, tmp_path / "whole")
    assert lines(tmp_path / "whole", "test.en-ha.ha") == ["t"]


LACKING = {
    "tsv": "en\tha\n" + "x\ty\n" * 9 + "x\t\n" + "\ty\n" + "\t\n" + "\n",
    "jsonl": '{"en": "x", "ha": "y"}\n' * 9 + '{"en": "x", "ha": null}\n{"ha": "y"}\n{"fr": "z"}\n',
    "tmx": tmx([("x", "y")] * 9 + [("x", ""), ("", "y"), ("", "")])
    .replace("<seg></seg>", "")
    .replace('<tuv xml:lang="EN-us"></tuv>', ""),
    "datasets": [{"en": "x", "ha": "y"}] * 9
    + [{"en": "x", "ha": None}, {"en": None, "ha": "y"}, {"en": None, "ha": None}],
}


@pytest.mark.parametrize("kind", LACKING)
def test_records_without_a_language_count_as_empty(tmp_path, dataset, monkeypatch, kind):
    """Empty lines of a test set stay; records of other languages in one are no lines of it."""
    package = SimpleNamespace(load_dataset=lambda *_, split: LACKING["datasets"])
    monkeypatch.setitem(sys.modules, "datasets", package)
    for split in ("train", "valid", "test") if kind != "datasets" else ():
        (tmp_path / f"{split}.{kind}").write_text(LACKING[kind])
    source = {"datasets": "a/name"} if kind == "datasets" else {}
    gather(dataset(source=source), tmp_path, tmp_path / "raw")
    left_out = json.loads((tmp_path / "left_out.json").read_text())
    assert left_out == {"en-ha": {"read": 12, "kept": 9, "empty": 3}}
    tested = {"tsv": 12, "tmx": 10}.get(kind, 9)  # in TMX, one has an empty segment
    assert len(lines(tmp_path / "raw", "test.en-ha.en")) == tested
    package.load_dataset = lambda *_, split: [*LACKING["datasets"], {"en": "x", "ha": 5}]
    with pytest.raises(UsageError, match=r"record 13\b"):
        [*read_datasets({"datasets": "a/name"}, "train", readers.Languages(["en", "ha"]))]


def test_folders_that_tell_pairs_apart(tmp_path, dataset):
    """A file without its folder is nobody's; each is downloaded to a place of its own."""
    raw = {"files": "{pair}/{split}.{language}", "url": "https://x/{file}"}
    own = dataset(["en-ha", "en-sw"], raw=raw)
    assert len({remote.name for remote in remote_files(own)}) == 12
    (tmp_path / "en-ha").mkdir()
    for file in ("en-ha/train.ha", "en-ha/train.en", "text.train.en", "text.train.sw"):
        (tmp_path / file).write_text("a\n")
    assert find(own, tmp_path, "train", "en-ha").files["en"] == tmp_path / "en-ha/train.en"
    for url in (
        "https://x/{file}.gz?download=1",
        "https://x/get?name={file}",
        "https://x/{file}/get",
    ):
        path = "en-ha/train.en.gz" if ".gz" in url else "en-ha/train.en"
        assert remote_files(replace(own, raw=raw | {"url": url}))[0].name == path
    odd = raw | {"files": "{pair}/é 1#100%.{split}.{language}"}
    (remote, *_) = remote_files(replace(own, raw=odd))
    assert remote.name == "en-ha/é 1#100%.train.en"
    assert remote.url == "https://x/en-ha/%C3%A9%201%23100%25.train.en"
    own = replace(own, raw=raw | {"files": "{pair}/text.{split}.{language}"})
    assert find(replace(own, pairs=("en-sw",)), tmp_path, "train", "en-sw")
    assert find(own, tmp_path, "train", "en-sw") is None


def test_files_of_one_order_of_the_pair(tmp_path, dataset):
    for order, language in (("en-ha", "en"), ("ha-en", "ha"), ("ha-en", "en")):
        (tmp_path / "train" / order).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"train/{order}/{language}.txt").write_text("a\n")
    own = dataset(raw={"files": "{split}/{pair}/{language}.txt"})
    files = find(own, tmp_path, "train", "en-ha").files
    assert {file.parent.name for file in files.values()} == {"ha-en"}
    (tmp_path / "train/ha-en/en.txt").unlink()
    assert find(own, tmp_path, "train", "en-ha") is None


def test_text_that_may_be_nowhere_else_is_not_to_be_deleted(tmp_path, dataset):
    for split in ("train", "valid", "test"):
        write_text(tmp_path / "data/own/raw", "en-ha", **{split: 3})
    dataset(clean={"empty": "drop"})
    said = refused(step_here("prepare", "own", cwd=tmp_path, DATA_DIR="data"), "--raw", "`clean`")
    assert "delete" not in said


def test_downloads_that_are_refused(dataset):
    sums = {
        f"{split}.{language}": "0"
        for split in ("train", "valid", "test")
        for language in ("en", "ha")
    }
    raw = {"files": "{split}.{language}", "url": "https://x/{file}?download=1"}
    more = dataset(raw=raw | {"sha256": sums | {"train.sw": "0"}})  # of a pair that is left out
    assert {remote.name: remote.sha256 for remote in remote_files(more)} == sums
    sums["train.e"] = sums.pop("train.en")
    archives = [{"url": "https://x/en-ha/a.zip"}, {"url": "https://x/en-sw/a.zip"}]
    for wrong, named in (
        ({"sha256": sums}, "train.e:"),
        ({"url": "", "archives": archives}, "a.zip"),
    ):
        with pytest.raises(UsageError, match=named):
            remote_files(replace(more, raw=raw | wrong))


def test_a_data_set_of_hugging_face(tmp_path, dataset):
    datasets = pytest.importorskip("datasets")
    records = [{"translation": {"en": a, "ha": b}} for a, b in PAIRS]
    splits = dict.fromkeys(("train", "dev", "test"), datasets.Dataset.from_list(records))
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    source = {"datasets": str(tmp_path / "saved"), "splits": {"valid": "dev"}}
    gather(dataset(source=source), tmp_path, tmp_path / "raw")
    assert lines(tmp_path / "raw", "valid.en-ha.en") == [a for a, _ in PAIRS]


def test_a_test_set_of_sacrebleu(tmp_path, dataset, monkeypatch, capsys):
    from sacrebleu.dataset import DATASETS

    monkeypatch.setattr(DATASETS["wmt13"], "_outdir", str(tmp_path))
    meta = [(name, "x\n") for name in ("docid", "genre", "origlang")]
    for field, text in (("src", "Hund\n"), ("ref", "dog\n"), *meta):
        (tmp_path / f"wmt13.de-en.{field}").write_text(text)
    for split in ("train", "valid"):
        (tmp_path / f"{split}.tsv").write_text("en\tde\na\tb\n")
    pairs = {"de-en": ["x", "y"], "deu-eng": ["x", "y"]}
    monkeypatch.setattr(DATASETS["wmt13"], "langpairs", pairs)
    own = dataset(["en-de"], source={"sacrebleu": "wmt13"})
    gather(own, tmp_path, tmp_path / "raw")
    assert lines(tmp_path / "raw", "test.en-de.de") == ["Hund"]
    assert lines(tmp_path / "raw", "test.en-de.en") == ["dog"]
    for split in ("train", "valid"):
        (tmp_path / f"{split}.tsv").unlink()
    (tmp_path / "en-de.tsv").write_text("".join(f"{i}\tb\n" for i in range(400)))
    gather(own, tmp_path, tmp_path / "raw")  # no line is kept for another test set
    parts = (lines(tmp_path / "raw", f"{split}.en-de.en") for split in ("train", "valid"))
    assert sum(map(len, parts)) == 400
    own.source["datasets"] = "none"  # for all else
    section = find(own, tmp_path, "test", "en-de")
    assert section.files["de"] == tmp_path / "wmt13.de-en.src"
    # They are part of what text was prepared from, also beside another folder.
    known = prepare._digests(tmp_path / "text", section.files.values())
    assert known.keys() == {"wmt13.de-en.src", "wmt13.de-en.ref"}
    assert "names of" not in capsys.readouterr().err  # of the directions that are searched
    with pytest.raises(UsageError, match="wmt13 has no fr-de"):
        sacrebleu_files("wmt13", readers.Languages(["fr", "de"]))
    with pytest.raises(UsageError, match="wmt99"):
        sacrebleu_files("wmt99", readers.Languages(["en", "de"]))


# Subwords


NFD = [
    unicodedata.normalize("NFD", text)
    for text in ("Où est l’été ?", "Tiếng Việt", "한국어", "Ǟ ǭ ṩ")
]
ODD = [
    *(
        *("\ufeffmark", "zero\u200bwidth", "soft\xadhyphen", "bell\x07"),
        "tab\tand\u2028break\u3000wide",
    ),
    *(
        *("می\u200cخواهم", "क्\u200dष", "“Ça”, dit-il…", "全角，文字。", "ﬁ ½ ① ｶﾞ", "\u212b \u2126"),
        "r\r",
    ),
    "e\u0302\u0323 e\u0323\u0302 \xea\u0323 \u1eb9\u0302",  # marks in any order make one letter
]


def model_of(folder: Path, text: list[str], **options) -> sentencepiece.SentencePieceProcessor:
    (folder / "text").write_text("".join(f"{line}\n" for line in text), "utf-8")
    learn_from([folder / "text"], folder, **{"vocab_size": 900, **options})
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def test_a_larger_model_of_the_same_text_does_not_fit(tmp_path):
    text = [" ".join(random.Random(n).choices("abcdefgh", k=40)) for n in range(40)]
    text += [line.replace(" ", "") for line in text]
    for name, size in (("small", 60), ("large", 90)):
        (tmp_path / name).mkdir()
        model_of(tmp_path / name, text, vocab_size=size)
    pieces = (tmp_path / "small/dict.txt").read_text("utf-8").splitlines()
    words = [line.split()[0] for line in pieces] + [
        "猫",
        "[de_DE]",
        ">>deu<<",
        "2de",
        "madeupword0000",
    ]
    check_pieces(tmp_path / "small/spm.model", words)
    with pytest.raises(UsageError, match="large/spm.model"):
        check_pieces(tmp_path / "large/spm.model", words)


def test_a_model_normalises_as_the_texts_are_cleaned(tmp_path):
    model = model_of(tmp_path, ["some text", "other words"])
    draw = random.Random(3)
    marks = "".join(chr(code) for code in range(0x300, 0x330))
    made = [
        "".join(draw.choice("aeiouAEIOU") + draw.choice(marks) for _ in range(9)) for _ in range(50)
    ]
    for text in [*NFD, *ODD, *made]:
        cleaned = plain(text)
        assert model.normalize(text).replace("▁", " ").strip() == cleaned
        assert unicodedata.is_normalized("NFC", cleaned)
    assert plain(ODD[5]) == ODD[5] and plain(ODD[6]) == ODD[6]  # joiners stay


def test_typed_text_is_divided_as_the_training_text(tmp_path):
    """Also where no single character has all marks, whose order is then another as typed."""
    from smoe_fairseq.huggingface.tokenizer import SMoETokenizer
    from smoe_fairseq.translate.load import segmenter

    typed = "f\xe9\u0323r\xe0n \u0628\u0651\u064e"
    model = model_of(tmp_path, [plain(typed)] * 9, vocab_size=300, byte_fallback=True)
    assert model.encode(typed) != model.encode(plain(typed))
    encode = segmenter(tmp_path / "spm.model").encode
    assert encode(typed) == encode(plain(typed))
    pieces = [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    vocabulary = json.dumps(["<s>", "<pad>", "</s>", "<unk>", *pieces])
    (tmp_path / "vocab.json").write_text(vocabulary)
    files = (str(tmp_path / name) for name in ("vocab.json", "spm.model"))
    tokenizer = SMoETokenizer(next(files), sp_model_file=next(files))
    assert tokenizer(typed)["input_ids"] == tokenizer(plain(typed))["input_ids"]


def test_normalisation_by_a_file_and_by_name(tmp_path):
    (tmp_path / "rules.tsv").write_text("61\t62\n")  # a becomes b
    text = ["aaa ccc", "ａ cc"]
    assert (
        model_of(tmp_path, text, normalization=str(tmp_path / "rules.tsv")).normalize("a") == "▁b"
    )
    for name, normal in {"identity": "▁ａ", "nfkc": "▁a"}.items():
        assert model_of(tmp_path, text, normalization=name).normalize("ａ") == normal
    assert (
        model_of(tmp_path, text, user_defined_symbols=["<c>"]).encode("a<c>c", out_type=str)[-2]
        == "<c>"
    )
    typed = ["cafe\u0301", "caf\xe9"]  # as some systems write names of files, and as text is
    composed = model_of(tmp_path, text, user_defined_symbols=typed)
    assert composed.encode("a caf\xe9s", out_type=str)[-2] == "caf\xe9"


@pytest.mark.parametrize("blank", ["", " "])
def test_subwords_are_learnt_from_lines_of_any_length(tmp_path, blank):
    """sentencepiece leaves out lines above 4192 bytes, such as 1400 letters of Thai."""
    draw = random.Random(1)
    words = ["".join(draw.choices("กขคงจฉชซญดตถทธน", k=4)) + "ำ" for _ in range(30)]
    texts = (blank.join(draw.choices(words, k=500)) + "\n" for _ in range(40))
    (tmp_path / "text").write_text("short\n" + "".join(texts))
    learn_from([tmp_path / "text"], tmp_path, vocab_size=80, model_type="bpe")
    model = sentencepiece.SentencePieceProcessor(model_file=f"{tmp_path}/spm.model")
    assert model.get_piece_size() == 80


def test_bytes_are_joined_where_output_is_read(tmp_path):
    from fairseq.data import data_utils

    model = model_of(tmp_path, ["some text"], vocab_size=300, byte_fallback=True)
    text = "some <0x41> 日本 €"
    pieces = " ".join(model.encode(text, out_type=str))
    assert "<0xE6>" in pieces and data_utils.post_process(pieces, "sentencepiece") == text
    assert data_utils.post_process(pieces, None) == pieces
    transformers = pytest.importorskip("smoe_fairseq.huggingface.tokenizer")
    tokenizer = object.__new__(transformers.SMoETokenizer)
    object.__setattr__(tokenizer, "_spm", model)
    object.__setattr__(tokenizer, "_added_tokens_encoder", {})
    assert transformers.SMoETokenizer.convert_tokens_to_string(tokenizer, pieces.split()) == text
    # A translation is one line of its file, whatever the model generates.
    pieces, text = "▁some <0x0A> ▁text <0x41> <0x20> <0x42> <0x0D> c", "some  textA B c"
    assert data_utils.post_process(pieces, "sentencepiece") == text
    assert transformers.SMoETokenizer.convert_tokens_to_string(tokenizer, pieces.split()) == text


# The table at the end


def test_the_table_tells_what_is_odd(tmp_path):
    raw = write_text(tmp_path / "text", "en-fr", train=300, valid=20, test=12)
    for language in ("en", "fr"):  # the test set is in the training text
        tests = (raw / f"test.en-fr.{language}").read_bytes()
        with open(raw / f"train.en-fr.{language}", "ab") as train:
            long = b"of more than sixty words " * 13 + b"\n"
            train.write(tests + b'"the ""same"""\n' + long + b"x\n")
        with open(raw / f"valid.en-fr.{language}", "ab") as valid:
            valid.write(tests.splitlines(keepends=True)[0])
    content = {"subwords": {"vocab-size": 60}, "train": {"max-source-positions": 30}}
    content["clean"] = {"max-words": 60, "max-ratio": 8}
    given = write_dataset(tmp_path / "c", "tiny", pairs=["en-fr"], **content)
    done = succeeded(step_here("prepare", "tiny", cwd=tmp_path, RAW=str(raw), WORKERS="1", **given))
    assert "\u2581" not in done.stderr
    assert "1 pairs of the test set are in the validation set" in done.stderr
    (header, row) = (
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith(("| pair", "| en-fr"))
    )
    found = dict(zip(header, row, strict=True))
    assert found[TESTS].startswith("12 / 12 / 12") and "overlap: drop" in done.stderr
    assert found["read"] == "315" and found["kept"] == "314" and found["too long"] == "1"
    assert found["best chrF++"] == "100.0" and "over 1:8" in found
    block = yaml.safe_load(done.stderr[done.stderr.index("\nclean:") :])
    assert block == {"clean": content["clean"] | {"overlap": "drop", "quotes": "strip"}}
    assert ".partial" not in done.stdout
    assert done.stderr.count("warning: ") == 1 and f"{tmp_path / 'c'}" in done.stderr
    assert "delete data/tiny/bin and prepare again" in done.stderr
    (tmp_path / "data/tiny/bin").rename(tmp_path / "bin")
    done = step_here("prepare", "tiny", cwd=tmp_path, WORKERS="1", **given)
    assert "delete data/tiny/bin and data/tiny/raw and prepare again" in done.stderr


def test_what_is_dropped_already_or_leaves_nothing_is_not_advised(tmp_path):
    """All sentences of the test set are those of the training set."""
    raw = write_text(tmp_path / "text", "en-fr", train=100, valid=20, test=12)
    for language in ("en", "fr"):  # half of the pairs are repeated, and two thirds are equal
        text = raw / f"train.en-fr.{language}"
        (raw / f"test.en-fr.{language}").write_text(text.read_text() + "Жук спит\n" * 9)
        text.write_text(2 * text.read_text() + 100 * "1 2\n")
    for overlap in ("keep", "drop"):  # where it is dropped, little is left
        clean = {"repeated": "drop", "equal": "keep", "overlap": overlap}
        content = {"subwords": {"vocab-size": 60}, "clean": clean}
        content |= {"train": {"max-source-positions": None}}
        folder = tmp_path / overlap
        given = write_dataset(folder / "c", "tiny", pairs=["en-fr"], raw={}, **content)
        done = step_here("prepare", "tiny", cwd=folder, RAW=str(raw), WORKERS="1", **given)
        assert done.returncode == 0 and "| en-fr" in done.stdout, done.stderr
        if overlap == "keep":
            assert "repeated: drop" not in done.stderr and "overlap: drop" not in done.stderr
        assert "called en-fr:" in done.stderr
        assert "byte-fallback: true" in done.stderr  # for letters that the training text lacks


@pytest.mark.soak
def test_text_that_is_divided_already_is_told(tmp_path):
    raw = write_text(tmp_path / "text", "en-fr", train=300, valid=20, test=12)
    for file in raw.glob("*.en"):
        file.write_text(file.read_text().replace(" ", " \u2581"))
    given = write_dataset(tmp_path / "c", "t", pairs=["en-fr"], subwords={"vocab-size": 60})
    done = step_here("prepare", "t", cwd=tmp_path, RAW=str(raw), WORKERS="1", **given)
    assert done.returncode == 0 and "have \u2581" in done.stderr


def test_names_of_languages_may_be_text(tmp_path, capsys):
    (tmp_path / "en-de.tsv").write_text("German\tDeutsch\n")
    files = dict.fromkeys(("en", "de"), tmp_path / "en-de.tsv")
    assert [*readers.pairs(files)] == [("German", "Deutsch")]
    assert not capsys.readouterr().err


def test_lines_end_at_line_feeds_alone(tmp_path):
    (tmp_path / "a").write_bytes("a\u2028b\r\nc\x85d\n\n".encode())
    assert [*readers.lines(tmp_path / "a")] == ["a\u2028b", "c\x85d", ""]


@pytest.mark.soak
def test_tests_in_the_training_text_of_other_pairs(tmp_path):
    """Of en-de, the English is in training with French; of de-fr, which is only scored, the French."""
    raw = write_text(tmp_path / "text", "en-fr", train=300, valid=20, test=12)
    write_text(raw, "en-de", train=100, valid=20, test=12)
    for language, text in (("en", "A cat sleeps .\n"), ("de", "Eine Katze .\n")):
        (raw / f"test.en-de.{language}").write_text(text)
    for language, text in (("de", "Die Katze .\n"), ("fr", "Un chat .\n")):
        (raw / f"test.de-fr.{language}").write_text(text)
    for language, text in (("en", "A cat sleeps .\n"), ("fr", "Un chat .\n")):
        with open(raw / f"train.en-fr.{language}", "a") as train:
            train.write(text)
    found = {}
    for overlap in ("drop", "drop-all"):
        content = {"subwords": {"vocab-size": 60}, "clean": {"overlap": overlap}, "keep": ["de-fr"]}
        given = write_dataset(tmp_path / overlap, "tiny", pairs=["en-fr", "en-de"], **content)
        folder = tmp_path / overlap
        done = step_here("prepare", "tiny", cwd=folder, RAW=str(raw), WORKERS="1", **given)
        assert done.returncode == 0, done.stderr
        found[overlap] = json.loads((folder / "data/tiny/left_out.json").read_text())["en-fr"]
        leaks = overlap == "drop"
        assert ("overlap: drop-all" in done.stderr) == leaks
        for pair in "en-de", "de-fr":
            (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"| {pair}"))
            assert ("0 / 0 / 0 / 1 (!)" in row, "0 / 0 / 0 / 0 " in row) == (leaks, not leaks)
            assert (f"{pair}: 1 sentences" in done.stderr) == leaks
    assert found["drop-all"]["overlap"] == found["drop"].get("overlap", 0) + 1


BOTH_TOKENS = {"task": {"decoder-langtok": True}}


@pytest.mark.parametrize("settings", [{"one-way": True}, soak(BOTH_TOKENS)])
def test_pairs_are_too_long_if_a_direction_skips_them(tmp_path, settings):
    """By default the source has the token of a language, and the target none."""
    raw = write_text(tmp_path / "text", "en-fr", train=100, valid=20, test=12)
    one_way, limit = "one-way" in settings, 20
    for number, language in enumerate(("en", "fr")):
        lines = (f"{'a ' * ((5 + 3 * number) * i % 23 + 3)}\n" for i in range(100))
        (raw / f"train.en-fr.{language}").write_text("".join(lines))
    positions = {"max-source-positions": limit, "max-target-positions": limit}
    content = {"subwords": {"vocab-size": 30}, "train": positions, **settings}
    given = write_dataset(tmp_path / "c", "tiny", pairs=["en-fr"], **content)
    done = succeeded(step_here("prepare", "tiny", cwd=tmp_path, RAW=str(raw), WORKERS="1", **given))
    prefix = tmp_path / "data/tiny/bin/train.en-fr"
    texts = [MMapIndexedDataset(f"{prefix}.{language}") for language in ("en", "fr")]
    first, second = (text.sizes for text in texts)
    skipped = (first + 1 > limit) | (second + (not one_way) > limit)
    both = (np.maximum(first, second) + 1 > limit).sum()
    assert 0 < skipped.sum() < both if one_way else skipped.sum() == both
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| en-fr"))
    assert int(row.split("|")[9]) == skipped.sum()
