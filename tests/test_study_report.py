"""The report of a study is made of the small files that are kept of its runs, and of nothing else."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from commands import refused, step_here, succeeded
from sampling import soak
from test_recipes import recipe, refusal
from test_table import change_scores, write_translations

from smoe_fairseq.recipes.compare import report as study_report
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.study import results as study_results

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "results").rglob("report.md"))
ALIKE = re.compile("finetuning-(new|known-20000)")  # made as that of finetuning-known-2000
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def keep(folder: Path, run: str, losses: dict[int, float], **routing) -> None:
    """As a study keeps a run whose scores are in ``folder/runs``."""
    results = folder / "results/multi30k" / run
    results.mkdir(parents=True)
    shutil.copy(folder / "runs/multi30k" / run / "scores.json", results)
    rows = [f"{u},{x},{x},,{1000 * u},{u / 2}\n" for u, x in losses.items()]
    (results / study_results.CURVE).write_text(
        ",".join(study_results.COLUMNS) + "\n" + "".join(rows)
    )
    about = {"command": "c", "commit": "1", "versions": {}, "machine": "m", "updates": max(losses)}
    about["flags"] = {"--lr": "1", "--seed": run}
    (results / study_results.FILE).write_text(json.dumps(about))
    if routing:
        (results / study_results.ROUTING).write_text(json.dumps(routing))


def set_about(folder: Path, run: str, **values) -> None:
    file = folder / "results/multi30k" / run / study_results.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rows(report: str, section: str) -> dict[str, list[str]]:
    """Cells of a section's table, by the first."""
    text = report.split(f"# {section}")[1].split("\n#")[0]
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def statement(report: str, systems: str) -> list[str]:
    """Cells of the statement about two systems, from the number of seeds on."""
    lines = [[cell.strip() for cell in line.split("|")] for line in report.splitlines()]
    (found,) = (cells[3:] for cells in lines if cells[2:3] == [systems])
    return found


def report_of(folder: Path):
    configs = str(ROOT / "configs")
    return step_here("report", "multi30k", cwd=folder, CONFIG_DIR=configs)


