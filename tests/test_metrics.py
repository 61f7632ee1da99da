"""Scores in this process are those of sacreBLEU's command; tokenizers by language; which checkpoint."""

import json
import shutil

import pytest
from commands import refused, run, step_here
from test_recipes import ROOT, TRAIN, commands, write_dataset

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.evaluation import metrics, scores
from smoe_fairseq.recipes.program_flags import arguments, flag_values

REFERENCES = ["The cat, here  ", "猫坐在垫子上。", "one more line of text", "end"]
TRANSLATIONS = ["The cat , here", "猫在垫子上。", "one line more of text ", "end"]


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics": ["bleu", "chrf"], "chrf-word-order": 2, "tokenize": "13a", "width": 2},
        {"metrics": ["bleu"], "tokenize": "zh", "width": 4, "smooth-method": "floor"},
        {"metrics": ["ter", "bleu"], "lowercase": True},
    ],
)
def test_as_of_the_command(tmp_path, settings):
    for name, lines in (("references", REFERENCES), ("translations", TRANSLATIONS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    words = ["references", "-i", "translations", *arguments(settings)]
    printed = run("sacrebleu", *words, cwd=tmp_path).stdout
    expected = json.loads(printed[min(x for x in map(printed.find, "[{") if x >= 0) :])
    lines = (scores.lines_of(tmp_path / name) for name in ("translations", "references"))
    assert json.loads(metrics.score(*lines, settings)) == expected


def test_flags_and_lengths_are_checked():
    with pytest.raises(UsageError, match="sacrebleu: .*--no-such"):
        metrics.score(["a"], ["a"], {"no-such": 5})
    for name, value in {"paired-bs": True, "sentence-level": True, "subset": "a"}.items():
        with pytest.raises(UsageError, match=f"--{name}"):
            metrics.check_tokenizer({"chrf-word-order": 2, name: value}, "de")
    with pytest.raises(UsageError, match="1 translations and 2 references"):
        metrics.score(["a"], ["a", "b"], {})


def test_tokenizer_of_a_language():
    auto = {"tokenize": "auto"}
    expected = {
        "zh": "zh zho_Hans zh-TW cmn yue Chinese",
        "ja-mecab": "jpn ja-JP",
        "ko-mecab": "ko kor_Hang",
        "char": "th lao_Laoo km mya_Mymr bo dz Tibetan",
        "13a": "de eng_Latn hi xx",
    }
    for tokenizer, languages in expected.items():
        assert {metrics.tokenizer_of(auto, x) for x in languages.split()} == {tokenizer}
    assert metrics.tokenizer_of({"tokenize": "flores200"}, "zh") == "flores200"
    assert metrics.tokenizer_of({"tokenize": False}, "zh") == "13a"  # sacreBLEU's own default


@pytest.fixture
def dry(tmp_path):
    """What a recipe prints of a data set ``own`` with some settings."""

    def dry(*words: str, **settings):
        if not (tmp_path / "c").exists():
            settings = {"pairs": ["en-fr"], "raw": {}, "train": TRAIN, "experts": 4} | settings
            write_dataset(tmp_path / "c", "own", **settings)
        given = {"CONFIG_DIR": str(tmp_path / "c"), "DRY_RUN": "1"}
        return step_here(*words, cwd=tmp_path, **given)

    return dry


def test_directions_have_their_tokenizers(dry, monkeypatch):
    shown = dry("evaluate", "own", "moe", pairs=["en-zh"])
    found = [words[words.index("--tokenize") + 1] for words in commands(shown, "sacrebleu")]
    assert found == ["13a", "zh"]
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"sacrebleu\[ja\]"):
        metrics.check_tokenizer({"tokenize": "auto"}, "ja")
    metrics.check_tokenizer({"tokenize": "auto"}, "zh")


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {"validate-sentences": "200", "best-checkpoint-metric": "chrf"}),
        (
            {"sentences": 7, "beam": 2, "metric": "bleu", "every": 11, "patience": 3},
            {"validate-sentences": "7", "validate-beam": "2", "best-checkpoint-metric": "bleu"}
            | {"validate-interval-updates": "11", "save-interval-updates": "11", "patience": "3"}
            | {"validate-interval": "1000000"},
        ),
        (
            {"sentences": None, "metric": None, "every": 11},  # null is as if not set
            {"validate-sentences": "200", "best-checkpoint-metric": "chrf"},
        ),
    ],
)
def test_settings_of_validation_by_translations(dry, settings, expected):
    shown = dry("train", "own", "moe", validate=settings or {"metric": "chrf"})
    (words,) = commands(shown, "fairseq-train")
    flags = flag_values(words)
    assert flags["--maximize-best-checkpoint-metric"] == ""
    assert {name: flags.get(f"--{name}") for name in expected} == expected
    assert ("--patience" in flags) == ("patience" in settings)
    # fairseq does not validate after the last epoch by itself; the schedule needs each epoch's loss.
    plateau = ("--lr-scheduler", "reduce_lr_on_plateau")
    for typed, expected in ((("--max-epoch", "3"), "3"), (plateau, "1")):
        (words,) = commands(dry("train", "own", "moe", *typed), "fairseq-train")
        every = flag_values(words).get("--validate-interval")
        assert every == (expected if "every" in settings else None)


