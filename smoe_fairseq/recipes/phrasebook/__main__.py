"""``python -m smoe_fairseq.recipes.phrasebook``: writes the built-in corpus."""

import argparse

from smoe_fairseq.errors import ends_with_sentence, flush_stdout
from smoe_fairseq.recipes.phrasebook.corpus import write_corpus


@ends_with_sentence
@flush_stdout
def main() -> None:
    """Writes the corpus and says how many sentences each split has."""
    parser = argparse.ArgumentParser(
        prog="python -m smoe_fairseq.recipes.phrasebook",
        description="Write parallel sentences, English with nso, msa, tgl and cat.",
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder for the text files")
    for split, size in (("train", 4000), ("valid", 100), ("test", 150)):
        text = f"sentences of {split}.* (default: %(default)s)"
        parser.add_argument(f"--{split}", type=int, default=size, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="default: %(default)s")
    given = parser.parse_args()
    counts = write_corpus(given.output_dir, given.train, given.valid, given.test, given.seed)
    sizes = {name.split(".")[0]: count for name, count in counts.items()}
    print(f"{given.output_dir}: " + ", ".join(f"{split} {n}" for split, n in sizes.items()))


if __name__ == "__main__":
    main()
