"""What a trained run is like, so that a run can be held against its baseline.

    python -m benchmarks.trained DATA RUN=FOLDER ... [--output benchmarks/results/trained]

FOLDER is that of ``scripts/train.sh`` and ``evaluate.sh``: train.log, checkpoints, scores, test/. Of each
run: the loss in training, and on the validation set (references as decoder input) in five modes between
evaluation and training; dropped first choices by position; lengths and BLEU. One JSON per run, kept
and not computed again, and a table of all that are there.
"""

import argparse
import json
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe
from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.capacity import nll, samples
from smoe_fairseq.analysis.training_log import read_lines
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.statistics import by_position, percent_dropped
from smoe_fairseq.recipes.evaluation import scores

LAST = 300  # updates over which the training loss is averaged
# Mode: (second experts as in training, capacity as in training, all of training, dropout included)
MODES = {
    "evaluation": (False, False, False),
    "capacity": (False, True, False),
    "second": (True, False, False),
    "both": (True, True, False),
    "training": (True, True, True),
}


@contextmanager
def mode(model, draws: bool, limited: bool, dropout: bool):
    """A gate in training mode draws second experts and has training's capacity."""
    gates = [module for module in model.modules() if isinstance(module, TopKGate)]
    factors = [(gate.capacity.factor, gate.capacity.eval_factor) for gate in gates]
    model.train(dropout)
    for gate in gates:
        gate.train(draws)
        factor = gate.capacity.factor if limited else 0.0
        gate.capacity.factor = gate.capacity.eval_factor = factor
    try:
        yield
    finally:
        model.eval()
        for gate, (train, evaluate) in zip(gates, factors, strict=True):
            gate.capacity.factor, gate.capacity.eval_factor = train, evaluate


@torch.no_grad()
def losses(model, task, name: str) -> tuple[float, dict[str, list[float]]]:
    """Bits per token in a mode, and percent of first choices dropped by fifth on each side."""
    torch.manual_seed(1)
    bits, tokens = 0.0, 0
    fifths = {block: 0 for block in moe_blocks(model)}
    with mode(model, *MODES[name]):
        for sample in samples(model, task, inputs.directions(task)):
            batch_bits, moe_stats = nll(model, sample)
            bits, tokens = bits + batch_bits, tokens + sample["ntokens"]
            for block, stats in moe_stats.items():
                fifths[block] = fifths[block] + by_position(stats).numpy()
    percent = {}
    for side in dict.fromkeys(block.split(".")[0] for block in fifths):
        table = sum(table for block, table in fifths.items() if block.startswith(side))
        percent[side] = np.round(percent_dropped(table), 2).tolist()
    return round(bits / tokens, 4), percent


def words(folder: Path, direction: str) -> tuple[int, int]:
    """In the translations and in the references, as fairseq-generate printed them."""
    text = (folder / "test" / direction / "generate-test.txt").read_text("utf-8")
    references = re.findall(r"^T-\d+\t(.*)$", text, re.MULTILINE)
    translations = (folder / "test" / f"{direction}.txt").read_text("utf-8").splitlines()
    return tuple(sum(len(line.split()) for line in lines) for lines in (translations, references))


def measure(data: str, folder: Path, modes: list[str]) -> dict:
    log = list(read_lines(folder / "train.log"))
    training = [
        line["nll_loss"] for line in log if line["num_updates"] > log[-1]["num_updates"] - LAST
    ]
    updates = int(log[-1]["num_updates"])
    model, task = inputs.load(folder / "checkpoint_last.pt", data)
    found = {mode: losses(model, task, mode) for mode in modes}
    scored = scores.read(folder)
    return {
        **describe(torch.device("cpu")),
        "updates": updates,
        "training_nll_loss": round(sum(training) / len(training), 4),
        "validation_nll_loss": {mode: loss for mode, (loss, _) in found.items()},
        "dropped": found["both"][1] if "both" in found else {},
        "words": {direction: words(folder, direction) for direction in scored},
        "bleu": {direction: round(score.bleu, 2) for direction, score in scored.items()},
    }


def row(name: str, result: dict, directions: list[str]) -> str:
    """A run that was not evaluated has no translations, and empty cells for them."""
    drops, bleu = result["dropped"].get("decoder", []), result["bleu"]
    words = np.sum(list(result["words"].values()), axis=0) if result["words"] else None
    cells = [
        name,
        f"{result['training_nll_loss']:.3f}",
        *(_loss(result["validation_nll_loss"].get(mode)) for mode in MODES),
        " ".join(f"{percent:.1f}" for percent in drops),
        "" if words is None else f"{words[0] / words[1]:.3f}",
        *(f"{bleu[d]:.2f}" if d in bleu else "" for d in directions),
        f"**{sum(bleu.values()) / len(bleu):.2f}**" if bleu else "",
    ]
    return f"| {' | '.join(cells)} |"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def table(folder: Path, names: list[str]) -> str:
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    directions = list(dict.fromkeys(d for result in results.values() for d in result["bleu"]))
    header = ["", "training", *MODES, "dropped by fifth, %", "words", *directions, "mean"]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    return "\n".join([*lines, *(row(name, result, directions) for name, result in results.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("runs", nargs="+", metavar="RUN=FOLDER")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/trained"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = dict(run.split("=", 1) for run in args.runs)
    for name, folder in runs.items():
        path = args.output / f"{name}.json"
        if not path.exists():
            path.write_text(
                json.dumps(measure(args.data, Path(folder), args.modes), indent=1) + "\n"
            )
    print(table(args.output, list(runs)))


if __name__ == "__main__":
    main()
