"""``smoe table``: the paper's layout from saved scores, beside numbers worked out by hand."""

import csv
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import sacrebleu
import torch
from commands import refused, run, smoe
from test_recipes import write_dataset

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.compare import statistics
from smoe_fairseq.recipes.compare.table import Column, average
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.scores import Score
from smoe_fairseq.recipes.folders import fingerprints
from smoe_fairseq.recipes.program_flags import arguments

ROOT = Path(__file__).parents[1]
SIGNATURE = "nrefs:1|tok:13a"
M15 = "nso run ssw ind msa isl nob fao slv tgl cat glg fur ltz lim".split()
M15_CLASSES = {
    "high": "ind msa isl slv tgl".split(),
    "low": "nso run nob cat glg".split(),
    "very-low": "ssw fao fur ltz lim".split(),
}


def table(folder: Path, *words: str, check=True, configs: str = str(ROOT / "configs")):
    """``smoe table WORDS``, in this process; ``stdout`` holds stderr too."""
    folders = {"DATA_DIR": str(folder / "data"), "RUN_DIR": str(folder / "runs")}
    return smoe("table", *words, check=check, cwd=folder, CONFIG_DIR=configs, **folders)


def refusal(folder: Path, *words: str, **more) -> str:
    return refused(table(folder, *words, check=False, **more))


def compared(folder: Path, first: str, second: str, *words: str, **more) -> dict[str, list[str]]:
    """Both means, their difference and p-values of multi30k, by direction."""
    words = ("multi30k", "--compare", first, second, "--format", "csv", *words)
    rows = csv.reader(table(folder, *words, **more).stdout.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) > 4}


def write_scores(folder: Path, scores: dict[str, float], signature=SIGNATURE, **signatures):
    folder.mkdir(parents=True)
    cells = {
        d: {"bleu": bleu, "signature": signatures.get(d.replace("-", "_"), signature)}
        | {"sentences": 3}
        for d, bleu in scores.items()
    }
    (folder / "scores.json").write_text(json.dumps({"scores": cells}))


def cells(folder: Path, dataset: str, **more) -> dict[tuple[str, str], dict[str, str]]:
    """Rows by method and source, as CSV has them."""
    return rows_of(table(folder, dataset, "--format", "csv", **more).stdout)


def rows_of(printed: str) -> dict[tuple[str, str], dict[str, str]]:
    lines = [line for line in printed.split("\n\n")[0].splitlines() if line.count(",") > 5]
    return {(r["method"], r.get("source", "")): r for r in csv.DictReader(lines)}


FULL = {"de-en": 30.0, "fr-en": 40.1, "cs-en": 20.25, "en-de": 10.0, "en-fr": 50.0, "en-cs": 0.0}


def test_directions_average_and_missing_cells(tmp_path):
    runs = tmp_path / "runs/multi30k"
    write_scores(runs / "dense", FULL)
    write_scores(runs / "smoe-4-4", {d: bleu for d, bleu in FULL.items() if d != "fr-en"})
    write_scores(runs / "untested", {"de-fr": 9.0})  # of pairs that were another day's
    (runs / ".ipynb_checkpoints").mkdir()  # of another program
    printed = re.sub(" +", " ", table(tmp_path, "multi30k").stdout)
    header, _, *rows = (line for line in printed.splitlines() if line.startswith("|"))
    assert header.split(" | ")[3:] == [*FULL, "average |"]
    assert rows == [
        "| dense | 1.2 | 4.1 | 30.00 | 40.10 | 20.25 | 10.00 | 50.00 | 0.00 | 25.06 |",
        "| smoe-4-4 | 2.1 | 4.7 | 30.00 | - | 20.25 | 10.00 | 50.00 | 0.00 | - |",
        "| untested | - | - | - | - | - | - | - | - | - |",
    ]
    notes = [line.partition(" directions")[0] for line in printed.split("\n\n")[-1].splitlines()]
    assert notes == [
        *(f"dense: sacreBLEU {SIGNATURE}", f"smoe-4-4: sacreBLEU {SIGNATURE}", "smoe-4-4: 5 of 6"),
        *(f"untested: sacreBLEU {SIGNATURE}", "untested: 0 of 6"),
    ]
    assert "scripts/evaluate.sh multi30k untested" in printed


def test_a_pair_without_a_test_set_is_no_part_of_the_average(tmp_path):
    write_scores(tmp_path / "runs/multi30k/dense", {d: 10 for d in FULL if "fr" not in d})
    raw = tmp_path / "data/multi30k/raw"
    raw.mkdir(parents=True)
    for name in ("en-de.de", "en-de.en", "en-cs.cs", "en-cs.en", "en-fr.fr"):
        (raw / f"test.{name}").write_text("a\n")
    row = cells(tmp_path, "multi30k")["dense", ""]
    assert row["average"] == "10.00" and "fr-en" not in row and "en-cs" in row