def made(folder: Path) -> str:
    succeeded(report_of(folder))
    return (folder / "results/multi30k/report.md").read_text()


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Saving takes longer than all else; a report that a process of its own makes has its pictures."""
    monkeypatch.setattr(study_report, "save", lambda figure, stem: None)


@pytest.fixture
def two_runs(tmp_path):
    references = [f"der Mann geht am {i}. Tag nach Hause ." for i in range(40)]
    bad = write_translations(tmp_path, "moe", ["der Mann ."] * 40, references)
    good = write_translations(tmp_path, "smoe-4-4", references, references)
    keep(tmp_path, "moe", {1: 5.0, 2: 3.5})
    capacity = {"en-de": {"encoder.1": 1.25, "decoder.1": 1.25}}
    smoe = {"requested_capacity": capacity, "rank_correlation": {"en-de": {"encoder.1": 0.1}}}
    keep(tmp_path, "smoe-4-4", {1: 5.0, 2: 3.25}, **smoe)
    return tmp_path, good - bad


@pytest.mark.parametrize(
    "report",
    [soak(file) if ALIKE.search(str(file)) else file for file in REPORTS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_committed_report_is_made_of_the_files_beside_it(report, tmp_path):
    dataset, results = report.parent.name, report.parent.parent
    for name in (dataset, *load_dataset(dataset).parts):
        shutil.copytree(results / name, tmp_path / name)
    (again := tmp_path / dataset / "report.md").unlink()
    given = {"CONFIG_DIR": str(ROOT / "configs"), "RESULTS_DIR": str(tmp_path)}
    succeeded(step_here("report", dataset, cwd=tmp_path / dataset, **given))
    found, written = (NUMBER.findall(file.read_text()) for file in (again, report))
    assert found == written, f"RESULTS_DIR={results.relative_to(ROOT)} scripts/report.sh {dataset}"
    for file in report.parent.glob(f"*/{study_results.FILE}"):
        assert f"| {file.parent.name} " in report.read_text().partition("## Runs")[2]
        about = json.loads(file.read_text())
        assert about["commit"] and about["machine"] and about["command"].startswith("SEED=")
        assert " /" not in about["command"]  # of any machine


def test_without_runs_nothing_is_made(tmp_path):
    refused(report_of(tmp_path), "results/multi30k")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metric", ["BLEU", "chrF++"])
def test_scores_of_different_signatures_are_refused(two_runs, metric):
    folder, _ = two_runs
    for run in ("moe", "smoe-4-4"):
        other = {"signature": run} if metric == "BLEU" else {"others": {metric: [1.0, run]}}
        change_scores(folder / "results/multi30k" / run, "en-de", **other)
    assert f"multi30k: {metric} of en-de" in refusal(report_of(folder))


def test_numbers_and_pictures(two_runs):
    folder, apart = two_runs
    succeeded(recipe(folder, "report", "multi30k"))
    report = (folder / "results/multi30k/report.md").read_text()
    table = rows(report, "Systems")
    assert table["moe"][3:6] == ["1", "2", "3.500"] and table["smoe-4-4"][5] == "3.250"
    assert table["moe"][7] == f"{abs(100 - apart):.2f}" and table["smoe-4-4"][7] == "100.00"
    assert table["moe"][2] == "500"  # 1 s for 2,000 words
    assert statement(report, "smoe-4-4 and moe")[2:4] == ["-0.250", "open"]
    # Only one of six directions is scored.
    assert rows(report, "BLEU by direction")["smoe-4-4"] == ["1", "100.00"]
    for name in ("costs", "statements"):
        assert (folder / f"results/multi30k/{name}.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("error")
def test_runs_shorter_than_the_log_interval_have_no_picture_of_costs(two_runs):
    """Only their validations are logged, so the number of words is unknown."""
    folder, _ = two_runs
    assert "costs.png" in made(folder)
    for curve in folder.glob(f"results/multi30k/*/{study_results.CURVE}"):
        curve.write_text(",".join(study_results.COLUMNS) + "\n20,,5.842,,0,0.0\n")
    report = made(folder)
    assert "costs.png" not in report and "statements.png" in report
    assert rows(report, "Systems")["moe"][5].startswith("5.842")


def test_seeds_and_machines(two_runs):
    """Times of each machine have a column; statements leave out seeds of two machines, starts or torchs."""
    folder, _ = two_runs
    results = folder / "results/multi30k"
    for run, seed in itertools.product(("moe", "smoe-4-4"), (2, 3, 4, 5)):
        shutil.copytree(results / run, results / f"{run}.seed-{seed}")
    set_about(folder, "smoe-4-4.seed-2", machine="n")
    set_about(folder, "smoe-4-4.seed-5", versions={"torch": "2.11"})
    for run, start in {"moe.seed-3": "a", "smoe-4-4.seed-3": "b", "smoe-4-4.seed-4": "b"}.items():
        set_about(folder, run, flags={"--lr": "1", "--pretrained": start})
    report = made(folder)
    table = rows(report, "Systems")
    assert table["method"][2:4] == ["time/token (us), m", "time/token (us), n"]
    assert table["smoe-4-4"][4] == "1 2 3 4 5" and table["smoe-4-4"][6] == "3.250 ± 0.000"
    assert statement(report, "smoe-4-4 and moe")[0] == "2"
    assert "smoe-4-4 and moe (2, 3, 5)" in report
    set_about(folder, "smoe-4-4.seed-2", untimed="of another job")
    assert "n (times left out: of another job)" in made(folder)
    set_about(folder, "moe.seed-2", flags={"--lr": "2"})  # no mean over seeds of two trainings
    assert "moe.seed-2 has --lr 2" in refusal(report_of(folder))


def test_a_run_that_diverged_is_reported_and_left_out(two_runs):
    """Also if its loss was finite before: translations are those of a checkpoint that went wrong soon."""
    folder, _ = two_runs
    curve = folder / "results/multi30k/smoe-4-4" / study_results.CURVE
    curve.write_text(curve.read_text().replace("3.25", "nan"))  # its last loss
    report = made(folder)
    assert rows(report, "Systems")["smoe-4-4"][5] == "nan"
    assert statement(report, "smoe-4-4 and moe")[0] == "0" and "not finite: smoe-4-4." in report


def test_runs_of_different_lengths_are_told(two_runs):
    folder, _ = two_runs
    assert "updates**" not in made(folder)
    set_about(folder, "moe", updates=4)
    assert "updates**: smoe-4-4 2 and moe 4." in made(folder)


def test_a_study_of_several_data_sets(two_runs):
    """Differences are means over the parts, of the seeds that all have; kept pairs have their own loss."""
    folder, _ = two_runs
    shutil.copytree(ROOT / "configs", folder / "configs")
    base = "base: datasets/multi30k\npairs: [en-de]\nkeep: [en-fr]\n"
    more = {"en-de": 0.0, "en-fr": 1.0}
    capacity = {d: {"encoder.1": 1.0, "decoder.1": 1.0 + more[d]} for d in more}
    routing = {"requested_capacity": capacity, "rank_correlation": {}}
    for part, seeds, shift in (("one", ("", ".seed-2"), 0.5), ("two", ("",), 1.5)):
        (folder / f"configs/datasets/{part}.yaml").write_text(base)
        for run in ("moe", "smoe-4-4"):
            for seed in seeds:
                kept = folder / "results" / part / f"{run}{seed}"
                shutil.copytree(folder / "results/multi30k" / run, kept)
                about = json.loads((kept / study_results.FILE).read_text())
                about["kept_loss"] = shift if run == "moe" else 4.0
                (kept / study_results.FILE).write_text(json.dumps(about))
                scored = json.loads((kept / "scores.json").read_text())
                scored["scores"]["en-fr"] = scored["scores"]["en-de"] | {"bleu": 0.0}
                (kept / "scores.json").write_text(json.dumps(scored))
                if run != "moe":
                    (kept / study_results.ROUTING).write_text(json.dumps(routing))
    (folder / "configs/datasets/both.yaml").write_text(f"{base}parts: [one, two]\n")
    for name in ("both", "one"):
        given = {"CONFIG_DIR": str(folder / "configs")}
        assert step_here("report", name, cwd=folder, **given).returncode == 0
    report = (folder / "results/both/report.md").read_text()
    found = statement(report, "smoe-4-4 and moe")
    assert found[:3] == ["1", "-", "-0.250"] and found[8] == "+3.000"
    assert "(../two/report.md)" in report and "## Systems" not in report
    report = (folder / "results/one/report.md").read_text()
    assert rows(report, "Systems")["smoe-4-4"][7].startswith("100.00")  # BLEU of en-de alone
    assert rows(report, "Requested capacity")["smoe-4-4"][2:4] == ["1.000", "2.000"]


def test_two_results_of_one_seed_are_named(two_runs):
    """As after a copy, or another `seed` in the data set's file."""
    results = two_runs[0] / "results/multi30k"
    set_about(two_runs[0], "moe", flags={"--seed": "5"})
    shutil.copytree(results / "moe", results / "moe.seed-2")
    named = refusal(report_of(two_runs[0]))
    assert "results/multi30k/moe " in named and "moe.seed-2" in named


