"""Times whole programs: fairseq-train and fairseq-generate, dense and mixtures, on random sentences.

    python -m benchmarks.program [--quick] [--threads 2] [--rounds 3]

Interleaved runs, each relative to our dense model, with the ratio of their FLOPs for comparison.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import smoe_fairseq
from benchmarks import timing

PACKAGE = Path(smoe_fairseq.__file__).parent
SHORTEST, LONGEST = 10, 30  # words of a sentence


@dataclass(frozen=True)
class Model:
    strata: str | None = None  # None: dense
    stock: bool = False  # fairseq's own


MODELS = {
    "fairseq": Model(stock=True),
    "dense": Model(),
    "moe": Model("8"),
    "smoe-4-4": Model("4-4"),
    "smoe-2-2-2-2": Model("2-2-2-2"),
}


# fairseq-generate after a first call of attention, for which torch loads modules during a third of
# a second: of the models compared here, some make it before fairseq's clock starts, others after.
WARM_GENERATE = """
import torch
from fairseq.modules import MultiheadAttention
from fairseq_cli.generate import cli_main
x, mask = torch.zeros(2, 2, 8), torch.zeros(2, 2, dtype=torch.bool)
with torch.no_grad():
    MultiheadAttention(8, 1, self_attention=True)(x, x, x, key_padding_mask=mask)
cli_main()
"""


def make_data(folder: Path, vocabulary: int, sentences: dict[str, int]) -> Path:
    """Random sentences as fairseq's binary data, with a joint dictionary; returns ``folder``.

    Args:
        sentences: how many in ``train``, ``valid`` and ``test``.
    """
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for i in range(vocabulary):
        dictionary.add_symbol(f"w{i}")
    dictionary.pad_to_multiple_(8)
    words = random.Random(1)
    for split, number in sentences.items():
        lengths = [words.randint(SHORTEST, LONGEST) for _ in range(number)]
        for language in ("src", "tgt"):
            dictionary.save(str(folder / f"dict.{language}.txt"))
            path = str(folder / f"{split}.src-tgt.{language}")
            builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", len(dictionary))
            for length in lengths:
                ids = [words.randrange(dictionary.nspecial, len(dictionary)) for _ in range(length)]
                builder.add_item(torch.IntTensor([*ids, dictionary.eos()]))
            builder.finalize(f"{path}.idx")
    return folder


class Runs:
    """The runs of one benchmark: ``args`` as `parse_args` returns them."""

    def __init__(self, args: argparse.Namespace, data: Path, folder: Path, threads: int):
        self.args, self.data, self.folder = args, data, folder
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "LOGLEVEL": "INFO",  # speeds are read from their logs
        }

    def speed(self, command: str, name: str) -> float:
        """Target tokens per second."""
        flags = self._flags(command, name)
        if command == "train":
            text = self._run(["-m", "fairseq_cli.train", *flags])
            return statistics.median(float(update["wps"]) for update in updates(text)[1:])
        text = self._run(["-c", WARM_GENERATE, *flags])
        return float(re.search(r"([\d.]+) tokens/s\)", text).group(1))

    def flops(self, name: str) -> float:
        flags = ["--json", "--vocab-size", str(self.args.vocabulary), *self._model_flags(name)]
        smoe = Path(sys.executable).with_name("smoe")
        printed = subprocess.run([smoe, "cost", *flags], capture_output=True, text=True, check=True)
        return json.loads(printed.stdout)["flops_per_token"]

    def _flags(self, command: str, name: str) -> list[str]:
        flags = [str(self.data), "--user-dir", str(PACKAGE), "--cpu", "--num-workers", "0"]
        save_dir = self.folder / name
        if command == "generate":
            length = str(self.args.length)
            flags += ["--path", str(save_dir / "checkpoint_last.pt"), "--beam", "5"]
            # An untrained model may stop anywhere: all models translate to the same length.
            flags += ["--max-len-a", "0", "--max-len-b", length, "--min-len", length]
            return flags + ["--batch-size", str(self.args.batch_size)]
        prefix = "" if MODELS[name].stock else "smoe_"
        flags += ["--criterion", f"{prefix}label_smoothed_cross_entropy", "--label-smoothing"]
        flags += ["0.1", "--optimizer", "adam", "--lr", "1e-4"]
        flags += ["--max-tokens", str(self.args.max_tokens)]
        flags += ["--max-update", str(self.args.updates), "--log-interval", "1"]
        flags += ["--log-format", "json", "--disable-validation", "--no-epoch-checkpoints"]
        flags += ["--no-save-optimizer-state", "--distributed-world-size", "1"]
        flags += ["--save-dir", str(save_dir), "--restore-file", "none"]  # each run begins anew
        return flags + self._model_flags(name)

    def _model_flags(self, name: str) -> list[str]:
        model = MODELS[name]
        flags = ["--share-all-embeddings"]
        for side in ("encoder", "decoder"):
            flags += [f"--{side}-layers", str(self.args.layers), f"--{side}-normalize-before"]
            flags += [f"--{side}-embed-dim", str(self.args.embed_dim)]
            flags += [f"--{side}-ffn-embed-dim", str(self.args.ffn_embed_dim)]
        if model.stock:
            return ["--arch", "transformer", *flags]
        flags = ["--arch", "smoe_transformer", *flags]
        return flags + (["--smoe-strata", model.strata] if model.strata else ["--moe-freq", "0"])

    def _run(self, words: list[str]) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return done.stdout + done.stderr


def updates(text: str) -> list[dict]:
    """What fairseq-train logged for each update."""
    lines = re.findall(r"\| train_inner \| (\{.*\})", text)
    return [json.loads(line) for line in lines]


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = {name: value for name, value in vars(args).items() if name != "out"}
    run = {**timing.describe(torch.device("cpu")), "sizes": sizes, "results": {}}
    with tempfile.TemporaryDirectory() as folder:
        batch = args.max_tokens // SHORTEST  # sentences, at most
        sentences = {"train": batch * args.updates, "valid": 10, "test": args.sentences}
        data = make_data(Path(folder, "data"), args.vocabulary, sentences)
        runs = Runs(args, data, Path(folder), torch.get_num_threads())
        for command in ("train", "generate"):
            speeds = {name: [] for name in args.models}
            for i in range(args.rounds):
                for name in args.models:
                    speeds[name].append(runs.speed(command, name))
                    done = f"{command} {i + 1}/{args.rounds} {name}"
                    print(f"{done}: {speeds[name][-1]:.1f}", flush=True)
            run["results"][command] = {
                name: result(command, name, speeds, runs, args) for name in args.models
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(run, indent=1))


def result(command: str, name: str, speeds: dict, runs: Runs, args: argparse.Namespace) -> dict:
    """Tokens per second, and time and FLOPs relative to the dense model."""
    seconds = {model: [1 / speed for speed in values] for model, values in speeds.items()}
    found = {"speed": timing.summary(speeds[name])}
    found["over_dense"] = timing.ratio(seconds, name, "dense")
    if command == "train" and name != "fairseq":
        found["flops"] = runs.flops(name) / runs.flops("dense")
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers and short runs")
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
        parser.error("--models: dense is required, since the others are compared with it")
    return args


if __name__ == "__main__":
    main()