def test_scores_with_the_tokenizer_of_each_language_are_averaged():
    column = Column("average", ("en-zh", "zh-en"))

    def mean(**tokenizers: str) -> float | None:
        found = {
            direction: Score(bleu, f"nrefs:1|tok:{tokenizers[direction[:2]]}|v:2", 9)
            for direction, bleu in (("en-zh", 20.0), ("zh-en", 30.0))
        }
        return average(found, column)

    assert mean(en="zh", zh="13a") == 25
    assert mean(en="13a", zh="13a") == 25
    assert mean(en="char", zh="13a") is None
    # The signature of MeCab's has versions.
    japanese = {"en-ja": Score(20.0, "nrefs:1|tok:ja-mecab-0.996-IPA|v:2", 9)}
    japanese["ja-en"] = Score(30.0, "nrefs:1|tok:13a|v:2", 9)
    assert average(japanese, Column("average", tuple(japanese))) == 25


def change_scores(run: Path, direction: str = "", **values) -> None:
    """Set values in ``scores.json``, in a direction's part if one is given."""
    content = json.loads((run / "scores.json").read_text())
    (content["scores"][direction] if direction else content).update(values)
    (run / "scores.json").write_text(json.dumps(content))


def test_a_search_with_other_flags_is_told(folder):
    """Of several runs that whose; where it is the data set's nothing is said."""
    usual = arguments(load_dataset("multi30k").generate)
    bias = ["--model-overrides", "{'smoe_exit_bias': 2}"]
    for method, flags in {"dense": usual, "moe": [*usual, "--beam", "1", *bias]}.items():
        change_scores(folder / "runs/multi30k" / method, generate=" ".join(flags))
    for words in ([], ["--compare", "moe", "dense"]):
        printed = table(folder, "multi30k", *words).stdout.splitlines()
        told = [line for line in printed if "translated" in line]
        assert told == [f"moe: translated with --beam 1 {' '.join(bias)}"]
        assert any("differ: " in line and "search" in line for line in printed) == bool(words)


@pytest.mark.parametrize("other", [{"checkpoint": "checkpoint_last.pt"}, {"generate": ""}])
def test_seeds_of_different_checkpoints_or_searches_are_not_averaged(folder, other):
    runs = folder / "runs/multi30k"
    usual = {"generate": " ".join(arguments(load_dataset("multi30k").generate))}
    for seed in (2, 3):
        shutil.copytree(runs / "moe", runs / f"moe.seed-{seed}")
    for each in runs.glob("moe*"):
        change_scores(each, checkpoint="checkpoint_best.pt", **usual)
    change_scores(runs / "moe.seed-2", **other)
    printed = table(folder, "multi30k").stdout
    assert "moe: seeds with different checkpoints or searches are not averaged" in printed
    flag = "--checkpoint last" if "checkpoint" in other else "--beam"
    (note,) = [line for line in printed.splitlines() if line.startswith("moe.seed-2: translated")]
    assert flag in note
    assert flag in refusal(folder, "multi30k", "--compare", "dense", "moe")
    for each in runs.glob("moe*"):
        change_scores(each, **other)
    assert cells(folder, "multi30k")["moe, mean of 3 seeds", ""]["en-de"] == "100.00"


def test_scores_on_other_test_sets_are_told_and_not_compared(folder):
    raw, runs = folder / "data/multi30k/raw", folder / "runs/multi30k"
    (raw / "test.en-de.en").write_text("a\n" * 60)
    texts = (raw / f"test.en-de.{language}" for language in ("en", "de"))
    now = hashlib.sha256(b"".join(file.read_bytes() for file in texts)).hexdigest()
    compare = ("multi30k", "--compare", "dense", "moe")
    for dense, moe in ((now, None), (now, "old"), ("old", "old")):
        for name, checksum in (("dense", dense), ("moe", moe)):
            change_scores(runs / name, "en-de", test_checksum=checksum)
        printed = table(folder, "multi30k").stdout.splitlines()
        notes = [line.split(":")[0] for line in printed if f"{raw} (en-de)" in line]
        assert notes == ["dense"] * (dense == "old") + ["moe"] * (moe == "old")
        if notes:
            assert f"{raw} (en-de)" in refusal(folder, *compare)
        else:
            table(folder, *compare)


@pytest.mark.parametrize(
    "old, new",
    [
        ('"bleu": 40.0', '"bleu": NaN'),
        ('"bleu": 40.0', '"blue": 40.0'),
        ('"sentences": 3', '"sentences": 3.5'),
        ('"sentences": 3', '"sentences": 3, "others": {"chrF++": [1]}'),
        ('{"scores": {', '{"scores": {"a-b": null, '),
    ],
)
def test_scores_of_another_kind_are_named(tmp_path, old, new):
    folder = tmp_path / "moe"
    write_scores(folder, dict.fromkeys(FULL, 40.0))
    text = (folder / "scores.json").read_text()
    assert len(scores.read(folder)) == len(FULL)
    assert old in text
    (folder / "scores.json").write_text(text.replace(old, new))
    with pytest.raises(UsageError, match="scores.json"):
        scores.read(folder)


