"""The table at the end of preparation: problems of each pair's text, and the settings that solve them."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import read_json
from smoe_fairseq.languages import words_in
from smoe_fairseq.recipes.compare.grid import Grid, plain
from smoe_fairseq.recipes.data import raw, readers
from smoe_fairseq.recipes.data.binarise import UNKNOWN, read_index, token_dtype
from smoe_fairseq.recipes.data.faults import MAX_RATIO, MAX_WORDS, SIDES, Faults
from smoe_fairseq.recipes.data.normalization import unquoted
from smoe_fairseq.recipes.data.text_files import parallel_map
from smoe_fairseq.recipes.datasets import Dataset, both_orders
from smoe_fairseq.recipes.evaluation.metrics import tokenizer_of
from smoe_fairseq.recipes.folders import LEFT_OUT, Folders, shard_folders
from smoe_fairseq.recipes.pretrained import source_of
from smoe_fairseq.recipes.processes import warn
from smoe_fairseq.recipes.program_flags import FAIRSEQ_POSITIONS, value_of
from smoe_fairseq.subwords import read_subwords

REACHABLE = 99.9  # chrF++ below which subwords change too much
TESTS = "tests in training: source / target / pair / other pairs"
_SHOWN = 20  # faults that are printed
_POSITIONS = ("max-source-positions", "max-target-positions")
_LEGEND = """
read, kept: pairs of the training text, before and after cleaning. Pairs that were dropped, or kept with a
fault: empty: a side is empty; repeated: an earlier pair is the same; equal: both sides are the same;
overlap: a side is also in the test set or, with clean.overlap, in the validation set; over 1:{ratio:g}: one
side has more than {ratio:g} times the words of the other; too long: dropped by clean.max-words, or longer
than the model allows, so that a direction skips them. Tests in training: distinct test sentences that are
also in the kept text; unknown: tokens in it without a subword; best BLEU, best chrF++: the highest scores
that are possible with these subwords"""


@dataclass
class Row:
    """The numbers of one pair; `counts` are of training text unless their names say otherwise."""

    pair: str
    counts: Counter
    leaked: dict[str, int] = field(default_factory=dict)  # test sentences in training, by side
    seen: set[tuple[str, str]] = field(default_factory=set)  # (language, sentence) of other tests
    bleu: float | None = None  # the maximum for the worse side; None without a test set
    chrf: float | None = None


def print_checks(dataset: Dataset, binary: Path, workers: int = 1) -> None:
    """Print a row for each pair of the text that was binarised in ``binary``, and advice on each problem."""
    folders = Folders(dataset)
    files = (file for pair in dataset.pairs for file in folders.texts("train", pair).values())
    size = sum(file.stat().st_size for file in files)
    tests = {pair: _tests(folders, pair) for pair in dataset.all_pairs}
    row_of = functools.partial(_row, dataset, folders, binary, tests)
    with parallel_map(row_of, workers, size) as apply:
        rows = list(apply(dataset.all_pairs))
    for row in rows:
        seen = set().union(*(other.seen for other in rows if other is not row))
        row.leaked["other pairs"] = len(seen & tests[row.pair])
    print(_table(rows, dataset.clean.get("max-ratio") or MAX_RATIO), flush=True)
    if source_of(dataset):
        print(_by_language(dataset, rows), flush=True)
    found = [(row.pair, *each) for row in rows for each in _advice(row, dataset)]
    settings: dict[str, dict] = {}
    for _, _, advised in found:
        for key, values in advised.items():
            block = settings.setdefault(key, dict(getattr(dataset, key)))
            # What drops the sentences of all pairs drops those of one.
            block.update((k, v) for k, v in values.items() if block.get(k) != "drop-all")
    lines = [f"{pair}: {problem}" for pair, problem, _ in found]
    if (more := len(lines) - _SHOWN) > 0:
        lines[_SHOWN:] = [f"and {more} more; the table has all pairs"]
    message = "\n    ".join(["the text has faults:", *lines])
    if settings:  # as lines that can be pasted
        in_the_way = "clean" in settings and not dataset.settings.raw
        text = raw.put_away(folders.raw) if in_the_way else ""
        advice = f"delete {folders.binary}{text} and prepare again"
        message += f"\nTo mend them, set in {dataset.file}, {advice}:\n"
        message += yaml.safe_dump(settings, default_flow_style=None, sort_keys=False, width=1000)
    if lines:
        warn(message.rstrip())


def _tests(folders: Folders, pair: str) -> set[tuple[str, str]]:
    """(language, sentence) of a pair's test set; empty without one."""
    files = folders.texts("test", pair)
    if not all(file.exists() for file in files.values()):
        return set()
    return {(lang, line) for lang in files for line in readers.lines(files[lang]) if line}


