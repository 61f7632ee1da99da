"""Commands run as a user runs them, in processes of their own."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SCRIPTS = Path(sysconfig.get_path("scripts"))

# The stock model, small and shortly trained.
TINY = """--arch transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 --decoder-embed-dim 32
    --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --optimizer adam --lr 0.01
    --lr-scheduler inverse_sqrt --warmup-updates 4 --criterion label_smoothed_cross_entropy
    --max-tokens 300 --max-epoch 2 --no-epoch-checkpoints --cpu""".split()


def run(*command, check=True, cwd=None, stdin="", **environment) -> subprocess.CompletedProcess:
    """Runs a program of this environment (``fairseq-train``, ``smoe``, ``python``, ...).

    In the result, ``stdout`` holds stderr too; ``check`` fails the test on a non-zero status.
    """
    program, *arguments = map(str, command)
    program = sys.executable if program == "python" else str(SCRIPTS / program)
    result = subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if check:
        assert result.returncode == 0, result.stdout[-4000:]
    return result


def preprocess(raw: Path, folder: Path, *flags) -> None:
    """``fairseq-preprocess`` from the tiny corpus's text to ``folder``."""
    prefixes = [f"--{split}pref={raw / split}" for split in ("train", "valid", "test")]
    run("fairseq-preprocess", "-s", "src", "-t", "tgt", "--destdir", folder, *prefixes, *flags)


def train(data, save_dir, *flags, check=True):
    return run("fairseq-train", data, "--save-dir", save_dir, *TINY, *flags, check=check)


def generate(data, checkpoint, *flags):
    """Translates the test set; returns the best hypotheses and their scores by sentence number."""
    return hypotheses(run("fairseq-generate", *generation(data, checkpoint), *flags).stdout)


def generation(data, checkpoint):
    return [data, "--path", checkpoint, "--beam", "3", "--max-len-b", "12", "--cpu"]


def hypotheses(output):
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (float(score), words) for number, score, words in found}
