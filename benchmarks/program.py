"""Times whole programs: fairseq-train and fairseq-generate, dense and mixtures, on random sentences.

    python -m benchmarks.program [--quick] [--threads 2] [--rounds 3]

In turns, and each over our dense model, with the ratio of their FLOPs for comparison.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks import machine, synthetic, timing
from benchmarks.fairseq_runs import MODELS, Runs


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = {name: value for name, value in vars(args).items() if name != "out"}
    run = {**machine.describe(torch.device("cpu")), "sizes": sizes, "results": {}}
    with tempfile.TemporaryDirectory() as folder:
        batch = args.max_tokens // synthetic.SHORTEST  # sentences, at most
        sentences = {"train": batch * args.updates, "valid": 10, "test": args.sentences}
        data = synthetic.make_data(Path(folder, "data"), args.vocabulary, sentences)
        runs = Runs(args, data, Path(folder), torch.get_num_threads())
        for command in ("train", "generate"):
            speeds = {name: [] for name in args.models}
            for i in range(args.rounds):
                for name in args.models:
                    speeds[name].append(runs.speed(command, name))
                    print(
                        f"{command} {i + 1}/{args.rounds} {name}: {speeds[name][-1]:.1f}",
                        flush=True,
                    )
            run["results"][command] = {
                name: result(command, name, speeds, runs, args) for name in args.models
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(run, indent=1))
    for command, models in run["results"].items():
        for name, model in models.items():
            print(f"{command} {name}: {json.dumps(model)}")


def result(command: str, name: str, speeds: dict, runs: Runs, args: argparse.Namespace) -> dict:
    """Speed in tokens per second, time over the dense model's, and the ratio of FLOPs."""
    seconds = {model: [1 / speed for speed in values] for model, values in speeds.items()}
    found = {
        "speed": timing.summary(speeds[name]),
        "over_dense": timing.ratio(seconds, name, "dense"),
    }
    if command == "train" and name != "fairseq":
        found["flops"] = runs.flops(name) / runs.flops("dense")
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="other defaults: two layers, short runs"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program and model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--ffn-embed-dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6, help="on each side; every second is a MoE")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=4096, help="per update")
    parser.add_argument("--updates", type=int, default=5, help="per run; the first does not count")
    parser.add_argument("--sentences", type=int, default=32, help="to translate")
    parser.add_argument("--batch-size", type=int, default=8, help="sentences translated at a time")
    parser.add_argument("--length", type=int, default=20, help="of every translation")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/program.json"))
    if parser.parse_args().quick:
        parser.set_defaults(layers=2, max_tokens=512, updates=4, rounds=1, sentences=16)
    args = parser.parse_args()
    if "dense" not in args.models:
        parser.error("--models needs dense, which the others are compared with")
    return args


if __name__ == "__main__":
    main()
