"""Runs fairseq-train and fairseq-generate and reads their speed from what they print."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import smoe_fairseq

PACKAGE = Path(smoe_fairseq.__file__).parent


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


class Runs:
    """The runs of one benchmark: ``args`` as `program.py` reads them."""

    def __init__(self, args: argparse.Namespace, data: Path, folder: Path, threads: int):
        self.args, self.data, self.folder = args, data, folder
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "LOGLEVEL": "INFO",  # their logs are what is read
        }

    def speed(self, command: str, name: str) -> float:
        """Target tokens per second."""
        program = {"train": "fairseq_cli.train", "generate": "benchmarks.warm_generate"}[command]
        text = self._run([program, *self._flags(command, name)])
        if command == "train":
            return statistics.median(float(update["wps"]) for update in updates(text)[1:])
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
            # An untrained model would stop anywhere; so all models translate to the same length.
            flags += ["--max-len-a", "0", "--max-len-b", length, "--min-len", length]
            return flags + ["--batch-size", str(self.args.batch_size)]
        prefix = "" if MODELS[name].stock else "smoe_"
        flags += [
            "--criterion",
            f"{prefix}label_smoothed_cross_entropy",
            "--label-smoothing",
            "0.1",
        ]
        flags += ["--optimizer", "adam", "--lr", "1e-4", "--max-tokens", str(self.args.max_tokens)]
        flags += [
            "--max-update",
            str(self.args.updates),
            "--log-interval",
            "1",
            "--log-format",
            "json",
        ]
        flags += ["--disable-validation", "--no-epoch-checkpoints", "--no-save-optimizer-state"]
        flags += ["--distributed-world-size", "1", "--save-dir", str(save_dir)]
        flags += ["--restore-file", "none"]  # each run begins anew
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

    def _run(self, module_and_flags: list) -> str:
        command = [sys.executable, "-m", *map(str, module_and_flags)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return done.stdout + done.stderr


def updates(text: str) -> list[dict]:
    """What fairseq-train logged, update by update."""
    lines = re.findall(r"\| train_inner \| (\{.*\})", text)
    return [json.loads(line) for line in lines]
