"""Random sentences, binarised: python -m benchmarks.synthetic FOLDER shows what `program.py` trains on."""

import random
import sys
from pathlib import Path

from fairseq_cli import preprocess

from benchmarks.forked import Forked, command

SHORTEST, LONGEST = 10, 30  # words


def make_data(folder: Path, vocabulary: int, sentences: dict[str, int], seed: int = 1) -> Path:
    """fairseq's binary data with a joint dictionary; the target has the source's length.

    Args:
        sentences: how many in ``train``, ``valid`` and ``test``.

    Returns:
        the folder to give to fairseq.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = random.Random(seed)
    for split, number in sentences.items():
        lengths = [words.randint(SHORTEST, LONGEST) for _ in range(number)]
        for language in ("src", "tgt"):
            lines = [" ".join(f"w{words.randrange(vocabulary)}" for _ in range(n)) for n in lengths]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    destination = folder / "bin"
    words = ["-s", "src", "-t", "tgt", "--joined-dictionary", "--destdir", destination]
    for split in sentences:
        words += [f"--{split}pref", folder / split]
    Forked(command(preprocess.cli_main, words)).wait()
    return destination


if __name__ == "__main__":
    print(make_data(Path(sys.argv[1]), 100, {"train": 100, "valid": 10, "test": 10}))
