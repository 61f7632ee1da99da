"""``scripts/table.sh``: the scores of all methods of a data set side by side."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes import scores
from smoe_fairseq.recipes.config import Dataset, load_dataset
from smoe_fairseq.recipes.folders import Folders

MISSING = "-"


def add_arguments(parser: ArgumentParser) -> None:
    """As the commands of ``smoe`` have it."""
    parser.add_argument("dataset", metavar="DATASET")


def run(args: Namespace) -> None:
    """Prints the table of a data set."""
    print(markdown(collect(load_dataset(args.dataset))))


@dataclass(frozen=True)
class Table:
    """BLEU by method and direction; what has not been measured is None, never zero."""

    directions: tuple[str, ...]
    rows: dict[str, dict[str, scores.Score]]

    def bleu(self, method: str, direction: str) -> float | None:
        """BLEU in points."""
        score = self.rows[method].get(direction)
        return score.bleu if score else None

    def average(self, method: str) -> float | None:
        """Mean over all directions; None when one is missing or they were not computed alike."""
        found = [self.rows[method].get(direction) for direction in self.directions]
        if None in found or len({score.signature for score in found}) > 1:
            return None
        return sum(score.bleu for score in found) / len(found)

    def signatures(self) -> Sequence[str]:
        """All sacreBLEU signatures in the table; more than one means cells that do not compare."""
        return sorted({s.signature for row in self.rows.values() for s in row.values()})


def collect(dataset: Dataset) -> Table:
    """Reads ``scores.json`` of every run of a data set."""
    folder = Folders(dataset.name).runs
    runs = sorted(path for path in folder.glob("*") if path.is_dir())
    if not runs:
        raise UsageError(
            f"{folder} holds no runs: start with scripts/train.sh {dataset.name} METHOD"
        )
    return Table(dataset.directions, {run.name: scores.read(run) for run in runs})


def markdown(table: Table) -> str:
    """The table as Markdown, followed by the sacreBLEU signatures."""
    header = ["method", *table.directions, "average"]
    lines = [header, ["---", *("---:" for _ in header[1:])]]
    for method in table.rows:
        cells = [table.bleu(method, direction) for direction in table.directions]
        numbers = [*cells, table.average(method)]
        lines.append([method, *(MISSING if n is None else f"{n:.2f}" for n in numbers)])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([text, "", *(f"sacreBLEU {s}" for s in table.signatures())])