def test_m4_beside_the_paper(tmp_path):
    directions = "nso-eng msa-eng tgl-eng cat-eng eng-nso eng-msa eng-tgl eng-cat".split()
    runs = tmp_path / "runs/m4"
    write_scores(runs / "smoe-4-4", {d: 30.0 + i for i, d in enumerate(directions)})
    write_scores(runs / "moe", dict.fromkeys(directions, 40.0))
    found = cells(tmp_path, "m4")
    assert list(found) == [
        (method, source)
        for method in ("moe", "smoe-4-4")  # the paper's order
        for source in ("ours", "paper", "difference")
    ]
    ours, paper, less = (found["smoe-4-4", source] for source in ("ours", "paper", "difference"))
    assert list(ours)[4:] == [*directions, "average"]
    assert (ours["msa-eng"], paper["msa-eng"], less["msa-eng"]) == ("31.00", "41.05", "-10.05")
    assert (ours["average"], paper["average"], less["average"]) == ("33.50", "40.40", "-6.90")
    assert (ours["parameters (M)"], paper["parameters (M)"]) == ("148.8", "148")
    assert paper["FLOPs/token (M)"] == "217" and ours["FLOPs/token (M)"].startswith("213")


def test_m15_averages_by_class(tmp_path):
    scores = {f"eng-{x}": 10.0 + i for i, x in enumerate(M15)}
    scores |= {f"{x}-eng": 30.0 + 2 * i for i, x in enumerate(M15)}
    write_scores(tmp_path / "runs/m15/smoe-4-12", scores)
    write_scores(
        tmp_path / "runs/m15/moe", {d: bleu for d, bleu in scores.items() if d != "eng-fao"}
    )
    found = cells(tmp_path, "m15")
    ours, partial = found["smoe-4-12", "ours"], found["moe", "ours"]
    assert ours["eng-xxx all"] == "17.00" and ours["xxx-eng all"] == "44.00"
    assert ours["average"] == "30.50"
    for name, languages in M15_CLASSES.items():
        mean = sum(M15.index(x) for x in languages) / 5
        assert ours[f"eng-xxx {name}"] == f"{10 + mean:.2f}"
        assert ours[f"xxx-eng {name}"] == f"{30 + 2 * mean:.2f}"
    missing = {column for column, value in partial.items() if value == "-"}
    assert missing == {"eng-xxx all", "eng-xxx very-low", "average"}
    assert found["moe", "paper"]["eng-xxx all"] == "32.01"
    assert found["moe", "difference"]["eng-xxx all"] == "-"


def test_classes_where_english_is_second(tmp_path):
    """The language of all pairs is the other side of the averages, wherever it stands in a pair."""
    classes = {"high": ["de"], "low": ["fr", "cs"]}
    pairs = {"pairs": ["de-en", "fr-en", "cs-en"], "raw": {}, "classes": classes}
    write_dataset(tmp_path / "c", "own", **pairs, train={"arch": "smoe_transformer_tiny"})
    write_scores(tmp_path / "runs/own/moe", FULL)
    (ours,) = cells(tmp_path, "own", configs=str(tmp_path / "c")).values()
    assert ours["eng-xxx high"] == "10.00" and ours["xxx-eng high"] == "30.00"
    assert ours["eng-xxx low"] == "25.00" and ours["xxx-eng all"] == "30.12"


def test_tokenizers_are_those_of_what_is_averaged(tmp_path):
    """The kept direction has another one, which is in no average."""
    recipe = {"pairs": ["en-fr"], "keep": ["en-km"], "raw": {}, "train": {"arch": "transformer"}}
    configs = write_dataset(tmp_path / "c", "own", **recipe)["CONFIG_DIR"]
    scored = {"fr-en": 10.0, "en-fr": 20.0, "en-km": 30.0}
    write_scores(tmp_path / "runs/own/moe", scored, en_km="nrefs:1|tok:char")
    shown = table(tmp_path, "own", configs=configs)
    assert "15.00" in shown.stdout and "different tokenizers" not in shown.stdout + shown.stderr


def test_a_pair_without_a_test_set_is_in_no_class(tmp_path):
    classes = {"high": ["de"], "low": ["fr", "cs"]}
    pairs = {"pairs": ["en-de", "en-fr", "en-cs"], "raw": {}, "classes": classes}
    write_dataset(tmp_path / "c", "own", **pairs, train={"arch": "smoe_transformer_tiny"})
    (tmp_path / "data/own/raw").mkdir(parents=True)
    for pair in ("en-de", "en-fr"):
        for language in pair.split("-"):
            (tmp_path / f"data/own/raw/test.{pair}.{language}").write_text("a\n")
    write_scores(tmp_path / "runs/own/moe", {d: FULL[d] for d in FULL if "cs" not in d})
    (ours,) = cells(tmp_path, "own", configs=str(tmp_path / "c")).values()
    assert ours["eng-xxx low"] == f"{FULL['en-fr']:.2f}"
    assert ours["xxx-eng all"] == f"{(FULL['de-en'] + FULL['fr-en']) / 2:.2f}"


