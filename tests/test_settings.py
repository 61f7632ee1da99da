"""Data sets, methods and the paper's tables, as YAML files compose them: what holds, and what is refused."""

import csv
import io
from pathlib import Path

import pytest
import yaml
from commands import refused, run_python, sentence_of, step_here, succeeded
from test_recipes import ROOT, TRAIN
from test_table import table, write_scores

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes import datasets, program_flags, settings
from smoe_fairseq.recipes.compare.table import resource_classes
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.folders import run_name
from smoe_fairseq.recipes.methods import method_flags, tables
from smoe_fairseq.recipes.program_flags import arguments


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Writes a data set, or another file, into a folder that stands on the real common.yaml."""
    folder = tmp_path / "configs"
    (folder / "datasets").mkdir(parents=True)
    for name in ("common.yaml", "methods"):
        (folder / name).symlink_to(ROOT / "configs" / name)
    monkeypatch.setenv("CONFIG_DIR", str(folder))

    def write(content: dict | str | bytes, path: str = "datasets/odd.yaml") -> Path:
        if isinstance(content, dict):
            content = yaml.safe_dump(content)
        content = content.encode() if isinstance(content, str) else content
        (folder / path).write_bytes(content)
        return folder / path

    return write


def refusal(name: str = "odd") -> str:
    return sentence_of(load_dataset, name)


def test_a_file_stands_on_its_base(configs):
    base = {"train": {"lr": 1, "seed": 2}, "raw": {"codes": {"en": "eng", "fr": "fra"}}}
    configs(base, "below.yaml")
    own = {"base": "below", "pairs": ["en-fr"], "raw": {"codes": {"fr": "f"}}, "generate": None}
    configs(own | {"train": {"lr": 3, "new": True}})
    dataset = load_dataset("odd")
    assert dataset.pairs == ("en-fr",) and dataset.languages == ("en", "fr")
    assert (dataset.train["lr"], dataset.train["seed"], dataset.train["new"]) == (3, 2, True)
    assert dataset.train["adam-eps"] == 1e-6 and dataset.train["adam-betas"] == "(0.9, 0.98)"
    assert dataset.raw["codes"] == {"en": "eng", "fr": "f"}
    assert dataset.generate["beam"] == 5  # a key without a value leaves all as it was
    assert dataset.experts is None and dataset.shards == 1
    assert type(dataset.train) is dict and type(dataset.raw["codes"]) is dict


WORDLESS = ("x: {y: 1}", "x: .nan", "x: [[1]]", "x: !!binary aGVsbG8=")
PROGRAMS = ("task", "generate", "sacrebleu")


@pytest.mark.parametrize(
    "content, words",
    [
        ({"pairs": ["a-b"], "trian": {}}, "trian"),
        ("pairs: [a-b]\ntrain: {warmup-updates: 0100}\n", "line 2: 0100"),  # YAML's 64
        ("pairs: [a-b]\ntrain: {lr: 0,0008}\n", "0008"),  # YAML's lr 0, and a key without a value
        *((f"pairs: [a-b]\nprecision: {each}\n", "line 2") for each in ("'???'", '"a\\0b"')),
        ({"pairs": ["a-b"], "base": "phrasebook"}, "`base` 'phrasebook'"),
        *(("- a\n- b\n", "keys"), ("words\n", "keys")),
        *((text, "YAML") for text in ("pairs: [a-b\n", "train: {lr: 1, lr: 2}\n")),
        ("train:\n  a: &a\n    b: *a\n", "YAML"),
        *((b"\xff\xfe\xfa", "UTF-8"), ({"pairs": ["a-b"], "train": 5}, "train")),
        *(
            ({"pairs": each}, "pairs")
            for each in (["a-../b"], ["ab"], "a-b", ["a-b", "b-b"], ["a-b", "b-a"], None)
        ),
        *(({"pairs": ["a-b"], "experts": each}, "experts") for each in ("many", 0)),
        ({"pairs": ["a-b"], "raw": {"urls": "x"}}, "urls"),
        ({"pairs": ["a-b"], "raw": {"archives": [{"url": "x", "sha": "y"}]}}, "sha"),
        ({"pairs": ["a-b"], "raw": {"messages": {"test": {"least": 1}}}}, "least"),
        *((f"pairs: [en-no]\nclasses: {{low: [{x}]}}\n", "classes.low") for x in ("no", "nb")),
        ("pairs: [en-no]\nraw: {codes: {no: nob}}\n", "raw.codes"),
        ("pairs: [en-no]\nraw: {codes: {'no': 5}}\n", "raw.codes.no"),
        ({"pairs": ["a-b"], "shards": "2"}, "shards"),
        *(({"pairs": ["a-b"], "metrics": {x: "wc"}}, x) for x in ("bleu", "chrF2++", "COMET")),
        ({"pairs": ["a-b"], "classes": {"all": ["a"]}}, "classes.all"),
        ({"pairs": ["a-b"], "metrics": {"Len": "wc", "len": "wc"}}, "metrics.len"),
        ({"pairs": ["a-b"], "study": "moe"}, "study"),
        ({"pairs": ["a-b"], "parts": ["m4", "m4"]}, "parts"),
        ({"pairs": ["a-b"], "keep": ["a-c", "c-a"]}, "keep"),
        ({"pairs": ["a-b"], "train": {"max-sentences": 8}}, "train.max-sentences"),
        ({"pairs": ["a-b"], "methods": {"moe": {"seed": 3}}}, "methods.moe.seed"),
        ({"pairs": ["a-b"], "statements": {"x": ["moe"]}}, "statements.x"),
        ({"pairs": ["a-b"], "methods": {"moe": 1}}, "methods.moe"),
        ({"pairs": ["a-b"], "clean": {"overlap": "remove"}}, "clean.overlap"),
        ({"pairs": ["a-b"], "clean": {"max-words": -1}}, "clean.max-words"),
        ({"pairs": ["a-b"], "clean": {"max-ratio": float("nan")}}, "clean.max-ratio"),
        ({"pairs": ["a-b"], "shards": 10**6}, "shards"),
        ({"pairs": ["a-b"], "batch": {"x": 0}}, "batch.x"),
        ({"pairs": ["a-b"], "raw": {"files": "{langauge}"}}, "{split}, {pair}"),
        ({"pairs": ["a-b"], "raw": {"parallel": {"valid": -1}}}, "raw.parallel.valid"),
        ({"pairs": ["a-b"], "statements": {"x": ["moe", "moe"]}}, "statements.x"),
        ({"pairs": ["a-b"], "generate": {"path": "x.pt"}}, "generate.path"),
        ({"pairs": ["a-b"], "train": {"user-dir": "x"}}, "train.user-dir"),
        ({"pairs": ["a-b"], "methods": {"moe": {"save-dir": "x"}}}, "methods.moe.save-dir"),
        ({"pairs": ["a-b"], "generate": {"lenpen": float("nan")}}, "generate.lenpen"),
        ({"pairs": ["a-b"], "train": {"lr": float("nan")}}, "train.lr"),
        ({"pairs": ["a-b"], "sacrebleu": {"width": -2}}, "sacrebleu.width"),
        ({"pairs": ["a-b"], "margins": {"blue": 1}}, "margins.blue"),
        *((f"pairs: [a-b]\ntrain: {{{each}}}\n", "train.x") for each in WORDLESS),
        *((f"pairs: [a-b]\n{each}: {{x: {{y: 1}}}}\n", f"{each}.x") for each in PROGRAMS),
        ({"pairs": ["a-b"], "train": {"max-tokens": "x"}}, "train.max-tokens"),
        ({"pairs": ["a-b"], "methods": {"moe": {"update-freq": 0}}}, "methods.moe.update-freq"),
        ({"pairs": ["a-b"], "methods": {"smoe-9-9-x": {"lr": 1}}}, "methods"),
        ({"pairs": ["a-b"], "statements": {"x": ["moe", "mo"]}}, "statements.x"),
        ({"pairs": ["a-b"], "study": ["mo"]}, "study"),
        ({"pairs": ["a-b"], "checkpoint": "newest"}, "checkpoint"),
        ({"pairs": ["a-b"], "raw": {"url": "http://a/{flie}"}}, "raw.url"),
        ({"pairs": ["a-b"], "raw": {"files": {"train": "x"}}}, "raw.files.valid"),
        ({"pairs": ["a-b"], "raw": {"messages": {}}}, "raw.messages.layout"),
        ({"pairs": ["a-b"], "raw": {"archives": [{"size": 1}]}}, "raw.archives[0].url"),
    ],
    ids=range(73),
)
def test_what_a_file_may_not_hold(configs, content, words):
    path = configs(content)
    assert refusal().startswith(f"{path}") and words in refusal()


@pytest.mark.parametrize(
    "words, setting, value",
    [
        *(("prepare odd", f"subwords.{x}", 0) for x in ("vocab-size", "output")),
        ("prepare odd", "subwords.byte-fallback", "false"),
        ("prepare odd", "subwords.user-defined-symbols", ["<br>", "__fr__"]),
        *(("train odd moe", x, "x") for x in ("train.dropout", "train.dropoot", "task.task")),
        ("train odd moe", "methods.moe.clip-norm", "x"),
        ("train odd moe", "methods.moe.smoe-strata", "0-0"),
        # The value is what is unknown to the program, since the flag has none.
        *(("train odd moe", "train.share-all-embeddings", x) for x in ("a b", 1)),
        ("train odd moe", "train.adam-betas", [0.9, "x"]),  # two words
        ("train odd moe", "train.dropoot", [0.1, 0.2]),  # unknown, not a word of its list
        ("train odd moe", "train.adam-eps", 1),  # of another optimizer
        ("evaluate odd moe", "sacrebleu.metrics", "x"),
    ],
)
def test_what_a_program_refuses_is_told_with_file_and_setting(configs, words, setting, value):
    for key in reversed(setting.split(".")):
        value = {key: value}
    below = configs(yaml.safe_dump(value), "below.yaml")
    trained = TRAIN | ({"optimizer": "sgd", "adam-betas": False} if "adam-e" in setting else {})
    configs({"pairs": ["en-fr"], "base": "below", "experts": 4, "train": trained})
    folder = below.parent.parent
    given = {"DRY_RUN": "1", "GPUS": "0", "FORECAST": "1", "CONFIG_DIR": str(below.parent)}
    refused(step_here(*words.split(), cwd=folder, **given), f"{below}: `{setting}`")


@pytest.mark.parametrize("flag, value", [("beam", 0), ("lenpen", "nan")])
def test_what_no_search_can_do_is_told_with_its_setting(configs, flag, value):
    configs({"pairs": ["a-b"], "generate": {"beam": 5, flag: value}})
    words = ["data", "--path", "x", *arguments(load_dataset("odd").generate)]
    with pytest.raises(UsageError, match=f"odd.yaml: `generate.{flag}`"):
        with datasets.naming_settings(load_dataset("odd"), ["generate"]):
            program_flags.parse_flags("fairseq-generate", words)


INTERRUPTED = """
import signal
from fairseq.dataclass import utils
from smoe_fairseq.recipes.program_flags import parse_flags

