"""Claims that a data set lists before its runs (``claims``), by validation loss, then chrF++, then BLEU.

A claim is that one system is ahead of another: of a lower validation loss after as many updates.
"""

from collections.abc import Callable, Mapping

from smoe_fairseq.recipes import scores
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.statistics import Difference
from smoe_fairseq.recipes.study_claims import Chance, chance
from smoe_fairseq.recipes.study_results import Result, by_seed
from smoe_fairseq.recipes.table import MISSING, Grid

CONFIRMED, REFUTED, OPEN, MIXED = "confirmed", "refuted", "open", "mixed"
MEASURES: dict[str, Callable[[Result], float]] = {
    "loss": lambda result: result.validation,
    "chrF++": lambda result: scores.mean_of(result.scores, scores.chrf),
    "BLEU": lambda result: result.bleu,
    "BLEU without penalty": lambda result: scores.mean_of(
        result.scores, lambda score: score.unpenalized
    ),
}
RATIO = "length"


def verdict(loss: Difference | None, chrf: Difference | None) -> str:
    """Of a system less the one that it is said to be ahead of; intervals that are not known leave it open."""
    if loss is None:
        return f"{OPEN}: no seed that both have"
    if loss.low is None or loss.count < 2:
        return f"{OPEN}: a single seed"
    found = CONFIRMED if loss.high < 0 else REFUTED if loss.low > 0 else OPEN
    if chrf is None or chrf.low is None:
        return found
    against = {CONFIRMED: chrf.high < 0, REFUTED: chrf.low > 0, OPEN: False}[found]
    return MIXED if against else found


def planned_claims(dataset: Dataset, systems, flops: Mapping[str, float]) -> Grid:
    """A row for each claim of the data set; ``systems`` are results by method, ``flops`` per token."""
    points = {name: by_seed(systems, of) for name, of in MEASURES.items()}
    chances = {name: chance(of_all) for name, of_all in points.items()}
    rows = []
    for name, (first, second) in dataset.claims.items():
        apart = {m: _between(chances[m], points[m], second, first) for m in MEASURES}
        cost = MISSING
        if first in flops and second in flops:
            cost = f"{flops[first] / flops[second] - 1:+.0%}"
        seeds = apart["loss"].count if apart["loss"] else 0
        cells = [_cell(apart[m], 3 if m == "loss" else 2) for m in MEASURES]
        said = verdict(apart["loss"], apart["chrF++"])
        rows.append([name, f"{first} is ahead of {second}", str(seeds), cost, *cells, said])
    header = ["", "claim", "seeds", "FLOPs", *MEASURES, "verdict"]
    notes = [
        "The first less the second, over the seeds of both, with 95 percent intervals. A verdict goes by "
        "the validation loss, in bits per target token, where below zero is better; it is mixed where the "
        "interval of chrF++ lies on the other side. FLOPs: how much more a token costs with the first."
    ]
    return Grid(header, rows, notes, texts=2)


def other_measures(systems, baseline: str) -> Grid:
    """Every system by chrF++ and by BLEU without its penalty for short translations."""
    names = [name for name in MEASURES if name not in ("loss", "BLEU")]
    points = {name: by_seed(systems, MEASURES[name]) for name in names}
    chances = {name: chance(of_all) for name, of_all in points.items()}
    lengths = by_seed(
        systems, lambda result: scores.mean_of(result.scores, lambda score: score.length_ratio)
    )
    rows = []
    for method in systems:
        row = [method, str(len(systems[method]))]
        for name in names:
            row.append(_mean(points[name][method]))
            apart = _between(chances[name], points[name], baseline, method)
            row.append(MISSING if method == baseline else _cell(apart, 2))
        rows.append([*row, _mean(lengths[method])])
    header = ["method", "seeds"]
    for name in names:
        header += [name, f"less {baseline}'s"]
    notes = [
        "Means over directions and over a system's seeds, differences over the seeds that both have. BLEU "
        "without its penalty for short translations does not fall where a run happens to end sentences "
        "early; length: of the translations over that of the references."
    ]
    return Grid([*header, RATIO], rows, notes)


def _between(by_chance: Chance, points: Mapping, first: str, second: str) -> Difference | None:
    """``second`` less ``first``."""
    if first not in points or second not in points:
        return None
    return by_chance.between(points[first], points[second])


def _mean(points: Mapping[int | None, float]) -> str:
    return f"{sum(points.values()) / len(points):.2f}"


def _cell(found: Difference | None, digits: int) -> str:
    return MISSING if found is None else format(found, f"+.{digits}f")
