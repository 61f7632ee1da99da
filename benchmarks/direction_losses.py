"""Where two systems of a study differ: validation loss and chrF++ by direction or class of languages.

    python -m benchmarks.direction_losses DATASET METHOD BASELINE [--seeds 1 2] [--output FILE.json]

Run in the folder that has data/, runs/ and results/. The loss of a study's table is a mean over all
target tokens, its chrF++ a mean over directions, so the two may rank systems differently. This tells
both in the same classes: the loss is the mean over the directions of a class, in bits per target token
of the validation set. Writes the loss of each direction and run as JSON; prints a table of METHOD less
BASELINE, and the rank correlation of both differences over the directions.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe
from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.capacity import nll
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes.config import load_dataset
from smoe_fairseq.recipes.evaluation.comparison import spearman
from smoe_fairseq.recipes.evaluation.scores import CHRF, chrf
from smoe_fairseq.recipes.evaluation.table import columns
from smoe_fairseq.recipes.folders import Folders, run_name
from smoe_fairseq.recipes.study.results import read


@torch.no_grad()
def losses(checkpoint: Path, data: str) -> dict[str, float]:
    """By direction, bits per target token of the validation set."""
    model, task = inputs.load(checkpoint, data)
    found = {}
    for direction in inputs.directions(task):
        bits, tokens = 0.0, 0
        for sample in inputs.Samples(model, task, direction):
            bits, tokens = bits + nll(model, sample)[0], tokens + sample["ntokens"]
        found[direction] = round(bits / tokens, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("method")
    parser.add_argument("baseline")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path, default=Path("direction_losses.json"))
    args = parser.parse_args()
    dataset = load_dataset(args.dataset)
    folders = Folders(args.dataset)
    scored = {result.name: result.scores for result in read(args.dataset)}
    found, by_loss, by_chrf = {}, [], []
    for seed in args.seeds:
        first, second = (run_name(dataset, m, seed) for m in (args.method, args.baseline))
        for run in (first, second):
            checkpoint = folders.run(run) / "checkpoint_best.pt"
            found[run] = losses(checkpoint, str(folders.binary))
        a, b = scored[first], scored[second]
        by_loss.append({d: found[first][d] - found[second][d] for d in dataset.directions})
        by_chrf.append({d: chrf(a[d]) - chrf(b[d]) for d in dataset.directions})
    result = {**describe(torch.device("cpu")), "losses": found}
    write_whole(args.output, json.dumps(result, indent=1) + "\n")
    header = ["", *(f"{what}, seed {seed}" for what in ("loss", CHRF) for seed in args.seeds)]
    print(f"| {' | '.join(header)} |\n|---|{'---:|' * (len(header) - 1)}")
    for column in columns(dataset):
        cells = [
            f"{statistics.fmean(values[d] for d in column.directions):+.{digits}f}"
            for of_seeds, digits in ((by_loss, 3), (by_chrf, 2))
            for values in of_seeds
        ]
        print(f"| {' | '.join([column.name, *cells])} |")
    for seed, *pair in zip(args.seeds, by_loss, by_chrf, strict=True):
        alike = spearman(*(np.array(list(values.values())) for values in pair))
        print(f"seed {seed}: rank correlation over the directions {alike:.2f}")


if __name__ == "__main__":
    main()