def test_directions_without_the_common_language_have_columns(tmp_path):
    pairs = {"pairs": ["de-fr", "cs-de", "en-es"], "raw": {}, "classes": {"high": ["fr"]}}
    write_dataset(tmp_path / "c", "own", **pairs, train={"arch": "smoe_transformer_tiny"})
    scored = ("de-fr", "fr-de", "de-cs", "cs-de", "en-es", "es-en")
    write_scores(tmp_path / "runs/own/moe", {d: 10.0 * i for i, d in enumerate(scored)})
    (ours,) = cells(tmp_path, "own", configs=str(tmp_path / "c")).values()
    found = {name: ours[name] for name in list(ours)[3:]}
    assert found == {
        **{"de-xxx all": "10.00", "de-xxx high": "0.00", "xxx-de all": "20.00"},
        **{"xxx-de high": "10.00", "en-es": "40.00", "es-en": "50.00", "average": "25.00"},
    }


def test_opus100_averages_by_counted_sizes(tmp_path, monkeypatch):
    monkeypatch.setenv("CONFIG_DIR", str(ROOT / "configs"))
    languages = list(load_dataset("opus100").languages[1:])
    scored = {f"{x}-en": float(i) for i, x in enumerate(languages)}
    scored |= {f"en-{x}": float(2 * i) for i, x in enumerate(languages)}
    write_scores(tmp_path / "runs/opus100/dense", scored)
    printed = table(tmp_path, "opus100", "--format", "csv").stdout
    assert "sizes.json" in printed
    unknown = rows_of(printed)["dense", "ours"]
    assert unknown["eng-xxx high"] == "-" and unknown["eng-xxx all"] == "93.00"
    each = (900_001, 900_000, 100_000, 99_999)
    sizes = {f"en-{x}": each[i % 4] for i, x in enumerate(languages)}
    path = tmp_path / "data/opus100/sizes.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(sizes))
    ours = cells(tmp_path, "opus100")["dense", "ours"]
    for name, parts in {"high": (0,), "medium": (1, 2), "low": (3,)}.items():
        chosen = [i for i in range(94) if i % 4 in parts]
        mean = sum(chosen) / len(chosen)
        assert ours[f"eng-xxx {name}"] == f"{2 * mean:.2f}"
        assert ours[f"xxx-eng {name}"] == f"{mean:.2f}"
    path.write_text(json.dumps({x: n for x, n in sizes.items() if x != "en-af"}))
    assert "has no size for en-af" in refusal(tmp_path, "opus100")


def test_the_size_of_a_model_is_that_with_the_prepared_dictionary(tmp_path):
    """A small text has fewer subwords than the data set's setting, of 4,000."""
    write_scores(tmp_path / "runs/multi30k/dense", FULL)
    binary = tmp_path / "data/multi30k/bin"
    binary.mkdir(parents=True)

    def parameters(subwords: int) -> float:
        (binary / "dict.en.txt").write_text("".join(f"w{i} 1\n" for i in range(subwords - 3)))
        return float(cells(tmp_path, "multi30k")["dense", ""]["parameters (M)"])

    assert parameters(12_000) - parameters(2_000) == pytest.approx(1e4 * 128 / 1e6, abs=0.11)


def test_latex_is_one_tabular_of_even_rows(tmp_path):
    write_scores(tmp_path / "runs/multi30k/a_b", FULL)
    lines = table(tmp_path, "multi30k", "--format", "latex").stdout.splitlines()
    begin, end = lines.index(r"\begin{tabular}{lrrrrrrrrr}"), lines.index(r"\end{tabular}")
    rows = [line for line in lines[begin + 1 : end] if line != r"\hline"]
    assert all(row.endswith(r" \\") and row.count(" & ") == 9 for row in rows)
    assert rows[1].replace(" ", "").startswith(r"a\_b&--&--&30.00&")
    assert all(line.startswith("% ") for line in lines[:begin])


def write_translations(folder: Path, method: str, lines: list[str], references: list[str]):
    score = sacrebleu.BLEU()
    run_folder = folder / "runs/multi30k" / method
    bleu = score.corpus_score(lines, [references]).score
    write_scores(run_folder, {"en-de": bleu})
    (run_folder / "test").mkdir()
    (run_folder / "test/en-de.txt").write_text("".join(f"{line}\n" for line in lines))
    raw = folder / "data/multi30k/raw"
    raw.mkdir(parents=True, exist_ok=True)
    (raw / "test.en-de.de").write_text("".join(f"{line}\n" for line in references))
    return bleu