def _row(dataset: Dataset, folders: Folders, binary: Path, tests_of: dict, pair: str) -> Row:
    """``pair`` may also be one that is only scored."""
    languages, is_trained = pair.split("-"), pair in dataset.pairs
    training, testing = (folders.texts(split, pair) for split in ("train", "test"))
    tested = all(file.exists() for file in testing.values())
    tests = list(readers.pairs(testing)) if tested else []
    faults, row = Faults(tests), Row(pair, _left_out(folders.raw.with_name(LEFT_OUT), pair))
    counts = row.counts
    counts["kept"] = 0  # counted below, since the text may have been edited
    others = set().union(*(tests_of[other] for other in tests_of if other != pair))
    for source, target in readers.pairs(training) if is_trained else ():
        counts["kept"] += 1
        bare = {side: unquoted(side) for side in (source, target)}
        counts["quoted"] += any(side != text for side, text in bare.items())
        counts["doubled"] += any(side != text and '"' in text for side, text in bare.items())
        row.seen |= others & {(languages[0], source), (languages[1], target)}
        counts.update(faults.of(source, target))
        for language, line in zip(languages, (source, target)):
            counts["words", language] += words_in(line)
    counts.setdefault("read", counts["kept"])
    counts["marked tests"] = sum("\u2581" in source + target for source, target in tests)
    validation = set(readers.pairs(folders.texts("valid", pair))) if is_trained else set()
    counts["tests"], counts["validated tests"] = len(tests), sum(x in validation for x in tests)
    counts["empty tests"] = sum(not (source and target) for source, target in tests)
    row.leaked = {side: len(texts) for side, texts in faults.leaked.items()}
    dropped = counts["max-words"] if dataset.clean.get("max-words") else 0
    counts.update(_binarised(dataset, binary, pair) if is_trained else {})
    counts["long"] = dropped + counts["too long"]
    model = read_subwords(binary / "spm.model")
    for language, text in zip(languages, zip(*tests)):
        bleu, chrf = reachable(model, [*text], tokenizer_of(dataset.sacrebleu, language))
        if row.chrf is None or chrf < row.chrf:
            row.bleu, row.chrf = bleu, chrf
    return row


def _left_out(file: Path, pair: str) -> Counter:
    with suppress(UsageError, KeyError):  # the text came from elsewhere, or from an earlier version
        return Counter(read_json(file, {str: {str: int}})[pair])
    return Counter()


def _binarised(dataset: Dataset, binary: Path, pair: str) -> Counter:
    """Counts of training pairs longer than the model's positions, and of (unknown) subwords by language."""
    limits = [int(value_of(dataset.train, name, FAIRSEQ_POSITIONS)) for name in _POSITIONS]
    if not dataset.task.get("lang-tok-replacing-bos-eos"):
        for i, name in enumerate(("encoder-langtok", "decoder-langtok")):
            limits[i] -= bool(dataset.task.get(name))
    counts, directions = Counter(), {*both_orders(pair)} & {*dataset.directions}
    for folder in shard_folders(binary):
        lengths = {}
        for language in pair.split("-"):
            name = folder / f"train.{pair}.{language}"
            lengths[language] = read_index(Path(f"{name}.idx"))
            content = np.fromfile(f"{name}.bin", dtype=token_dtype(Path(f"{name}.idx")))
            counts["subwords", language] += len(content) - len(lengths[language])  # without ends
            counts["unknown", language] += int((content == UNKNOWN).sum())
        skipped = [
            lengths[language] > limit
            for direction in directions
            for language, limit in zip(direction.split("-"), limits, strict=True)
        ]
        counts["too long"] += int(np.logical_or.reduce(skipped).sum())
    counts["unknown"] = sum(counts["unknown", language] for language in pair.split("-"))
    return counts


def reachable(model, lines: list[str], tokenizer: str) -> tuple[float, float]:
    """BLEU and chrF++ of text after encoding and decoding: the maximum for any translation."""
    from sacrebleu.metrics import BLEU, CHRF

    back = model.decode(model.encode(lines))
    lines = [" ".join(line.split()) for line in lines]
    if back == lines:
        return 100.0, 100.0
    bleu = BLEU(tokenize="char")
    if not tokenizer.startswith(("flores", "spm")):  # sacreBLEU would download their models
        with suppress(ImportError, RuntimeError):  # not installed, which `evaluate` reports
            bleu = BLEU(tokenize=tokenizer)
    metrics = bleu, CHRF(word_order=2)
    return tuple(metric.corpus_score(back, [lines]).score for metric in metrics)