def interrupted(*arguments, compose=utils.compose, **options):
    signal.raise_signal(signal.SIGINT)
    return compose(*arguments, **options)

signal.signal(signal.SIGINT, signal.default_int_handler)
utils.compose = interrupted
try:
    parse_flags("fairseq-generate", ["DATA", "--path", "x.pt"])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_while_fairseq_reads_flags_is_no_error_of_theirs():
    said = succeeded(run_python(INTERRUPTED)).stdout
    assert said.splitlines()[-1] == "interrupted" and "Overrides" not in said


def test_a_file_with_other_languages_than_its_base(configs):
    classes = {"low": ["fr", "de"], "high": ["es"]}
    configs({"pairs": ["en-fr", "en-de", "en-es"], "classes": classes}, "below.yaml")
    configs({"base": "below", "pairs": ["en-fr", "en-pt"], "classes": {"other": ["pt"]}})
    assert load_dataset("odd").classes == {"low": ["fr"], "other": ["pt"]}


def test_null_takes_away_what_a_file_inherits(configs):
    below = {"metrics": {"Mine": "wc", "Own": "wc -l"}, "classes": {"low": ["fr"]}}
    below["statements"] = {"one": ["dense", "moe"], "two": ["dense", "switch"]}
    configs({"pairs": ["en-fr"], **below}, "below.yaml")
    taken = {"metrics": {"Own": None}, "classes": {"low": None}, "statements": {"two": None}}
    configs({"base": "below", "pairs": ["en-fr"], **taken})
    dataset = load_dataset("odd")
    assert dataset.metrics == {"Mine": "wc"} and dataset.classes == {}
    assert [*dataset.statements] == ["one"]