@pytest.fixture
def folder(tmp_path) -> Path:
    """With runs of two systems, of which moe is better than dense."""
    words = "ein Mann und eine Frau gehen mit dem Hund durch den Park nach Hause".split()
    references = [" ".join(words[i % 7 :] + words[: i % 5]) + "\u2028." for i in range(60)]
    worse = [" ".join(line.split()[: 5 if i % 2 else 40]) for i, line in enumerate(references)]
    write_translations(tmp_path, "dense", worse, references)
    write_translations(tmp_path, "moe", references, references)
    return tmp_path


def points(folder: Path) -> list[float]:
    """BLEU of dense and of moe."""
    return [scores.read(folder / "runs/multi30k" / m)["en-de"].bleu for m in ("dense", "moe")]


def test_broken_translations_are_told_in_a_comparison(folder):
    file = folder / "runs/multi30k/moe/scores.json"
    (direction, *_) = json.loads(file.read_text())["scores"]
    words = ("multi30k", "--compare", "moe", "dense")
    before = table(folder, *words).stdout
    change_scores(folder / "runs/multi30k/moe", direction, length_ratio=9.5)
    told = set(table(folder, *words).stdout.splitlines()) - set(before.splitlines())
    assert len(told) == 1 and told.pop().startswith(f"moe: the translations of {direction} ")


def test_paired_bootstrap(folder):
    a, b = points(folder)
    rows = compared(folder, "dense", "moe")
    assert rows["direction"] == ["dense", "moe", "difference", "p"]
    assert rows["en-de"][:3] == [f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"]
    assert float(rows["en-de"][3]) < 0.01 and rows["en-fr"] == ["-"] * 4
    shutil.copytree(folder / "runs/multi30k/dense", folder / "runs/multi30k/switch")
    assert compared(folder, "dense", "switch")["en-de"][2:] == ["+0.00", "-"]


def test_pairs_that_are_not_trained_are_compared_apart(folder):
    recipe = {"pairs": ["en-fr"], "keep": ["en-de"], "raw": {}, "train": {"arch": "transformer"}}
    configs = write_dataset(folder / "c", "multi30k", **recipe)["CONFIG_DIR"]
    assert "no direction" in refusal(
        folder, "multi30k", "--compare", "dense", "moe", configs=configs
    )
    shutil.copy(
        folder / "data/multi30k/raw/test.en-de.de", folder / "data/multi30k/raw/test.en-fr.fr"
    )
    for method, bleu in zip(("dense", "moe"), points(folder)):
        run_folder = folder / "runs/multi30k" / method
        shutil.copy(run_folder / "test/en-de.txt", run_folder / "test/en-fr.txt")
        content = json.loads((run_folder / "scores.json").read_text())["scores"]
        content["en-fr"] = content["en-de"] | {"bleu": bleu / 2}
        change_scores(run_folder, scores=content)
        shutil.copytree(run_folder, run_folder.with_name(f"{method}.seed-2"))
    rows = compared(folder, "dense", "moe", configs=configs)
    assert [*rows][1:] == [
        "fr-en",
        "en-fr",
        "average",
        "en-de (not trained)",
        "de-en (not trained)",
    ]
    assert rows["average"][:3] == rows["en-fr"][:3] != rows["en-de (not trained)"][:3]
    assert float(rows["en-de (not trained)"][3]) < 0.01


def test_flags_of_the_metric_are_those_of_the_test(folder):
    """Translations that differ in case alone are equal where case does not count."""
    better = folder / "runs/multi30k/moe/test/en-de.txt"
    better.write_text((folder / "runs/multi30k/dense/test/en-de.txt").read_text().lower())
    recipe = {"pairs": ["en-de"], "raw": {}, "train": {"arch": "smoe_transformer_tiny"}}
    write_dataset(folder / "c", "multi30k", **recipe, sacrebleu={"lowercase": True})
    assert compared(folder, "dense", "moe", configs=str(folder / "c"))["en-de"][3] == "1.0000"


def test_scores_by_other_settings_than_those_of_the_test_are_not_compared(folder):
    for method in ("dense", "moe"):
        signature = "nrefs:1|case:lc|tok:13a|version:2.0.0"
        change_scores(folder / "runs/multi30k" / method, "en-de", signature=signature)
    sentence = refusal(folder, "multi30k", "--compare", "dense", "moe")
    assert "case:lc" in sentence and "case:mixed" in sentence and "evaluate" in sentence
    assert "version" not in sentence


def test_spbleu_is_compared_with_the_tokenizer_of_its_scores(folder, prepared):
    """The data set's, if that splits into pieces; the model of the other one is not there."""
    (folder / "models").mkdir()
    model = folder / "models/sacrebleu_tokenizer_spm.model"
    shutil.copyfile(prepared / "data/tiny/bin/spm.model", model)
    for file in folder.glob("runs/multi30k/*/scores.json"):
        spbleu = [len(file.parent.name), "tok:flores101"]
        change_scores(file.parent, "en-de", others={"spBLEU": spbleu})
    own = {"pairs": ["en-de"], "raw": {}, "train": {"arch": "smoe_transformer_tiny"}}
    write_dataset(folder / "c", "multi30k", **own, sacrebleu={"tokenize": "flores101"})
    words = ("multi30k", "--metric", "spbleu", "--compare", "dense", "moe", "--format", "csv")
    given = {"CONFIG_DIR": str(folder / "c"), "SACREBLEU": str(folder)}
    given |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # no download
    lines = run("smoe", "table", *words, cwd=folder, fresh=True, **given).stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("en-de"))
    assert float(row.split(",")[4]) < 0.01