def _table(rows: list[Row], ratio: float) -> str:
    """The table, and what its columns mean; ``ratio``: of words, above which pairs are counted."""
    header = ["pair", "read", "kept", "empty", "repeated", "equal", "overlap"]
    header += [f"over 1:{ratio:g}", "too long", TESTS, "unknown", "best BLEU", "best chrF++"]
    body = []
    for row in rows:
        names = ("read", "kept", "empty", "repeated", "equal", "overlap", "max-ratio", "long")
        leaked = " / ".join(map(str, row.leaked.values()))
        scores = ["-" if x is None else f"{x:.1f}" for x in (row.bleu, row.chrf)]
        marked = "" if row.chrf is None or row.chrf >= REACHABLE else " (!)"
        leaked += " (!)" if any(row.leaked.values()) else ""
        numbers = [f"{row.counts[name]:,}" for name in names]
        unknown = f"{row.counts['unknown']:,}"
        body.append([row.pair, *numbers, leaked, unknown, scores[0], scores[1] + marked])
    return f"{plain(Grid(header, body))}\n{_LEGEND.format(ratio=ratio)}"


def _by_language(dataset: Dataset, rows: list[Row]) -> str:
    """How well a pretrained model's subwords fit each language."""
    body = []
    for language in dataset.languages:
        names = ("words", "subwords", "unknown")
        words, subwords, unknown = (sum(row.counts[n, language] for row in rows) for n in names)
        if not words:  # it is only scored
            continue
        per_word, per_thousand = subwords / max(1, words), 1000 * unknown / max(1, subwords)
        body.append([language, f"{words:,}", f"{per_word:.2f}", f"{per_thousand:.1f}"])
    header = ["language", "words", "subwords per word", "unknown per 1,000 subwords"]
    return plain(Grid(header, body))


def _advice(row: Row, dataset: Dataset) -> Iterator[tuple[str, dict[str, dict]]]:
    """The faults of a pair, each with the settings that solve it."""
    counts, kept, clean = row.counts, row.counts["kept"], dataset.clean
    names = zip(SIDES, ("sources", "targets", "pairs"), strict=True)
    is_whole = counts["overlap"] * 2 > kept  # the test set was taken from it
    alone = f"; {raw.give_alone(row.pair)}" * is_whole
    if sides := ", ".join(f"{row.leaked[x]:,} {name}" for x, name in names if row.leaked[x]):
        leaked = f"{sides} of the test set are in training pairs ({counts['overlap']:,})"
        settings = {} if is_whole else {"clean": {"overlap": "drop"}}
        yield f"{leaked}, so scores will be too good{alone}", settings
    if (dropped := counts["read"] - kept) > kept:
        yield f"{dropped:,} of {counts['read']:,} training pairs are dropped{alone}", {}
    if not is_whole and (elsewhere := row.leaked["other pairs"]):
        leaked = f"{elsewhere:,} sentences of the test set are in the training text of other pairs"
        yield f"{leaked}, so scores may be too good", {"clean": {"overlap": "drop-all"}}
    if (known := counts["validated tests"]) * 100 > counts["tests"]:
        chosen = "by which the checkpoint is chosen"
        yield f"{known:,} pairs of the test set are in the validation set, {chosen}", {}
    if empty := counts["empty tests"]:
        yield f"{empty:,} pairs of the test set have an empty side", {"clean": {"empty": "drop"}}
    for name, words in (("repeated", "are repeated"), ("equal", "are the same on both sides")):
        if counts[name] * 10 > kept and clean.get(name) != "drop":
            yield f"{counts[name]:,} training pairs {words}", {"clean": {name: "drop"}}
    # A sentence in quotation marks is ordinary, unless most are.
    quoted = counts["quoted"]
    if (counts["doubled"] or quoted * 2 > kept) and clean.get("quotes") != "strip":
        quotes = "have the quotes that a spreadsheet adds"
        yield f"{quoted:,} training pairs {quotes}", {"clean": {"quotes": "strip"}}
    if (number := counts["max-ratio"]) * 100 > kept and "max-ratio" not in clean:
        unlike = f"one side has more than {MAX_RATIO} times the words of the other"
        yield f"in {number:,} training pairs {unlike}", {"clean": {"max-ratio": MAX_RATIO}}
    if long := counts["too long"]:
        skipped = "a direction or both skip training pairs longer than the model's positions"
        usual = "max-words" not in clean and not dataset.train.keys() & {*_POSITIONS}
        limits = f"{'drop them, or ' * usual}set {' and '.join(_POSITIONS)} in `train`"
        yield (
            f"{skipped} ({long:,}); {limits}",
            {"clean": {"max-words": MAX_WORDS}} if usual else {},
        )
    if marked := counts["marked tests"]:
        marks = "have \u2581, a mark of subwords: give plain text"
        yield f"{marked:,} pairs of the test set {marks}", {}
    elif row.chrf is not None and row.chrf < REACHABLE:
        most = f"no translation can have a chrF++ above {row.chrf:.1f}"
        own = {} if source_of(dataset) else {"normalization": "nfc", "byte-fallback": True}
        yield f"subwords change the text: {most}", {"subwords": own} if own else {}