def test_bases_that_are_missing_or_stand_on_one_another(configs):
    configs({"pairs": ["a-b"], "base": "none"})
    assert "none.yaml is missing" in refusal()
    configs({"base": "two"}, "one.yaml")
    configs({"base": "one"}, "two.yaml")
    configs({"pairs": ["a-b"], "base": "one"})
    assert "two.yaml: its `base` one is in turn based on it" in refusal()
    configs({"pairs": ["a-b"], "base": "datasets/odd"})  # a copy with the name of its base
    assert "odd.yaml: its `base` datasets/odd is in turn based on it" in refusal()


def test_a_file_that_cannot_be_read(configs):
    configs({}).unlink()
    (settings.Settings.read().config_dir / "datasets/odd.yaml").mkdir()
    assert refusal().endswith("datasets/odd.yaml cannot be read: Is a directory")


@pytest.mark.parametrize("one_way", [True, None])
def test_a_pair_that_is_kept_has_the_directions_of_the_others(configs, one_way):
    configs({"pairs": ["a-b"], "keep": ["a-c"], "one-way": one_way})
    expected = ("a-b", "a-c") if one_way else ("b-a", "a-b", "a-c", "c-a")
    assert load_dataset("odd").all_directions == expected


def test_methods_fill_in_experts_and_strata(configs):
    configs({"pairs": ["a-b"], "experts": 6, "train": {"moe-freq": None, "seed": None}})
    dataset = load_dataset("odd")
    assert run_name(dataset, "moe") == "moe"
    assert arguments(method_flags("moe", dataset)) == [
        *("--moe-freq", "2", "--smoe-strata", "6", "--moe-top-k", "2")
    ]
    assert method_flags("smoe-2-4", dataset)["smoe-strata"] == "2-4"
    assert method_flags("smoe-2-0-4", dataset)["smoe-strata"] == "2-0-4"
    assert method_flags("pyramid-2-2-4", dataset)["smoe-strata"] == "2,2,4"
    assert method_flags("moe-fine-31", dataset)["moe-expert-ffn-dim"] == "1024"  # of the base size
    dataset.train["encoder-ffn-embed-dim"] = 96
    assert method_flags("moe-fine-31", dataset)["moe-expert-ffn-dim"] == "48"
    assert method_flags("smoe-swiglu-4-4", dataset)["encoder-ffn-embed-dim"] == "64"
    assert arguments({"lr": [0.1, 0.02], "metrics": ["bleu", "chrf"], "none": []}) == [
        *("--lr", "0.1,0.02", "--metrics", "bleu", "chrf", "--none")
    ]
    assert arguments({"a": True, "b": False, "c": None, "d": 0, "e": "x y"}) == [
        *("--a", "--d", "0", "--e", "x y")
    ]


