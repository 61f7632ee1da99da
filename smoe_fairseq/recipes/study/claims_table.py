"""The paper's claims with their verdicts, as a table."""

from smoe_fairseq.recipes.study import sentences
from smoe_fairseq.recipes.study.blocks import Chance, chance
from smoe_fairseq.recipes.study.capacity_claims import about_capacity
from smoe_fairseq.recipes.study.kept import by_seed
from smoe_fairseq.recipes.study.verdicts import Verdict, about_cost, about_scores, strata
from smoe_fairseq.recipes.tables.render import MISSING, Grid
from smoe_fairseq.settings.dataset import Dataset

HEADER = ["claim", "seeds", "found", "of these alone", "loss", "directions", "verdict"]


def claims_table(dataset: Dataset, systems, flops, baseline: str) -> Grid:
    """``systems``: by method, results in the order of their seeds; ``flops``: by method, per token."""
    bleu = by_seed(systems, lambda result: result.bleu)
    losses = by_seed(systems, lambda result: result.validation)
    of_losses = chance(losses)
    times = {m: {(r.seed, r.machine): r.time for r in systems[m] if r.time} for m in flops}
    scored = about_scores(bleu, dataset.experts)
    by_sentence = sentences.compared(dataset, systems, [v.methods for v in scored if v.found])
    rows = [
        _row(
            v,
            loss=f"{of_losses.between(*(losses[m] for m in v.methods)):+.3f}"
            if v.found
            else MISSING,
            directions=by_sentence[v.methods].in_words(v.found.count)
            if v.methods in by_sentence
            else "not computed",
        )
        for v in scored
    ]
    rest = about_cost({m: of_runs for m, of_runs in times.items() if of_runs}, flops, baseline)
    rest += about_capacity(
        {
            method: [result.routing for result in results if result.routing]
            for method, results in systems.items()
            if strata(method.replace("deep-", "smoe-"))
        }
    )
    rows += [_row(v, loss="", directions=v.directions) for v in rest]
    notes = [
        "Found, of scores: the difference of the mean BLEU over the seeds that both have, with its 95 "
        "percent interval; of these alone: the interval of the paired t-test of these two systems, which "
        "knows nothing of the others (a verdict goes by the first, and is weak where this one does not "
        "bear it out); loss: the difference of the validation loss, in bits per token, where below zero is "
        f"better. {_known(chance(bleu), of_losses)}Directions, of scores: those that differ by sentences "
        f"(sacreBLEU's paired bootstrap of both systems' seeds, p < {sentences.LEVEL}: of two equal "
        "systems one direction in ten, since that p-value knows one side); of the rest: the sign of the "
        "mean over seeds. (e): how much more time a token takes, from what training took on the same "
        "machine, beside whatever else ran on it (paired t). (f) to (h): of the text of the test set, with "
        "the references as the decoder's input (t over the seeds); where a test set is parallel in all "
        "languages, targets in one language are the same sentences whatever the source."
    ]
    return Grid(HEADER, rows, notes, texts=len(HEADER))


def _known(of_bleu: Chance, of_losses: Chance) -> str:
    """How wide chance is in a run, where there are seeds to tell it from."""
    if not of_bleu.shares or not of_losses.shares:
        return ""
    most = (
        f"{max(c.shares.values()):.0%} by {max(c.shares, key=c.shares.get)}"
        for c in (of_bleu, of_losses)
    )
    return (
        "A score is taken to be what its system does, what its seed does, and chance, as wide for all; by "
        f"all runs together {of_bleu.deviation:.2f} BLEU and {of_losses.deviation:.3f} bits (standard "
        f"deviation in a run, known from {of_bleu.freedom} degrees of freedom; of its squares "
        f"{' and '.join(most)}). The intervals are made of that. "
    )


def _row(verdict: Verdict, loss: str, directions: str) -> list[str]:
    found = verdict.found
    number = MISSING if found is None else format(found, verdict.spec)
    seeds = MISSING if found is None else str(found.count)
    alone = "" if verdict.alone is None else verdict.alone.interval(verdict.spec)
    return [verdict.claim, seeds, number, alone, loss, directions, verdict.verdict]
