"""``smoe shortlist``: the target tokens that a source text may need, from counts in the training data.

The output projection takes a large part of a decoding step. A translation uses few tokens of the vocabulary,
and nearly all of these co-occur with the source's tokens in the training data, or are frequent anyway.
The score of a source token s and a target token t is their Dice coefficient, ``2 c(s, t) / (c(s) + c(t))``,
with c the number of sentences (sentence pairs) that contain them.

Shapes: S source vocabulary, C candidates of each source token, N sentences.
"""

from argparse import ArgumentParser, Namespace
from itertools import permutations
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary, data_utils
from scipy import sparse

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import refuse_existing, whole_file
from smoe_fairseq.flags import at_least
from smoe_fairseq.translate.shortlist import digest

FILE = "shortlist.npz"
_CHUNK = 20_000  # sentences whose counts are multiplied at a time


def candidates(
    source: sparse.csr_matrix, target: sparse.csr_matrix, number: int, frequent: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best target tokens of each source token ``(S, C)``, padded with the end of sentence, and the most
    frequent target tokens.

    Args:
        source, target: ``(N, vocabulary)``, 1 for each token of a sentence.
    """
    pairs = sparse.csr_matrix((source.shape[1], target.shape[1]), dtype=np.int32)
    for start in range(0, source.shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        pairs = pairs + source[part].T @ target[part]
    pairs = sparse.csr_matrix(pairs)
    count_S, count_T = (np.asarray(x.sum(0)).ravel() for x in (source, target))
    width = min(number, target.shape[1])
    table_SC = np.full((source.shape[1], width), Dictionary().eos(), dtype=np.int32)
    for token in np.flatnonzero(np.diff(pairs.indptr)):
        row = slice(pairs.indptr[token], pairs.indptr[token + 1])
        others = pairs.indices[row]
        dice = 2 * pairs.data[row] / (count_S[token] + count_T[others])
        best = others[np.argsort(-dice, kind="stable")[:number]]
        table_SC[token, : len(best)] = best
    order = np.argsort(-count_T, kind="stable")[:frequent]
    return table_SC, order[count_T[order] > 0].astype(np.int32)


def _occurrences(files: list[Path], dictionary: Dictionary, lines: int) -> sparse.csr_matrix:
    """The tokens of each of the first sentences, ``(N, vocabulary)`` of ones; without special tokens."""
    rows = []
    for file in files:
        with quietly():
            data = data_utils.load_indexed_dataset(str(file.with_suffix("")), dictionary)
        rows += [np.unique(data[i].numpy()) for i in range(min(lines - len(rows), len(data)))]
    rows = [row[row >= dictionary.nspecial] for row in rows]
    ends = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([*rows, np.empty(0, dtype=np.int64)])
    ones = np.ones(len(ids), dtype=np.int32)
    return sparse.csr_matrix((ones, ids, ends), shape=(len(rows), len(dictionary)))


def add_shortlist_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of binarised training data")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"file (default: DATA/{FILE})")
    for flag, default, words in (
        ("--candidates", 50, "target tokens per source token"),
        ("--frequent", 200, "number of most frequent target tokens that every text may use"),
        ("--lines", 500_000, "maximum number of training sentences to count per pair"),
    ):
        kind, words = at_least(int, 1), f"{words} (default: {default})"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=words)


def run_shortlist(args: Namespace) -> None:
    if args.output is not None:
        refuse_existing(args.output, f"--output {args.output}")
    output = args.output or args.data / FILE
    texts: dict[str, list[str]] = {}  # the languages of each pair; their codes may have hyphens
    shards = sorted(filter(Path.is_dir, args.data.glob("shard*"))) or [args.data]
    for file in shards[0].glob("train.*-*.*.idx"):
        if len(parts := file.name.split(".")) == 4:
            texts.setdefault(parts[1], []).append(parts[2])
    if not texts:
        raise UsageError(
            f"{args.data} has no training data: expected train.SOURCE-TARGET.LANG.idx and .bin"
        )
    pairs = set()
    for name, languages in texts.items():
        orders = [pair for pair in permutations(languages) if "-".join(pair) == name]
        if not orders:
            raise UsageError(f"{args.data}/train.{name}.*.idx: expected both sides of the pair")
        pairs.update(orders)
    content: dict[str, object] = {"directions": []}
    dictionaries = {}
    for language in sorted({language for pair in pairs for language in pair}):
        file = shards[0] / f"dict.{language}.txt"
        if not file.is_file():
            raise UsageError(f"{file} is missing: expected the dictionary in the data folder")
        with quietly():
            dictionaries[language] = dictionary = Dictionary.load(str(file))
        content[f"{language} size"] = len(dictionary)
        content[f"{language} digest"] = digest(dictionary, len(dictionary))
    for pair in sorted(pairs):
        sides = {}
        for language in pair:
            files = [shard / f"train.{'-'.join(pair)}.{language}.idx" for shard in shards]
            files = [file for file in files if file.exists()]
            sides[language] = _occurrences(files, dictionaries[language], args.lines)
        counts = {side.shape[0] for side in sides.values()}
        if len(counts) > 1:
            raise UsageError(f"{args.data}: the sides of {'-'.join(pair)} have different lengths")
        # As in training, a direction uses the text of the opposite one only if it has none.
        for source, target in (pair, *({pair[::-1]} - pairs)):
            direction = f"{source}-{target}"
            content["directions"].append(direction)
            content[direction], content[f"{direction} frequent"] = candidates(
                sides[source], sides[target], args.candidates, args.frequent
            )
    with whole_file(output, f"--output {output}") as partial_file, open(partial_file, "wb") as file:
        np.savez_compressed(file, **content)
    print(f"{output}: {', '.join(content['directions'])}")