def test_recipes_are_found_beside_an_installed_package_too(tmp_path, monkeypatch):
    monkeypatch.delenv("CONFIG_DIR", raising=False)
    assert settings.Settings.read().config_dir == ROOT / "configs"
    (tmp_path / "configs/datasets").mkdir(parents=True)
    monkeypatch.setattr(settings, "__file__", str(tmp_path / "reading.py"))
    assert settings.Settings.read().config_dir == tmp_path / "configs"
    with pytest.raises(UsageError, match="holds no recipes: set --config-dir to the folder with"):
        assert settings.Settings({"CONFIG_DIR": str(tmp_path)}).config_dir


def test_a_data_set_in_a_folder_of_its_own_is_not_called_missing(configs, tmp_path):
    (tmp_path / "configs/datasets/own").mkdir()
    configs({"pairs": ["en-fr"]}, "datasets/own/odd.yaml")
    assert "is missing" not in (sentence := refusal("own/odd"))
    assert f"{tmp_path / 'configs'}/datasets" in sentence


def test_every_system_and_column_of_the_paper_is_one_of_the_recipes(monkeypatch):
    monkeypatch.setattr(
        "smoe_fairseq.recipes.compare.table._training_sizes",
        lambda d: dict.fromkeys(d.languages[1:], 1),
    )
    for name in ("m4", "m15", "opus100"):
        dataset, content = load_dataset(name), tables()[name]
        assert all(method_flags(method, dataset) for method in content["rows"])
        assert all(len(row["bleu"]) == len(content["columns"]) for row in content["rows"].values())
        classes = resource_classes(dataset)
        sides = [f"{side} {c}" for side in ("eng-xxx", "xxx-eng") for c in ("all", *classes)]
        assert content["columns"] == [*(sides if classes else dataset.directions), "average"]
        in_classes = [language for languages in classes.values() for language in languages]
        assert not classes or sorted(in_classes) == sorted(dataset.languages[1:])


def test_a_methods_file_has_no_flags_of_the_recipe(configs, tmp_path):
    configs({"pairs": ["en-fr"]})
    methods = tmp_path / "configs/methods"
    methods.unlink()  # a link to ours
    methods.mkdir()
    for name, value in {"user-dir": "x", "seed": 3, "max-sentences": 8}.items():
        configs({"train": {name: value}}, "methods/own.yaml")
        with pytest.raises(UsageError, match=f"own.yaml.*train.{name}"):
            method_flags("own", load_dataset("odd"))


def test_the_papers_numbers_stand_in_the_columns_that_a_smaller_data_set_has(configs, tmp_path):
    content = yaml.safe_load((ROOT / "configs/datasets/m4.yaml").read_text())
    configs(content | {"base": "common", "pairs": ["eng-msa"]}, "datasets/m4.yaml")
    write_scores(tmp_path / "runs/m4/smoe-4-4", {"msa-eng": 31.0, "eng-msa": 32.0})
    folder = str(tmp_path / "configs")
    text = table(tmp_path, "m4", "--format", "csv", configs=folder).stdout
    rows = list(csv.DictReader(io.StringIO(text[text.index("method,") :])))
    assert rows[0]["msa-eng"] == "31.00" and rows[1]["msa-eng"] == "41.05"
    assert rows[2]["eng-msa"] == "-15.48"
