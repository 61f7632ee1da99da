"""The report of a study is made of the small files that are kept of its runs, and of nothing else."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import step_here
from sacrebleu.metrics import BLEU
from test_recipes import recipe, refusal
from test_table import write_translations

from smoe_fairseq.recipes.study import report as study_report
from smoe_fairseq.recipes.study import results as study_results
from smoe_fairseq.recipes.study.claims import OPEN

ROOT = Path(__file__).parents[1]


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


def rows(report: str, section: str) -> dict[str, list[str]]:
    """Cells of a section's table, by the first."""
    text = report.split(f"# {section}")[1].split("\n#")[0]
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def report_of(folder: Path):
    configs = str(ROOT / "configs")
    return step_here("report", "multi30k", cwd=folder, CONFIG_DIR=configs)


def made(folder: Path) -> str:
    result = report_of(folder)
    assert result.returncode == 0, result.stderr
    return (folder / "results/multi30k/report.md").read_text()


DRAWN = ("test_systems_beyond_the_study", "test_a_run_that_diverged")


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Drawing takes longer than all else; a report that is made in a process of its own has them, too."""
    if not request.node.name.startswith(DRAWN):
        monkeypatch.setattr(study_report, "_pictures", lambda *_: [])


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


def test_numbers_and_verdicts(two_runs):
    folder, apart = two_runs
    result = recipe(folder, "report", "multi30k")
    assert result.returncode == 0, result.stderr
    assert "what 2 runs show" in result.stdout
    report = (folder / "results/multi30k/report.md").read_text()
    table = rows(report, "Study: multi30k")
    assert table["moe"][3:] == ["1", "2", "3.500", "-", f"{abs(100 - apart):.2f}", "-"]
    assert table["smoe-4-4"][5:] == ["3.250", "-0.250", "100.00", f"+{apart:.2f}"]
    assert table["moe"][2] == "500"  # 1 s for 2,000 words
    claims = rows(report, "The paper's claims")
    # Only one of six directions is scored.
    (a,) = (cells for claim, cells in claims.items() if claim.startswith("(a)"))
    verdict = f"{OPEN}: a single seed"
    assert a == ["1", f"+{apart:.2f}", "", "-0.250", "1 above, 0 below, of 1", verdict]
    assert rows(report, "BLEU by direction")["smoe-4-4"] == ["1", "100.00"]
    for name in ("costs", "directions"):
        assert (folder / f"results/multi30k/{name}.png").stat().st_size > 10_000


def test_costs_are_those_of_the_flags_that_a_run_was_trained_with(two_runs):
    """Experts of half the width have half of the parameters; table.sh counts them, too."""
    folder, _ = two_runs
    before = rows(made(folder), "Study: multi30k")["moe"]
    kept = folder / "results/multi30k/moe" / study_results.FILE
    about = json.loads(kept.read_text())
    about["flags"] |= {"--moe-expert-ffn-dim": "128"}
    kept.write_text(json.dumps(about))
    after = rows(made(folder), "Study: multi30k")["moe"]
    experts = 2 * 8 * 128 * (2 * 128 + 1) / 1e6  # of two layers: products and the first one's bias
    assert float(before[0]) - float(after[0]) == pytest.approx(experts, abs=0.11)
    assert float(after[1]) < float(before[1])
    identity = {"method": "moe", "dictionary": "d", "flags": about["flags"]}
    (folder / "runs/multi30k/moe/identity.json").write_text(json.dumps(identity))
    shown = step_here("table", "multi30k", cwd=folder, CONFIG_DIR=str(ROOT / "configs")).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("| moe "))
    assert [cell.strip() for cell in line.split("|")[2:4]] == after[:2]


def test_systems_are_compared_over_the_seeds_that_both_have(two_runs):
    folder, apart = two_runs
    results = folder / "results/multi30k"
    shutil.copytree(results / "smoe-4-4", results / "smoe-4-4.seed-2")
    curve = results / "smoe-4-4.seed-2" / study_results.CURVE
    curve.write_text(curve.read_text().replace("3.25,3.25", "3.05,3.05"))
    report = made(folder)
    smoe = rows(report, "Study: multi30k")["smoe-4-4"]
    assert smoe[3] == "1 2" and smoe[5:7] == ["3.150 ± 0.141", "-0.250"]
    assert "other systems do not have the seed of smoe-4-4.seed-2." in report
    (a,) = (v for claim, v in rows(report, "The paper's claims").items() if "above moe" in claim)
    verdict = f"{OPEN}: a single seed"
    assert a == ["1", f"+{apart:.2f}", "", "-0.250", "1 above, 0 below, of 1", verdict]


def made_on(results: Path, run: str, machine: str, seconds_per_update: float) -> None:
    """As if a kept run had been trained there, and taken so long."""
    file = results / run / study_results.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": machine}))
    curve = results / run / study_results.CURVE
    header, *lines = (line.rsplit(",", 1)[0] for line in curve.read_text().splitlines())
    lines = [f"{line},{int(line.split(',')[0]) * seconds_per_update}" for line in lines]
    curve.write_text("\n".join([f"{header},seconds", *lines]) + "\n")


def test_times_are_compared_within_a_machine(two_runs):
    """There are columns for each, and (e) is of the seeds that both made on the same one."""
    folder, _ = two_runs
    results = folder / "results/multi30k"
    for run in ("moe", "smoe-4-4"):
        for seed in (2, 3):
            shutil.copytree(results / run, results / f"{run}.seed-{seed}")
    made_on(results, "smoe-4-4.seed-2", "n", 5.0)
    made_on(results, "moe.seed-3", "n", 1.0)
    made_on(results, "smoe-4-4.seed-3", "n", 1.2)
    report = made(folder)
    table = rows(report, "Study: multi30k")
    assert table["method"][2:4] == ["time/token (us), m", "time/token (us), n"]
    assert table["moe"][2:4] == ["500", "1000"]
    assert table["smoe-4-4"][2:4] == ["500", "3100"]
    assert "trained these pairs, in the seeds in brackets: moe and smoe-4-4 (2)." in report
    claims = rows(report, "The paper's claims")
    (e,) = (cells for claim, cells in claims.items() if claim.startswith("(e)"))
    assert e[0] == "2" and e[1].startswith(f"{100 * (1.2**0.5 - 1):+.1f}% [")


def keep_curves(folder: Path, runs: dict[str, dict[int, float]]) -> Path:
    for run, losses in runs.items():
        write_translations(folder, run, ["ein Hund ."] * 3, ["ein Hund ."] * 3)
        keep(folder, run, losses)
    return folder / "results/multi30k"


def test_losses_at_equal_cost_by_hand(tmp_path):
    """The one that is cheaper ends first; a validation between two lines of the log counts where it was."""
    of_moe, of_smoe = {1: 9.0, 2: 6.0, 4: 3.0}, {1: 9.0, 2: 8.0, 8: 0.5}
    results = keep_curves(tmp_path, {"moe": of_moe, "smoe-4-4": of_smoe})
    curve = results / "smoe-4-4" / study_results.CURVE
    rest, last = curve.read_text().split("8,", 1)
    curve.write_text(f"{rest}3,,7.5,,2000,1.0\n8,{last}")  # words and seconds of the line before
    made_on(results, "smoe-4-4", "m", 1.0)
    report = made(tmp_path)
    table = rows(report, "Study: multi30k")
    ratio = float(table["smoe-4-4"][1]) / float(table["moe"][1])
    # Between 3,000 and 8,000 words of the one, whose tokens cost more, are 4,000 of the other.
    share = math.log(4 / ratio / 3) / math.log(8 / 3)
    cells = rows(report, "At equal cost")["smoe-4-4"]
    assert float(cells[0].strip("%")) == pytest.approx(
        100 * (ratio - 1), abs=2
    )  # of rounded numbers
    assert float(cells[1]) == pytest.approx(7.5 - share * 7 - 3, abs=0.1)  # along a line 0.7 more
    assert cells[2:] == ["+100%", "+5.000"]
    made_on(results, "smoe-4-4", "n", 1.0)
    assert rows(made(tmp_path), "At equal cost")["smoe-4-4"][2:] == ["-", "-"]


def test_seeds_at_equal_cost_by_hand(tmp_path):
    """What the baseline's run owes to chance is that seed's, so that differences are compared."""
    runs = {}
    for seed, (moe, smoe, stacked) in {"": (3.0, 2.9, 3.5), ".seed-2": (4.0, 3.5, 4.6)}.items():
        runs |= {f"moe{seed}": {1: 9.0, 2: moe}, f"smoe-4-4{seed}": {1: 9.0, 2: smoe}}
        runs |= {f"stacked-4-4{seed}": {1: 9.0, 2: stacked}}
    keep_curves(tmp_path, runs)
    found = rows(made(tmp_path), "At equal cost")
    # From seed to seed -0.4 and +0.1, so 0.25 about their mean: one degree of freedom.
    deviation = (2 * 0.25**2 / 2) ** 0.5
    width = 12.706 * deviation
    for method, mean in (("smoe-4-4", -0.3), ("stacked-4-4", 0.55)):
        numbers = [float(number) for number in re.findall(r"[-+][\d.]+", found[method][3])]
        assert numbers == pytest.approx([mean, mean - width, mean + width], abs=2e-3)


def test_a_run_that_diverged_is_in_the_report(tmp_path):
    """Whatever its other seeds did."""
    nan = math.nan
    runs = {"moe": {1: 9.0, 2: 3.0}, "switch": {1: nan, 2: nan}, "dense": {1: 8.0, 2: nan}}
    keep_curves(tmp_path, runs)
    report = made(tmp_path)
    table = rows(report, "Study: multi30k")
    assert table["switch"][5] == "nan" and table["dense"][5] == "8.000"
    assert rows(report, "At equal cost")["switch"][3] == "+nan"
    assert "other systems do not have the seed of dense, moe, switch." in report
    for method in ("moe-16", "moe-eom"):
        shutil.copytree(tmp_path / "results/multi30k/moe", tmp_path / f"results/multi30k/{method}")
    assert "are to be made: moe-cmr, stacked-4-4, " in made(tmp_path)
    keep_curves(tmp_path, {f"{run}.seed-2": {1: 9.0, 2: 3.0} for run in runs})
    assert rows(made(tmp_path), "Study: multi30k")["switch"][5:7] == [
        "nan ± nan",
        "+nan [+nan, +nan]",
    ]


def test_times_that_are_not_to_be_compared_are_left_out(two_runs):
    folder, _ = two_runs
    file = folder / "results/multi30k/smoe-4-4" / study_results.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"untimed": "of another job"}))
    report = made(folder)
    assert rows(report, "Study: multi30k")["smoe-4-4"][2] == "-"
    cells = rows(report, "At equal cost")["smoe-4-4"]
    assert float(cells[1]) < 0 and cells[2:] == ["-", "-"]
    assert "(e)" not in report
    assert rows(report, "Runs")["smoe-4-4"][2] == "m (times left out: of another job)"


def above_moe(folder: Path) -> str:
    """In how many directions, as the claim about `two_runs` says it."""
    claims = rows(made(folder), "The paper's claims")
    (a,) = (cells for claim, cells in claims.items() if claim.startswith("(a)"))
    return a[4]


def test_sentences_of_fewer_seeds_stay_where_the_others_are_elsewhere(two_runs):
    """What was compared before is shown, with how many of the seeds it is of; more seeds take its place."""
    folder, _ = two_runs
    results = folder / "results/multi30k"
    made(folder)
    before = (results / "comparisons.json").read_text()
    for run in ("moe", "smoe-4-4"):
        shutil.copytree(results / run, results / f"{run}.seed-2")
        (results / f"{run}.seed-2" / study_results.SENTENCES).unlink()
    assert above_moe(folder) == "1 above, 0 below, of 1 (1 of 2 seeds)"
    assert (results / "comparisons.json").read_text() == before
    for run in ("moe", "smoe-4-4"):
        shutil.copy(results / run / study_results.SENTENCES, results / f"{run}.seed-2")
    assert above_moe(folder) == "1 above, 0 below, of 1"
    both = json.loads((results / "comparisons.json").read_text())["moe smoe-4-4"]
    assert len(both["runs"]) == 4
    for run in ("moe", "smoe-4-4"):  # the same translations twice are no more sentences
        (results / f"{run}.seed-2" / study_results.SENTENCES).unlink()
    assert both["directions"] == json.loads(before)["moe smoe-4-4"]["directions"]
    assert above_moe(folder) == "1 above, 0 below, of 1"


def test_sentences_are_compared_without_the_translations(two_runs, monkeypatch):
    """By their counts, of which the scores are made."""
    folder, _ = two_runs
    results = folder / "results/multi30k"
    report = made(folder)
    before = (results / "comparisons.json").read_text()
    for name in ("runs", "data", "results/multi30k/comparisons.json"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert made(folder) == report and (results / "comparisons.json").read_text() == before
    monkeypatch.setenv("RESULTS_DIR", str(folder / "results"))
    for run in study_results.read("multi30k"):
        lines = (results / run.name / study_results.SENTENCES).read_text().splitlines()[1:]
        counts = np.array([line.split(",")[1:] for line in lines], int)
        tokens, reference, *matches = counts.sum(axis=0).tolist()
        totals = [tokens - 40 * n for n in range(4)]  # 40 sentences, of three tokens or more
        bleu = BLEU.compute_bleu(matches, totals, tokens, reference).score
        assert bleu == pytest.approx(run.bleu, abs=1e-9)


def test_sentences_are_those_of_the_runs_that_are_kept(two_runs):
    """Of others of these names in RUN_DIR nothing is made."""
    folder, _ = two_runs
    file = folder / "runs/multi30k/moe/scores.json"
    content = json.loads(file.read_text())
    content["scores"]["en-de"]["bleu"] += 1
    file.write_text(json.dumps(content))
    assert above_moe(folder) == "not computed"
    assert not (folder / "results/multi30k/comparisons.json").exists()


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda text: text.replace("en-de,3,10,", "en-de,3,11,", 1),
            "different sentences of en-de",
        ),
        (lambda text: text.rsplit(",", 1)[0], "does not hold counts of sentences"),
        (lambda text: text.replace("tokens", "tokins"), "does not hold counts of sentences"),
        (lambda text: text.replace(",10,", ",ten,"), "does not hold counts of sentences"),
    ],
)
def test_counts_that_are_something_else_are_named(two_runs, change, said):
    folder, _ = two_runs
    made(folder)
    results = folder / "results/multi30k"
    (results / "comparisons.json").unlink()
    file = results / "moe" / study_results.SENTENCES
    assert change(file.read_text()) != file.read_text()
    file.write_text(change(file.read_text()))
    result = report_of(folder)
    assert result.returncode == 1 and said in result.stderr and result.stderr.count("\n") == 1


def test_systems_beyond_the_study_have_pictures_of_their_own(two_runs):
    """Beside the baseline, so that they can be told apart; a second seed needs none."""
    folder, _ = two_runs
    results = folder / "results/multi30k"
    for more in ("", "moe.seed-2", "moe-hash"):
        if more:
            shutil.copytree(results / "moe", results / more)
        report = made(folder)
        for name in ("costs", "directions"):
            assert f"![{name}]({name}.png)" in report and (results / f"{name}.png").is_file()
            others = results / f"{name}_others.png"
            assert (others.name in report) == others.is_file() == (more == "moe-hash")


def test_a_run_shorter_than_the_log_s_interval_is_reported(two_runs):
    folder, _ = two_runs
    for run in ("moe", "smoe-4-4"):
        curve = folder / "results/multi30k" / run / study_results.CURVE
        curve.write_text(",".join(study_results.COLUMNS) + "\n2,,3.5,,0,0.0\n")
    report = made(folder)
    assert rows(report, "Study: multi30k")["moe"][2] == "-"


def test_flops_are_those_of_the_measured_capacity(two_runs):
    """A quarter of a stratum more than one: of two layers the two experts of 2 x 128 x 256 weights."""
    folder, _ = two_runs
    report = made(folder)
    table = rows(report, "Study: multi30k")
    more = 0.25 * 2 * 2 * 2 * (2 * 128 * 256) / 1e6
    apart = float(table["smoe-4-4"][1]) - float(table["moe"][1])
    assert apart == pytest.approx(more, abs=0.1)
    share = more / float(table["moe"][1])
    assert f", {100 * share:+.0f}% beside moe: from " in report


def test_flops_are_those_of_the_experts_that_a_gate_learnt(two_runs):
    """Of top-p those that it took, where even gates take all four that 0.4 of eight is; of top-2 its two."""
    folder, _ = two_runs
    shutil.copytree(folder / "runs/multi30k/moe", folder / "runs/multi30k/moe-top-p")
    keep(folder, "moe-top-p", {1: 5.0, 2: 3.5})
    known = rows(made(folder), "Study: multi30k")
    expert = 2 * 2 * (2 * 128 * 256) / 1e6  # in the two layers
    even = float(known["moe-top-p"][1]) - float(known["moe"][1])
    assert even == pytest.approx(2 * expert, abs=0.1)
    for run in ("moe", "moe-top-p"):
        file = folder / "results/multi30k" / run / study_results.FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_per_token": 1.0}))
    learnt = rows(made(folder), "Study: multi30k")
    assert learnt["moe"] == known["moe"]
    apart = float(learnt["moe-top-p"][1]) - float(learnt["moe"][1])
    assert apart == pytest.approx(-expert, abs=0.1)


@pytest.mark.parametrize(
    "name, content",
    [
        (study_results.FILE, "{"),
        (study_results.FILE, "[]"),
        (
            study_results.FILE,
            '{"command": "c", "commit": "1", "versions": {}, "updates": 2}',
        ),  # no machine
        (study_results.CURVE, ",".join(study_results.COLUMNS) + "\n2,3.5,3.5,,,\n"),
        (study_results.CURVE, ",".join(study_results.COLUMNS) + "\n2,3.5,high,,2000,1\n"),
        (study_results.ROUTING, "<<<<<<< ours"),
        ("../comparisons.json", "<<<<<<< ours"),
        ("../comparisons.json", '{"moe smoe-4-4": []}'),
    ],
)
def test_what_is_kept_and_broken_is_named(two_runs, name, content):
    folder, _ = two_runs
    file = folder / "results/multi30k/moe" / name
    file.write_text(content)
    named = file.parent if file.parent.name == "moe" else file.resolve()
    assert str(named.relative_to(folder)) in refusal(report_of(folder))


def test_runs_that_were_trained_otherwise_are_named(two_runs):
    """Flags that a method sets, and seeds, are what is compared."""
    folder, _ = two_runs
    runs = ("moe.seed-2", "moe.seed-3", "smoe-4-4.seed-2")
    for run in runs:
        method = run.split(".")[0]
        shutil.copytree(folder / "results/multi30k" / method, folder / "results/multi30k" / run)
    assert "Not trained as most were" not in made(folder)
    for run, flags, updates in zip(
        runs,
        ({"--lr": "2"}, {"--lr": "1", "--moe-cap": ""}, {"--lr": "1", "--smoe-strata": "4-4"}),
        (2, 2, 1),
        strict=True,
    ):
        file = folder / "results/multi30k" / run / study_results.FILE
        more = {"flags": flags, "updates": updates}
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    told = [line for line in made(folder).splitlines() if line.startswith("Not trained as")]
    assert told == [
        "Not trained as most were: moe.seed-2, with --lr 2, not with --lr 1.",
        "Not trained as most were: moe.seed-3, with --moe-cap, not without --moe-cap.",
        "Not trained as most were: smoe-4-4.seed-2, 1 updates, not 2 updates.",
    ]


def test_runs_of_different_directions_are_named(two_runs):
    folder, _ = two_runs
    file = folder / "results/multi30k/moe/scores.json"
    file.write_text(file.read_text().replace("en-de", "en-fr"))
    said = refusal(report_of(folder))
    assert "moe in en-fr and " in said and "smoe-4-4 in en-de" in said