def test_runs_that_are_still_being_scored_are_compared(folder):
    before = compared(folder, "dense", "moe")
    run = folder / "runs/multi30k/moe"
    (run / "scores.json").rename(run / "test/scores.json")
    (run / "test").rename(run / "test.partial")
    assert compared(folder, "dense", "moe") == before


def test_many_seeds_are_drawn_from(monkeypatch):
    """Of 252 permutations two are as far apart; with 100 drawn ones p is 1 / 101 or more."""
    monkeypatch.setattr(statistics, "PERMUTATIONS", 100)
    assert 1 / 101 <= statistics.permutation_p(range(5), range(100, 105)) < 0.05


def test_seeds_are_compared_by_sentences_and_by_seeds(folder):
    """p-values by hand: of 6 ways to take two of four runs, two are as far apart as these."""
    a, b = points(folder)
    runs = folder / "runs/multi30k"
    for name in ("dense", "moe"):
        shutil.copytree(runs / name, runs / f"{name}.seed-2")
    file = runs / "moe.seed-2/scores.json"
    file.write_text(file.read_text().replace(f'"bleu": {b}', f'"bleu": {b - 1}'))
    said = refusal(folder, "multi30k", "--compare", "moe", "moe.seed-2")
    assert "both have moe.seed-2" in said
    words = ("multi30k", "--compare", "dense", "moe")
    printed, rows = table(folder, *words).stdout, compared(folder, *words[2:])
    assert rows["direction"] == [
        *("dense, mean of 2", "moe, mean of 2", "difference", "p (sentences)", "p (seeds)")
    ]
    assert rows["en-de"][:3] == [f"{a:.2f}", f"{b - 0.5:.2f}", f"{b - 0.5 - a:+.2f}"]
    assert float(rows["en-de"][3]) < 0.01 and rows["en-de"][4] == "0.3333"
    assert rows["average"] == [*rows["en-de"][:3], "-", "0.3333"]
    assert "moe: moe, moe.seed-2" in printed and "at least 0.3333" in printed
    # Two differences that are 1 apart: a standard error of 0.5, and t of one degree of freedom is 12.706.
    low, high = (f"{b - 0.5 - a + sign * 0.5 * 12.7062:+.2f}" for sign in (-1, 1))
    assert f"within the 2 seeds of both: {b - 0.5 - a:+.2f} [{low}, {high}]" in printed
    one = table(folder, *words[:2], "dense.seed-2", "moe.seed-2").stdout
    assert "within" not in one
    assert "mean of" not in one and f"{b - 1:.2f}" in one


def test_a_sentence_is_drawn_with_the_translations_of_all_seeds(folder):
    """The same translations three times are no more sentences: the p-value is that of one."""
    runs = folder / "runs/multi30k"
    reference = (folder / "data/multi30k/raw/test.en-de.de").read_text().split("\n")[:-1]
    # A difference of chance: each is right where the other is not, one of them in two more.
    for name, right in (("dense", range(0, 60, 2)), ("moe", [*range(1, 60, 2), 0, 2])):
        lines = [x if i in right else "nein" for i, x in enumerate(reference)]
        (runs / name / "test/en-de.txt").write_text("".join(f"{x}\n" for x in lines))

    def p_value() -> float:
        return float(compared(folder, "dense", "moe")["en-de"][3])

    one = p_value()
    assert 0.02 < one < 0.9
    for name in ("dense", "moe"):
        for seed in (2, 3):
            shutil.copytree(runs / name, runs / f"{name}.seed-{seed}")
    assert p_value() == one


def test_other_metrics_have_a_table_of_their_own(folder):
    runs = folder / "runs/multi30k"
    chrf = ("chrF++", [50.0, "nrefs:1|nw:2"])
    for name, others in (
        ("dense", dict([chrf, ("chrF3+", [31.0, "nrefs:1|nw:1"])])),
        ("moe", dict([chrf, ("spBLEU", [7.0, "tok:f"])])),
    ):
        change_scores(runs / name, "en-de", others=others)
    printed = table(folder, "multi30k", "--metric", "chrf++").stdout
    assert printed.count(" 50.00 |") == 2 and "sacreBLEU's chrF++ nrefs:1|nw:2" in printed
    printed = table(folder, "multi30k", "--metric", "spbleu").stdout
    assert printed.count("7.00 |") == 1 and "scripts/evaluate.sh multi30k dense" in printed
    assert "tokenizer flores200" in printed  # without its model, another evaluation adds nothing
    printed = table(folder, "multi30k", "--metric", "chrF3+").stdout  # by a data set's sacrebleu
    assert printed.count(" 31.00 |") == 1 and "multi30k moe" in printed
    compared = table(folder, "multi30k", "--metric", "chrf++", "--compare", "dense", "moe").stdout
    assert "50.00" in compared and "0.00" in compared
    write_scores(folder / "runs/m4/moe", {"eng-nso": 20.0})
    assert "paper" not in table(folder, "m4", "--metric", "chrf++").stdout


