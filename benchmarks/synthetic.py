"""Random sentences, binarised: python -m benchmarks.synthetic FOLDER shows what `program.py` trains on."""

import random
import sys
from pathlib import Path

import torch
from fairseq.data import Dictionary, indexed_dataset

SHORTEST, LONGEST = 10, 30  # words


def make_data(folder: Path, vocabulary: int, sentences: dict[str, int], seed: int = 1) -> Path:
    """fairseq's binary data with a joint dictionary; the target has the source's length.

    Args:
        sentences: how many in ``train``, ``valid`` and ``test``.

    Returns:
        the folder to give to fairseq.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for i in range(vocabulary):
        dictionary.add_symbol(f"w{i}")
    dictionary.pad_to_multiple_(8)
    words = random.Random(seed)
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


if __name__ == "__main__":
    print(make_data(Path(sys.argv[1]), 100, {"train": 100, "valid": 10, "test": 10}))
