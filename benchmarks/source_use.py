"""How much a trained model's loss falls because it reads the right source sentence.

    python -m benchmarks.source_use DATA RUN=CHECKPOINT ... [--output FILE.json]

DATA is the binarised text of the checkpoints. The validation loss is computed twice: with each target's
own source sentence, and with the source of another sentence of about the same length in the same
direction. The difference, in bits per target token, is what the source tells the model about the target.
The loss with a wrong source shows how well the model knows the target language alone. Of two models with
the same loss, the one that gains more from the source translates more and guesses less. One JSON with
all runs, and a table of them.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.machine import describe
from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.exit_curve import nll
from smoe_fairseq.files import write_whole

SENTENCES = 100  # of each direction
PIVOT = "en"
HEADER = ["run", "right source", "wrong source", "gain", "into English", "out of English"]


def with_another_source(sample: dict) -> dict:
    """The batch with the sources a tenth of it further; sentences are in order of their length."""
    distance = max(1, len(sample["target"]) // 10)
    moved = {
        name: sample["net_input"][name].roll(distance, dims=0)
        for name in ("src_tokens", "src_lengths")
    }
    return {**sample, "net_input": {**sample["net_input"], **moved}}


@torch.no_grad()
def measure(checkpoint: Path, data: str, sentences: int) -> dict[str, dict[str, float]]:
    """By direction: target tokens, and their bits with the right source and with a wrong one."""
    model, task = inputs.load(checkpoint, data)
    found = {}
    for direction in inputs.directions(task):
        sums = {"tokens": 0, "right": 0.0, "wrong": 0.0}
        for sample in inputs.Samples(model, task, direction, sentences=sentences):
            if len(sample["target"]) == 1:
                continue  # there is no other source
            sums["tokens"] += sample["ntokens"]
            sums["right"] += nll(model, sample)[0]
            sums["wrong"] += nll(model, with_another_source(sample))[0]
        found[direction] = {name: round(value, 1) for name, value in sums.items()}
    return found


def row(name: str, found: dict[str, dict[str, float]]) -> str:
    def per_token(measure: str, of: list[dict]) -> float:
        return sum(sums[measure] for sums in of) / sum(sums["tokens"] for sums in of)

    into = [sums for direction, sums in found.items() if direction.endswith(f"-{PIVOT}")]
    out = [sums for direction, sums in found.items() if not direction.endswith(f"-{PIVOT}")]
    right, wrong = (per_token(measure, into + out) for measure in ("right", "wrong"))
    gains = [per_token("wrong", of) - per_token("right", of) for of in (into + out, into, out)]
    return f"| {' | '.join([name, *(f'{value:.3f}' for value in (right, wrong, *gains))])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("runs", nargs="+", metavar="RUN=CHECKPOINT")
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parser.add_argument("--output", type=Path, default=Path("source_use.json"))
    args = parser.parse_args()
    checkpoints = dict(run.split("=", 1) for run in args.runs)
    runs = {n: measure(Path(path), args.data, args.sentences) for n, path in checkpoints.items()}
    result = {**describe(torch.device("cpu")), "sentences": args.sentences, "runs": runs}
    write_whole(args.output, json.dumps(result, indent=1) + "\n")
    print(f"| {' | '.join(HEADER)} |\n|---|{'---:|' * (len(HEADER) - 1)}")
    print("\n".join(row(name, found) for name, found in runs.items()))


if __name__ == "__main__":
    main()
