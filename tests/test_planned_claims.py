"""Claims written down before the runs: verdicts by hand, and the tables of a report."""

import json

import pytest
from test_study_report import keep, made, rows
from test_table import write_translations

from smoe_fairseq.recipes.evaluation.comparison import Difference
from smoe_fairseq.recipes.evaluation.scores import Score
from smoe_fairseq.recipes.study.claims import verdict


def difference(low: float, high: float, count: int = 3) -> Difference:
    return Difference((low + high) / 2, low, high, count)


@pytest.mark.parametrize(
    "loss, chrf, expected",
    [
        (difference(-0.3, -0.1), difference(-0.1, 0.2), "confirmed"),
        (difference(-0.3, -0.1), difference(-0.3, -0.1), "mixed"),
        (difference(0.1, 0.3), difference(-0.3, -0.1), "refuted"),
        (difference(0.1, 0.3), difference(0.1, 0.3), "mixed"),
        (difference(-0.1, 0.1), difference(0.1, 0.3), "open"),
        (difference(-0.3, -0.1, 1), difference(0.1, 0.3, 1), "open: a single seed"),
        (None, None, "open: no seed that both have"),
    ],
)
def test_a_verdict_goes_by_the_loss_and_chrf_may_speak_against_it(loss, chrf, expected):
    assert verdict(loss, chrf) == expected


def test_bleu_without_its_penalty():
    assert Score(30.0, "s", 10, 0.8).unpenalized == pytest.approx(30.0 * 2.718281828**0.25)
    assert Score(30.0, "s", 10, 1.3).unpenalized == 30.0
    assert Score(30.0, "s", 10).unpenalized is None


def test_tables_of_claims_and_of_other_measures(tmp_path):
    """Of a short system and of one that is as long as the references, in two seeds each."""
    references = [f"der Mann geht am {i}. Tag nach Hause ." for i in range(40)]
    short = [" ".join(line.split()[:6]) for line in references]
    for seed, name in enumerate(("", ".seed-2")):
        for method, lines, loss in (("moe", short, 3.5), ("moe-released", references, 3.25)):
            run = f"{method}{name}"
            write_translations(tmp_path, run, lines, references)
            file = tmp_path / "runs/multi30k" / run / "scores.json"
            content = json.loads(file.read_text())
            for score in content["scores"].values():
                score["length_ratio"] = 0.75 if method == "moe" else 1.0
                score["others"] = {"chrF++": [50.0 if method == "moe" else 90.0 + seed, "s"]}
            file.write_text(json.dumps(content))
            keep(tmp_path, run, {1: 5.0, 2: loss + 0.01 * seed * (method == "moe")})
    report = made(tmp_path)
    claims = rows(report, "Claims written down before")
    name, seeds, flops, loss, chrf, bleu, alone, said = claims["M3"]
    assert (name, seeds, flops, said) == ("moe-released is ahead of moe", "2", "+0%", "confirmed")
    assert loss.startswith("-0.255 [-0.") and chrf.startswith("+40.50 [")
    assert claims["M1"][-1] == "open: no seed that both have"
    measures = rows(report, "By other measures")
    assert measures["moe"][1:3] == ["50.00", "-"] and measures["moe"][-1] == "0.75"
    assert measures["moe-released"][1] == "90.50" and measures["moe-released"][3] == "100.00"
    assert float(alone.split()[0]) < float(bleu.split()[0])  # a part of it was the penalty


def test_languages_of_a_study(tmp_path):
    """Scores of classes, and whether the same language asks for more in every seed."""
    from smoe_fairseq.recipes.config import load_dataset
    from smoe_fairseq.recipes.study.report import colours, draw_directions
    from smoe_fairseq.recipes.study.results import Result
    from smoe_fairseq.recipes.study.tables import by_class, by_target

    dataset = load_dataset("libreoffice")
    others = dataset.languages[1:]
    points = {language: float(i) for i, language in enumerate(others)}
    scores = {
        direction: Score(1.0, "s", 1, 1.0, {"chrF++": (points[pair], "s")})
        for language in others
        for pair in [language]
        for direction in (f"en-{language}", f"{language}-en")
    }

    def result(name: str, order: int) -> Result:
        requested = {
            direction: {
                "encoder.0": 9.0,
                "decoder.0": 1.0,
                "decoder.1": 1 + order * value.others["chrF++"][0],
            }
            for direction, value in scores.items()
        }
        return Result(name, scores, [], {}, {"requested_capacity": requested})

    systems = {"smoe-4-12": [result("smoe-4-12", 1), result("smoe-4-12.seed-2", -1)]}
    grid = by_class(dataset, systems)
    cells = dict(zip(grid.header, grid.rows[0], strict=True))
    first = [points[language] for language in dataset.classes["high"]]
    assert cells["eng-xxx high"] == cells["xxx-eng high"] == f"{sum(first) / 5:.2f}"
    assert cells["average"] == "7.00"
    shown = [systems | {"moe-16": [result("moe-16", 1)]}]
    picture = draw_directions(dataset, shown, "moe-16", colours(shown))
    panels = [axes.get_title().replace("\n", " ") for axes in picture.axes]
    assert panels == ["mean", *grid.header[2:-1]]  # not one for each of the thirty directions
    capacity = by_target(dataset, systems)
    assert [row[:3] for row in capacity.rows] == [
        ["smoe-4-12", "1", "1.00"],
        ["smoe-4-12", "2", "1.00"],
    ]
    assert capacity.rows[0][-1] == "8.00" and "between seeds -1.00 (above 0.52" in capacity.notes[0]
