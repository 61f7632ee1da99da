"""Is one run better than another? sacreBLEU's paired bootstrap on their saved translations."""

from pathlib import Path

from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from smoe_fairseq.recipes import scores
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.render import Grid, number
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

SAMPLES = 1000


def compare(dataset: Dataset, first: str, second: str) -> Grid:
    """BLEU of both runs, the difference and its p-value for each direction; missing where either is.

    The seed is sacreBLEU's own (``SACREBLEU_SEED``), so a comparison repeats itself exactly.
    """
    if first == second:
        raise UsageError(f"--compare {first} {second}: expected two different methods")
    folders = Folders(dataset.name)
    for name in (first, second):
        if not (folders.run(name) / scores.FILE).exists():
            raise UsageError(
                f"{folders.run(name) / scores.FILE} is missing: run scripts/evaluate.sh "
                f"{dataset.name} {name} first"
            )
    results = [scores.read(folders.run(name)) for name in (first, second)]
    rows, signatures = [], set()
    for direction in dataset.directions:
        if not all(direction in result for result in results):
            rows.append([direction, *(number(None) for _ in range(4))])
            continue
        kinds = {result[direction].signature for result in results}
        if len(kinds) > 1:
            raise UsageError(
                f"{first} and {second} were scored differently on {direction} "
                f"({' and '.join(sorted(kinds))}): evaluate both again with the same settings"
            )
        signatures |= kinds
        rows.append([direction, *_tested(dataset, direction, first, second)])
    notes = [
        f"paired bootstrap, {SAMPLES} samples: the difference is significant where p < 0.05",
        *(f"sacreBLEU {signature}" for signature in sorted(signatures)),
    ]
    return Grid(["direction", first, second, "difference", "p"], rows, notes)


def _tested(dataset: Dataset, direction: str, first: str, second: str) -> list[str]:
    folders = Folders(dataset.name)
    target = direction.split("-")[1]
    reference = folders.raw / f"test.{dataset.pair_of(direction)}.{target}"
    files = [folders.run(name) / "test" / f"{direction}.txt" for name in (first, second)]
    references, *hypotheses = (_lines(path) for path in (reference, *files))
    for path, lines in zip(files, hypotheses, strict=True):
        if len(lines) != len(references):
            raise UsageError(
                f"{path} has {len(lines)} lines and {reference} has {len(references)}: "
                "evaluate again"
            )
    tokenize = str(dataset.sacrebleu.get("tokenize", "13a"))
    with quietly():
        test = PairedTest(
            [(first, hypotheses[0]), (second, hypotheses[1])],
            {"BLEU": BLEU(tokenize=tokenize, references=[references])},
            references=None,
            test_type="bs",
            n_samples=SAMPLES,
        )
        a, b = test()[1]["BLEU"]
    return [*(number(n) for n in (a.score, b.score)), number(b.score - a.score, sign=True)] + [
        number(b.p_value, digits=4)
    ]


def _lines(path: Path) -> list[str]:
    """Lines end with a line feed alone, as they did for sacreBLEU's command."""
    try:
        return path.read_text("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: evaluate again") from None