@pytest.mark.parametrize("checkpoint", ["best", "average:2"])
@pytest.mark.parametrize("flags", [(), ("--expert-parallel",)])
def test_what_a_study_measures_after_training(dry, flags, checkpoint):
    """Of a checkpoint in one file, with all language tokens of the model."""
    given = {"pairs": ["en-de", "en-fr"], "keep": ["de-fr"], "checkpoint": checkpoint}
    shown = dry("study", "own", "smoe-2-2", "--gpus", "2", *flags, **given)
    shown.stdout = shown.stdout.replace(" && ", "\n")
    analyze = next(words for words in commands(shown, "smoe") if words[1] == "analyze")
    (validate,) = commands(shown, "fairseq-validate")
    file = "consolidated/checkpoint_best.pt" if flags else "checkpoint_best.pt"
    file = "averaged/checkpoint_average_2.pt" if checkpoint != "best" else file
    for words in (analyze, validate):
        assert words[words.index("--path") + 1] == f"runs/own/smoe-2-2/{file}"
    assert flag_values(validate)["--langs"] == "en,de,fr"
    assert flag_values(validate)["--lang-pairs"] == "fr-de,de-fr"


@pytest.mark.parametrize("metric, maximize", [("loss", False), ("bleu", True)])
def test_another_metric_than_that_of_the_file(dry, metric, maximize):
    typed = ("--best-checkpoint-metric", metric)
    (words,) = commands(dry("train", "own", "moe", *typed, validate={"every": 9}), "fairseq-train")
    assert ("--maximize-best-checkpoint-metric" in words) == maximize


def test_all_validations_that_are_asked_for_are_saved(dry):
    for every, saves in (("40", "40"), ("2000", "1000"), ("1500", "1500")):  # the file has 1000
        typed = ("--validate-interval-updates", every)
        (words,) = commands(dry("train", "own", "moe", *typed), "fairseq-train")
        assert flag_values(words)["--save-interval-updates"] == saves


def test_validations_that_would_not_be_saved_are_refused(dry):
    fewer, more = (("--save-interval-updates", each) for each in ("20", "5"))
    refused(dry("train", "own", "moe", *fewer, validate={"every": 10}), " ".join(fewer))
    assert dry("train", "own", "moe", *more).returncode == 0


@pytest.mark.parametrize(
    "name", [file.stem for file in sorted((ROOT / "configs/datasets").glob("*"))]
)
def test_each_data_set_trains(tmp_path, name):
    """What docs/study.md and others say to type; to fine-tune, the model has to be prepared before."""
    said = step_here("train", name, "dense", cwd=tmp_path, DRY_RUN="1", GPUS="0")
    assert said.returncode == 0 or f"data/{name}/bin is missing" in said.stderr


def test_a_methods_own_metric(dry):
    own = {"best-checkpoint-metric": "accuracy", "maximize-best-checkpoint-metric": True}
    said = dry("train", "own", "moe", validate={"every": 9}, methods={"moe": own})
    (words,) = commands(said, "fairseq-train")
    assert {"accuracy", "--maximize-best-checkpoint-metric"} <= {*words}


BY_CHRF = {"validate": {"metric": "chrf", "every": 10, "patience": 3}}


@pytest.mark.parametrize(
    "section, name, value, other",
    [
        ("train", "patience", 20, BY_CHRF),
        ("train", "save-interval-updates", 20, BY_CHRF),
        ("train", "best-checkpoint-metric", "chrf", {"validate": {"metric": "loss", "every": 2}}),
        ("train", "bf16", True, {"precision": "fp32"}),
        ("validate", "sentences", 5, {"validate": {"metric": "loss"}}),
        ("validate", "beam", 5, {"validate": {"metric": "loss"}}),
    ],
)
def test_settings_that_do_not_go_together_are_refused(dry, section, name, value, other):
    settings = {"train": TRAIN, **other}
    settings[section] = {**settings[section], name: value}
    refused(dry("train", "own", "moe", **settings), "own.yaml", f"{section}.{name}")


def test_the_mean_of_the_last_checkpoints(dry, tmp_path):
    run_folder = tmp_path / "runs/own/moe"
    run_folder.mkdir(parents=True)
    for name in ("_best", "_last", "_1_900", "_1_1000", "_2_1100-rank-0", "_2_1100-rank-1", "1"):
        (run_folder / f"checkpoint{name}.pt").touch()

    def evaluated(which: str):
        return dry("evaluate", "own", "moe", "--checkpoint", which)

    shown = evaluated("average:2")
    (average,) = commands(shown, "smoe")
    output = "runs/own/moe/averaged/checkpoint_average_2.pt"
    parts = [f"runs/own/moe/checkpoint_{n}.pt" for n in ("1_1000", "2_1100")]
    assert average == ["smoe", "average", *parts, "--output", output, "--force"]
    assert all(
        words[words.index("--path") + 1] == output for words in commands(shown, "fairseq-generate")
    )
    (words, _) = commands(evaluated("last"), "fairseq-generate")
    assert words[words.index("--path") + 1] == "runs/own/moe/checkpoint_last.pt"
    for wrong in ("average:4", "average:0", "average:", "worst"):
        refused(evaluated(wrong), f"--checkpoint {wrong}")


def test_a_run_is_not_scored_without_bleu(dry):
    refused(dry("evaluate", "own", "moe", sacrebleu={"metrics": ["chrf"]}), "`sacrebleu.metrics`")


def test_flags_that_only_fairseqs_search_has_are_refused(prepared, tmp_path):
    run = tmp_path / "tiny/smoe-2-2"
    shutil.copytree(prepared / "runs/tiny/smoe-2-2", run)
    given = {"CONFIG_DIR": str(prepared / "configs"), "OMP_NUM_THREADS": "1"}
    given["RUN_DIR"] = str(tmp_path)
    for flag, value in (("--diverse-beam-groups", "2"), ("--scoring", "chrf")):
        words = ("evaluate", "tiny", "smoe-2-2", "--cpu", flag, value)
        refused(step_here(*words, cwd=prepared, **given), flag)
    assert (run / "scores.json").exists()