def test_comet_of_different_numbers_of_seeds(folder):
    """Of three seeds that score as one does, no difference is shown."""
    runs = folder / "runs/multi30k"
    for seed in (2, 3):
        shutil.copytree(runs / "moe", runs / f"moe.seed-{seed}")
    for file in runs.glob("*/scores.json"):
        change_scores(file.parent, "en-de", others={"COMET": [50.0, "model:m"]})
        sentences = {"sentences": [0.25, 0.75] * 30}
        (file.parent / "test/en-de.comet.json").write_text(json.dumps(sentences))
    rows = compared(folder, "dense", "moe", "--metric", "comet")
    assert rows["en-de"] == ["50.00", "50.00", "+0.00", "-", "-"]


def test_comparing_runs_without_a_direction_in_common(tmp_path):
    runs = tmp_path / "runs/multi30k"
    write_scores(runs / "dense", {"de-en": 30.0, "en-de": 30.0})
    write_scores(runs / "moe", {"en-de": 31.0})
    write_scores(runs / "moe.seed-2", {"de-en": 30.0})
    said = refusal(tmp_path, "multi30k", "--compare", "dense", "moe")
    assert "dense, moe, moe.seed-2" in said


def test_comparing_what_cannot_be_compared(folder):
    assert "two different" in refusal(folder, "multi30k", "--compare", "moe", "moe")
    assert "scripts/evaluate.sh multi30k switch" in refusal(
        folder, "multi30k", "--compare", "moe", "switch"
    )
    scores = folder / "runs/multi30k/moe/scores.json"
    same = scores.read_text()
    scores.write_text(same.replace("13a", "flores200"))
    assert "scored differently on en-de" in refusal(folder, "multi30k", "--compare", "dense", "moe")
    scores.write_text(same)
    hypotheses = folder / "runs/multi30k/moe/test/en-de.txt"
    hypotheses.write_text("one line\n")
    assert "has 1 lines" in refusal(folder, "multi30k", "--compare", "dense", "moe")
    change_scores(scores.parent, "en-de", checksum="of other translations")
    assert str(hypotheses) in refusal(folder, "multi30k", "--compare", "dense", "moe")


SETTINGS = ["--max-update", "--max-tokens x --update-freq x processes =", "text", ""]


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_with_other_settings_are_told(folder, name):
    """But not settings of the methods, nor the seed; and that 60 sentences are few."""
    flags = {"moe": {"--smoe-strata": "8"}, "dense": {"--moe-freq": "0", "--lr": "1"}}
    for number, (method, own) in enumerate(flags.items(), 1):
        content = {
            "method": method,
            "dictionary": "",
            "flags": {"--lr": "1.0", "--seed": f"{number}"} | own,
        }
        content["trained"] = {"--max-update": "300"}
        if name == "text":
            content["text"] = f"{number}"
        elif name:
            content["trained" if name == "--max-update" else "flags"][name] = f"{number}000"
        (folder / f"runs/multi30k/{method}/identity.json").write_text(json.dumps(content))
    printed = table(folder, "multi30k", "--compare", "moe", "dense").stdout
    assert ("different training text" in printed) == (name == "text")
    told = [line for line in printed.splitlines() if "moe has" in line]
    flag = name.partition(" x ")[0]
    assert len(told) == (name[:1] == "-") and all(f"dense has {flag} 2000" in line for line in told)
    assert not any(flag in line for line in told for flag in ("--seed", "--lr", "--moe-freq"))
    assert "60 of en-de" in printed


def test_a_run_under_another_methods_name_is_not_compared(folder):
    (folder / "data/multi30k/bin").mkdir()
    copied = {"method": "dense", "dictionary": "", "flags": {}}
    (folder / "runs/multi30k/moe/identity.json").write_text(json.dumps(copied))
    assert "runs/multi30k/moe" in refusal(folder, "multi30k", "--compare", "dense", "moe")


@pytest.mark.parametrize("one, other", [("moe", "moe.seed-1"), ("moe.seed-2", "moe.seed-02")])
def test_a_seed_counts_once(folder, one, other):
    runs = folder / "runs/multi30k"
    for name in {one, other} - {"moe"}:
        shutil.copytree(runs / "moe", runs / name)
    for words in ((), ("--compare", "moe", "dense")):
        message = refusal(folder, "multi30k", *words)
        assert str(runs / one) in message and str(runs / other) in message


