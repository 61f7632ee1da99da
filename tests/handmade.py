"""A corpus of three small languages, and an SMoE whose gates are fixed by hand: all is known on paper."""

import csv
import random
from pathlib import Path
from unittest import mock

from commands import PLUGIN, changed, run

LANGUAGES = ("aa", "bb", "cc")
DIRECTIONS = ["bb-aa", "cc-aa", "aa-bb", "aa-cc"]
LENGTHS = [1, 40, 2, 2, 25, 3, 1, 12]
# What each class of token types chooses in the strata where it stops (2-2-2-2, experts 0 to 7), and
# so where it goes. The classes are text words of three kinds; special tokens are of a fourth.
ROUTES = {
    0: {0: 7},  # past strata 1 to 3, out of the block: requested capacity 1
    1: {0: 1, 1: 4, 3: 6},  # past stratum 2: 3
    2: {0: 0, 1: 3, 2: 5, 3: 7},  # everywhere: 4
    3: {0: 2, 2: 6},  # past stratum 1, then out: 2
}
SPECIAL = 3


def words_of(language):
    return [f"{language}{i}" for i in range(6)]


def class_of(word):
    """0, 1 or 2 of a word such as ``aa4``."""
    return int(word[2:]) % 3


def text(language, seed, lengths):
    generator = random.Random(f"{language}{seed}")
    return [generator.choices(words_of(language), k=k) for k in lengths]


def write_corpus(folder: Path) -> Path:
    """Makes the folder that fairseq-train takes, of two language pairs with one dictionary."""
    raw, binary = folder / "raw", folder / "bin"
    raw.mkdir()
    for pair in ("aa-bb", "aa-cc"):
        for language in pair.split("-"):
            for split, lengths in (
                ("train", [5] * (20 if pair == "aa-bb" else 10)),
                ("valid", LENGTHS),
            ):
                lines = text(language, pair + split, lengths)
                content = "".join(" ".join(line) + "\n" for line in lines)
                (raw / f"{split}.{pair}.{language}").write_text(content)
    words = "".join(f"{word} 1\n" for language in LANGUAGES for word in words_of(language))
    (raw / "dict.txt").write_text(words)
    dictionary = ["--srcdict", raw / "dict.txt", "--tgtdict", raw / "dict.txt"]
    for pair in ("aa-bb", "aa-cc"):
        source, target = pair.split("-")
        run(
            *("fairseq-preprocess", "-s", source, "-t", target, *dictionary),
            *("--trainpref", raw / f"train.{pair}", "--validpref", raw / f"valid.{pair}"),
            *("--destdir", binary),
        )
    return binary


def training(data, save_dir, *flags):
    return [
        *("fairseq-train", data, "--user-dir", PLUGIN, "--cpu", "--num-workers", 0),
        *("--arch", "smoe_transformer_tiny", "--encoder-embed-dim", 16),
        *("--encoder-layers", 4, "--decoder-layers", 4),
        *("--encoder-ffn-embed-dim", 16, "--smoe-strata", "2-2-2-2", "--max-tokens", 400),
        *("--criterion", "smoe_label_smoothed_cross_entropy", "--optimizer", "adam", "--lr", 0.01),
        *("--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints"),
        *("--max-update", 2, "--save-dir", save_dir, "--log-file", save_dir / "train.log", *flags),
    ]


def train(data, save_dir, *flags):
    return run(*training(data, save_dir, *flags))


MULTILINGUAL = [
    *("--task", "translation_multi_simple_epoch", "--encoder-langtok", "tgt"),
    *("--langs", ",".join(LANGUAGES), "--lang-pairs", ",".join(DIRECTIONS)),
]


def fix_gates(checkpoint: Path, symbols: list[str]) -> Path:
    """The same checkpoint with the routes of ``ROUTES``.

    An embedding says its type's class, attention and feed-forward networks add nothing to it, and a
    gate reads the class.
    """

    def change(state):
        for name, weight in state["model"].items():
            if name.endswith("embed_tokens.weight"):
                weight.zero_()
                for i, symbol in enumerate(symbols):
                    weight[i, SPECIAL if symbol is None else class_of(symbol)] = 1000
            elif any(part in name for part in ("out_proj", ".fc2.", ".experts.w2", ".experts.b2")):
                weight.zero_()
            elif ".gates." in name:
                stratum = int(name.split(".gates.")[1].split(".")[0])
                weight.zero_()
                for kind, route in ROUTES.items():
                    if stratum in route:
                        weight[route[stratum] - 2 * stratum, kind] = 1

    return changed(checkpoint, checkpoint.with_name("by_hand.pt"), change)


def symbols(language_tokens):
    text = [word for language in LANGUAGES for word in words_of(language)]
    return [None] * 4 + text + [None] * language_tokens


def read(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def analyze(data: Path, checkpoint: Path, output: Path) -> None:
    """``smoe analyze`` but for its pictures, which take seconds: for tests of the numbers."""
    from smoe_fairseq.cli import main

    words = ("analyze", data, "--path", checkpoint, "--output", output, "--cpu")
    with mock.patch("smoe_fairseq.analysis.report.draw", return_value=[]) as draw:
        assert main([str(word) for word in words]) == 0
    draw.assert_called_once()


def one_direction(data: Path, checkpoint: Path) -> list[str]:
    """The arguments of ``smoe`` that analyze one direction of the corpus."""
    return ["analyze", str(data), "--path", str(checkpoint), "--cpu", "--lang-pairs", "aa-bb"]
