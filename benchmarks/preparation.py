"""The steps of preparation, timed: python -m benchmarks.preparation TEXT [PAIRS]

TEXT is a folder of {language}.txt in M4's languages, line n being the same sentence in all, such as NTREX's.
Sentences are made of the halves of two of these and a number, drawn with a fixed seed: PAIRS (1,000,000) in
all. Each step runs with one process and with as many as there are cores, then ``fairseq-preprocess`` for each
pair and shard, whose files have to be those of the step ``binarise``.
"""

import filecmp
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

OTHERS = ("nso", "msa", "tgl", "cat")
SHARDS = 4
SPLITS = {"valid": 1000, "test": 1000}


def make_corpus(source: Path, target: Path, pairs: int) -> None:
    """Writes ``{split}.eng-{other}.{language}``."""
    target.mkdir()
    draw = random.Random(1)
    text = {
        language: [line.split() for line in (source / f"{language}.txt").open(encoding="utf-8")]
        for language in ("eng", *OTHERS)
    }
    lines = range(len(text["eng"]))
    for other in OTHERS:
        for split, count in {"train": pairs // len(OTHERS), **SPLITS}.items():
            drawn = [
                (draw.choice(lines), draw.choice(lines), draw.randrange(10**6))
                for _ in range(count)
            ]
            for language in ("eng", other):
                with open(target / f"{split}.eng-{other}.{language}", "w", encoding="utf-8") as out:
                    for one, two, number in drawn:
                        first, second = text[language][one], text[language][two]
                        half = [*first[: len(first) // 2], str(number), *second[len(second) // 2 :]]
                        out.write(" ".join(half) + "\n")


def timed(name: str, *commands: list) -> None:
    """Prints seconds of the clock and of the processors that the commands take, one after the other."""
    quiet = os.environ | {"LOGLEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        words = list(map(str, command))
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=quiet)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name:40} {wall:8.1f} s {used:8.1f} s of processors", flush=True)


def step(*words: object) -> list:
    return [sys.executable, "-m", "smoe_fairseq.recipes", *words]


def preprocess(folder: Path) -> list[list]:
    """A command for each pair and shard."""
    program = Path(sysconfig.get_path("scripts"), "fairseq-preprocess")
    words = ["--srcdict", folder / "dict.txt", "--tgtdict", folder / "dict.txt"]
    return [
        [program, "--source-lang", "eng", "--target-lang", other, *words]
        + ["--destdir", folder / f"fairseq/shard{i}", "--workers", os.cpu_count()]
        + [
            word
            for split in ("train", *(SPLITS if i == 0 else ()))
            for word in (f"--{split}pref", folder / f"text/shard{i}/{split}.eng-{other}")
        ]
        for i in range(SHARDS)
        for other in OTHERS
    ]


def main(source: Path, pairs: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_corpus(source, folder / "given", pairs)
        raw, text, binary = (folder / name for name in ("raw", "text", "bin"))
        model, dictionary = folder / "spm.model", folder / "dict.txt"
        for workers in (1, os.cpu_count()):
            by = ("--workers", workers)
            with_shards = ("--shards", SHARDS, *by)
            timed(f"gather, {workers}", step("gather", "m4", folder / "given", raw, *by))
            if not model.exists():
                timed("learn", step("learn", raw, folder, "--vocab-size", 32000))
            timed(f"encode, {workers}", step("encode", model, raw, text, *with_shards))
            shutil.rmtree(binary, ignore_errors=True)
            timed(f"binarise, {workers}", step("binarise", "m4", text, dictionary, binary, *by))
        timed("fairseq-preprocess, 16 times", *preprocess(folder))
        files = [file.relative_to(binary) for file in binary.rglob("*") if file.is_file()]
        _, other, missing = filecmp.cmpfiles(binary, folder / "fairseq", files, shallow=False)
        print(f"{len(files)} files, of which differ: {other + missing or 'none'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