def test_costs_are_those_of_the_flags_that_a_run_was_trained_with(two_runs):
    """Experts of half the width have half of the parameters; table.sh counts them, too."""
    folder, _ = two_runs
    before = rows(made(folder), "Systems")["moe"]
    flags = {"--lr": "1", "--seed": "moe", "--moe-expert-ffn-dim": "128"}
    set_about(folder, "moe", flags=flags)
    after = rows(made(folder), "Systems")["moe"]
    experts = 2 * 8 * 128 * (2 * 128 + 1) / 1e6  # of two layers: products and the first one's bias
    assert float(before[0]) - float(after[0]) == pytest.approx(experts, abs=0.11)
    assert float(after[1]) < float(before[1])
    identity = {"method": "moe", "dictionary": "d", "flags": flags}
    (folder / "runs/multi30k/moe/identity.json").write_text(json.dumps(identity))
    shown = step_here("table", "multi30k", cwd=folder, CONFIG_DIR=str(ROOT / "configs")).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("| moe "))
    assert [cell.strip() for cell in line.split("|")[2:4]] == after[:2]


@pytest.mark.parametrize(
    "name, content",
    [
        # No machine.
        (study_results.FILE, '{"command": "c", "commit": "1", "versions": {}, "updates": 2}'),
        (study_results.CURVE, ",".join(study_results.COLUMNS) + "\n2,3.5,3.5,,,\n"),
        (study_results.CURVE, ",".join(study_results.COLUMNS) + "\n2,3.5,high,,2000,1\n"),
        (study_results.ROUTING, "<<<<<<< ours"),
    ],
)
def test_what_is_kept_and_broken_is_named(two_runs, name, content):
    folder, _ = two_runs
    file = folder / "results/multi30k/moe" / name
    file.write_text(content)
    named = file.parent if file.parent.name == "moe" else file.resolve()
    assert str(named.relative_to(folder)) in refusal(report_of(folder))


def test_runs_of_different_directions_are_named(two_runs):
    folder, _ = two_runs
    file = folder / "results/multi30k/moe/scores.json"
    file.write_text(file.read_text().replace("en-de", "en-fr"))
    said = refusal(report_of(folder))
    assert "moe in en-fr and " in said and "smoe-4-4 in en-de" in said


@pytest.mark.parametrize(
    "key, direction, values",
    [("test_checksum", "en-de", ("a", "b")), ("generate", "", ("--beam 5", "--beam 1"))],
)
def test_runs_scored_on_other_tests_or_otherwise_are_named(two_runs, key, direction, values):
    folder, _ = two_runs
    for run, value in zip(("moe", "smoe-4-4"), values, strict=True):
        change_scores(folder / "results/multi30k" / run, direction, **{key: value})
    said = refusal(report_of(folder))
    assert "/moe" in said and "/smoe-4-4" in said