def test_seeds_of_a_method_are_one_row_with_their_spread(tmp_path):
    """A run that is not scored yet counts in neither."""
    runs = tmp_path / "runs/multi30k"
    for name, more in (("moe", 0), ("moe.seed-2", 1.5), ("moe.seed-10", 3)):
        write_scores(runs / name, {d: bleu + more for d, bleu in FULL.items()})
    (runs / "moe.seed-3").mkdir()
    write_scores(runs / "dense", FULL)
    printed = table(tmp_path, "multi30k", "--format", "csv").stdout
    found = rows_of(printed)
    names = ["dense", "moe, mean of 3 seeds", "moe, standard deviation"]
    assert [method for method, _ in found] == names
    mean, spread = list(found.values())[1:]
    assert (mean["de-en"], spread["de-en"]) == ("31.50", "1.50")
    assert (mean["average"], spread["average"]) == ("26.56", "1.50")
    assert mean["parameters (M)"] != "-" and spread["parameters (M)"] == "-"
    assert "moe.seed-3: 0 of 6 directions are scored" in printed
    assert printed.index("moe.seed-2: sacre") < printed.index("moe.seed-10: sacre")


def test_scores_of_different_signatures_are_not_averaged(tmp_path):
    runs = tmp_path / "runs/multi30k"
    write_scores(runs / "dense", FULL, en_cs="nrefs:1|tok:flores200")
    write_scores(runs / "moe", FULL)
    write_scores(runs / "moe.seed-2", FULL, en_cs="nrefs:1|tok:flores200")
    printed = table(tmp_path, "multi30k", "--format", "csv").stdout
    found = rows_of(printed)
    assert (found["dense", ""]["en-cs"], found["dense", ""]["average"]) == ("0.00", "-")
    for row in ("mean of 2 seeds", "standard deviation"):
        values = found[f"moe, {row}", ""]
        assert values["en-cs"] == values["average"] == "-" and values["en-fr"] != "-"
    assert "moe: seeds with different sacreBLEU sign" in printed


def test_seeds_of_different_searches_or_starts_are_averaged_nowhere(tmp_path):
    """Nor over directions that are not trained; their signatures are equal, and said to be nothing else."""
    recipe = {"pairs": ["en-de"], "keep": ["en-fr"], "raw": {}, "train": {"arch": "transformer"}}
    configs = write_dataset(tmp_path / "c", "multi30k", **recipe)["CONFIG_DIR"]
    runs = [tmp_path / "runs/multi30k" / name for name in ("moe", "moe.seed-2")]
    for number, run_folder in enumerate(runs):
        write_scores(run_folder, dict.fromkeys(("en-de", "de-en", "en-fr", "fr-en"), 30 + number))
        change_scores(run_folder, checkpoint=("checkpoint_best.pt", "checkpoint_last.pt")[number])
    for kind in ("checkpoints or searches", "pretrained models"):
        printed = table(tmp_path, "multi30k", configs=configs).stdout
        assert f"moe: seeds with different {kind} are not averaged" in printed
        assert "signatures are not" not in printed
        (row,) = (line for line in printed.splitlines() if line.startswith("| moe, mean of 2"))
        assert "en-fr (not trained)" in printed and not re.search(r"3\d\.\d\d", row)
        for start, run_folder in zip("ab", runs):
            change_scores(run_folder, checkpoint="checkpoint_best.pt")
            own = {"method": "moe", "dictionary": "", "flags": {"--pretrained": start}}
            (run_folder / "identity.json").write_text(json.dumps(own))


@pytest.mark.parametrize("kind", ["consolidated", "averaged"])
def test_scores_of_another_checkpoint_are_noted(tmp_path, kind):
    """That of the run, or one made of others, which have changed since."""
    run = tmp_path / "runs/m4/moe.seed-3"
    write_scores(run, {"eng-nso": 7})
    names = {"averaged": "checkpoint_1_10.pt", "consolidated": "checkpoint_best-rank-0.pt"}
    part = run / names[kind]
    torch.save({"model": {"w": torch.zeros(1)}}, part)
    which = "average:1" if kind == "averaged" else "best"
    name, contents = f"checkpoint_{which.replace(':', '_')}.pt", fingerprints(run, which)
    change_scores(run, checkpoint=name, contents=contents)
    again = "scored: run scripts/evaluate.sh m4 moe --seed 3"
    again += " --checkpoint average:1" if kind == "averaged" else ""
    shutil.copyfile(part, tmp_path / "copy")  # without its times
    shutil.move(tmp_path / "copy", part)
    assert again not in table(tmp_path, "m4").stdout
    before = part.stat()
    torch.save({"model": {"w": torch.ones(1)}}, part)
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert part.stat().st_size == before.st_size
    (note,) = [x for x in table(tmp_path, "m4").stdout.splitlines() if x.endswith(again)]
    assert name in note
    part.unlink()  # to have room on the disk
    assert again not in table(tmp_path, "m4").stdout
