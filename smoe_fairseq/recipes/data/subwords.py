"""Learn a sentencepiece model from text, and encode text; also ``smoe subwords``."""

import io
import itertools
import re
import shlex
import tempfile
import unicodedata
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import regex
import sentencepiece

from smoe_fairseq.ending import ended_by_signals
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import refuse_existing, whole_files, whole_folder, write_whole
from smoe_fairseq.flags import positive
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.recipes.commands import NORMALIZATIONS, add_subword_options
from smoe_fairseq.recipes.data import readers
from smoe_fairseq.recipes.data.compression import COMPRESSED
from smoe_fairseq.recipes.data.normalization import nfc_rules
from smoe_fairseq.recipes.data.raw import text_files
from smoe_fairseq.recipes.data.text_files import Chunk, count_lines, map_chunks
from smoe_fairseq.recipes.folders import final, print_written, shard_names
from smoe_fairseq.recipes.processes import warn
from smoe_fairseq.recipes.program_flags import arguments
from smoe_fairseq.subwords import composer, read_subwords

_LONGEST = 4192  # bytes of a line; sentencepiece leaves out longer ones
_SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq adds to every dictionary
# Measured bytes of memory per byte of training text (docs/reproduce.md).
_BYTES_PER_BYTE = {"unigram": 21, "bpe": 6}
_LEARN = "learn a sentencepiece model: DIR/spm.model, and DIR/dict.txt for fairseq-preprocess"
# A line in a file of rules for sentencepiece.
_RULE = re.compile(r"[0-9A-Fa-f]+( [0-9A-Fa-f]+)*\t([0-9A-Fa-f]+ ?)*(\t.*)?")
_ENCODE = "split text into subwords; for each TEXT, writes a file of the same name to DIR"


def add_subwords_arguments(parser: ArgumentParser) -> None:
    """Add the actions ``learn`` and ``encode``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    learn = actions.add_parser("learn", help=_LEARN, description=_LEARN)
    add_subword_options(learn, vocab_size=8000)
    encode = actions.add_parser("encode", help=_ENCODE, description=_ENCODE)
    encode.add_argument("model", metavar="MODEL", type=Path, help="spm.model, written by learn")
    encode.add_argument("--workers", type=positive, default=1, metavar="N", help="processes (1)")
    for action in (learn, encode):
        one = {"metavar": "DIR", "type": Path, "required": True, "help": "a new folder"}
        many = {"metavar": "TEXT", "type": Path, "nargs": "+", "help": "a sentence per line"}
        action.add_argument("text", **many)
        action.add_argument("--output", **one)


def run_subwords(args: Namespace) -> None:
    """Raises UsageError if the text or the model cannot be read, or the output exists."""
    for file in args.text:
        if not file.is_file():
            raise UsageError(f"{file} is not a file: expected text, a sentence per line")
    if args.action == "learn":
        others = ("command", "run", "action", "text", "output")
        options = {name: value for name, value in vars(args).items() if name not in others}
        for name in ("spm.model", "dict.txt"):
            refuse_existing(args.output / name, f"--output: {args.output / name}")
        learn_from(args.text, args.output, **options)
        return
    names = [f.stem if f.suffix in COMPRESSED else f.name for f in args.text]
    if twice := sorted(name for name in names if names.count(name) > 1):
        raise UsageError(f"two files are called {twice[0]}: encode them to folders of their own")
    model = read_subwords(args.model)
    with whole_folder(args.output) as folder, tempfile.TemporaryDirectory() as plain:
        files = [_plain(file, Path(plain)) for file in args.text]
        lines = encode_files(model, files, [folder], workers=args.workers)
    print(f"{args.output}: {len(args.text)} files, {lines:,} lines", flush=True)


def _plain(file: Path, folder: Path) -> Path:
    """The file, or a decompressed copy in ``folder`` if it is compressed."""
    if file.suffix not in COMPRESSED:
        return file
    copy = folder / file.stem
    with open(copy, "w", encoding="utf-8") as output:
        output.writelines(f"{line}\n" for line in readers.lines(file))
    return copy


def learn(raw: Path, output: Path, pairs: str = "", **options) -> None:
    """Train a model on the files ``train.*`` of ``raw``; see `learn_from` and `text_files`."""
    files = text_files(raw, pairs, "train.*")
    if not files:
        raise UsageError(f"{raw} has no training text (train.eng-xxx.eng and so on)")
    learn_from(files, output, **options)


def learn_from(
    files: list[Path],
    output: Path,
    normalization: str = "nfc",
    user_defined_symbols: Sequence[str] = (),
    **options,
) -> None:
    """Train a model on files of text; writes ``output/spm.model`` and ``output/dict.txt``.

    If the text is too small for the vocabulary size, the vocabulary is smaller. Files may be compressed.
    ``normalization`` is ``nfc`` (see `normalization`; symbols are composed, too), ``nfkc`` (sentencepiece's
    ``nmt_nfkc``), ``identity``, or a file of sentencepiece's rules. ``options`` are others of sentencepiece.

    Raises:
        UsageError: sentencepiece cannot learn from the text, or needs too much memory.
    """
    raw = files[0] if len(files) == 1 else files[0].parent
    symbols = list(user_defined_symbols)
    if normalization == "nfc":
        symbols = [*dict.fromkeys(unicodedata.normalize("NFC", symbol) for symbol in symbols)]
    _check_memory(raw, files, options)
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, ended_by_signals():
        rules = _rules(normalization, Path(folder), output)
        whole = (line for file in files for line in readers.lines(file))
        lines = (part for line in whole for part in _divided(line))
        if (first := next(filter(str.strip, lines), None)) is None:
            raise UsageError(f"{raw} has no text to learn from")
        sentencepiece.set_random_generator_seed(1)  # for the draw of --input-sentence-size
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=itertools.chain([first], lines),
                model_writer=model,
                hard_vocab_limit=False,
                minloglevel=1,
                user_defined_symbols=symbols,
                **rules,
                **options,
            )
        except (RuntimeError, ValueError, OverflowError) as error:
            options |= {"user_defined_symbols": symbols or None}
            raise _cannot_learn(raw, options, str(error)) from None
    # The model notes the path of its rules: the same text gives the same file.
    proto = model.getvalue().replace(folder.encode(), b"-" * len(folder.encode()))
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    # fairseq's format is a piece and its count per line; it uses the counts only for sorting.
    dictionary = "".join(f"{piece} 1\n" for piece in pieces[_SPECIAL_PIECES:])
    written = [output / "dict.txt", output / "spm.model"]
    with whole_files(written, parents=True) as (words, pieces_file):
        Path(words).write_text(dictionary, "utf-8")
        Path(pieces_file).write_bytes(proto)
    if len(pieces) < (size := options.get("vocab_size", 0)):
        warn(f"{len(pieces):,} pieces in place of {size:,}: the text has no more")
    done = f"{final(output / 'spm.model')}: {len(pieces):,} pieces from {len(files)} files"
    print(done, flush=True)


def _rules(normalization: str, folder: Path, output: Path) -> dict[str, str | None]:
    """sentencepiece's option for the rules; those of ``nfc`` are written to ``folder``."""
    if normalization == "nfc":
        write_whole(folder / "nfc.tsv", nfc_rules(), str(output / "dict.txt"))
        return {"normalization_rule_tsv": f"{folder}/nfc.tsv"}
    if normalization in NORMALIZATIONS:
        return {"normalization_rule_name": NORMALIZATIONS[normalization]}
    for number, line in enumerate(readers.lines(Path(normalization)), 1):
        if not _RULE.fullmatch(line):
            expected = "expected numbers of letters, a tab and others, such as 41 30A<tab>C5"
            raise UsageError(f"--normalization {normalization}, line {number}: {expected}")
    return {"normalization_rule_tsv": normalization}


def _cannot_learn(raw: Path, options: Mapping, error: str) -> UsageError:
    """The error of sentencepiece in one sentence."""
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", error):
        size = f"--vocab-size {options['vocab_size']}"
        bytes_ = " (256 of them for bytes, by byte-fallback)" * bool(options.get("byte_fallback"))
        return UsageError(f"{size}: {raw} needs at least {least[1]} subwords{bytes_}")
    flags = arguments({name.replace("_", "-"): value for name, value in options.items()})
    reason = re.sub(r"\w+: (src/\S+ \[.*?\] )?", "", error, count=1)  # its source line
    failed = f"sentencepiece cannot learn from {raw} with {shlex.join(flags)}"
    return UsageError(f"{failed}: {reason or error}")


def _divided(line: str) -> Iterator[str]:
    """The line in parts that sentencepiece does not leave out, divided at blanks or else between letters."""
    part, size = "", 0
    for letter in [line] if len(line) * 4 <= _LONGEST else regex.findall(r"\X", line):
        size += len(letter.encode())
        if size > _LONGEST:
            cut = part.rfind(" ") + 1 or len(part)
            yield part[:cut]
            part = part[cut:]
            size = len((part + letter).encode())
        part += letter
    yield part


def _check_memory(raw: Path, files: list[Path], options: dict) -> None:
    """Raise UsageError if learning would run out of memory, perhaps after an hour."""
    memory = machine_memory()
    size = sum(file.stat().st_size for file in files)
    needed = _BYTES_PER_BYTE[options.get("model_type", "unigram")]
    if memory is None or needed * size <= memory:
        return
    lines = sum(count_lines(file) for file in files)
    drawn = min(lines, options.get("input_sentence_size") or lines)
    if (whole := needed * size * drawn // max(1, lines)) > memory:
        fitting = float(f"{0.8 * drawn * memory / whole:.2g}")
        sizes = f"{whole / 1e9:.1f} GB of memory, and there are {memory / 1e9:.1f} GB"
        takes = f"learning subwords from {drawn:,} lines of {raw} takes about {sizes}"
        raise UsageError(f"{takes}: draw fewer with --input-sentence-size {fitting:.0f}")


def encode(
    model: Path,
    raw: Path,
    output: Path,
    pairs: str = "",
    shards: int = 1,
    longest: int = 0,
    workers: int = 1,
) -> None:
    """Write the `text_files` to ``output`` as pieces; the result does not depend on ``workers``.

    Files that an interrupted call has written are kept.
    With several ``shards``, line ``n`` of a training file goes to ``output/shardI`` with ``I = n % shards``,
    and other splits go to the first shard. In the other splits, lines are cut off after ``longest`` pieces
    (0: never), with a warning.
    """
    loaded = read_subwords(model)
    files = text_files(raw, pairs)
    for file in filter(_is_training, files):
        with open(file, "rb") as lines:
            if sum(1 for _ in itertools.islice(lines, shards)) < shards:
                raise UsageError(f"`shards: {shards}`: expected as many lines in {file} or more")
    folders = [output / name for name in shard_names(shards)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    left = [file for file in files if not (folders[0] / file.name).exists()]
    lines = encode_files(loaded, left, folders, longest, workers)
    print_written(output, len(files), len(left), f"{lines:,} lines")


def _encoded(
    model: sentencepiece.SentencePieceProcessor, shards: int, longest: int, chunk: Chunk
) -> tuple[list[bytes], int, int]:
    """A chunk's encoded lines by shard, the number of lines cut off, and the number of lines.

    The shards are relative: the chunk's first line is always in the first one.
    """
    shards, longest = (shards, 0) if _is_training(chunk.file) else (1, longest)
    texts = [*map(composer(model), chunk.lines())]
    encoded = model.encode(texts, out_type=str, num_threads=1)
    cut = sum(1 for pieces in encoded if len(pieces) > longest) if longest else 0
    lines = [" ".join(pieces[: longest or None]) + "\n" for pieces in encoded]
    return ["".join(lines[i::shards]).encode() for i in range(shards)], cut, len(lines)


def _is_training(file: Path) -> bool:
    return file.name.startswith("train.")


def encode_files(
    model: sentencepiece.SentencePieceProcessor,
    files: list[Path],
    folders: list[Path],
    longest: int = 0,
    workers: int = 1,
) -> int:
    """Write files of the same names to ``folders``, one per shard; returns the number of lines."""
    encoded, total = partial(_encoded, model, len(folders), longest), 0
    with map_chunks("encode", encoded, files, workers) as by_file:
        for file, results in by_file:
            line = cuts = 0
            # The first shard last, by which a file counts as written.
            used = folders if _is_training(file) else folders[:1]
            shards = [folder / file.name for folder in used]
            with whole_files(shards[::-1]) as partials, ExitStack() as opened:
                outputs = [opened.enter_context(open(path, "wb")) for path in partials[::-1]]
                for texts, cut, lines in results:
                    for i, text in enumerate(texts):
                        outputs[(line + i) % len(outputs)].write(text)
                    line, cuts = line + lines, cuts + cut
            if cuts:
                warn(f"{cuts} lines of {file} have more than {longest} pieces and are cut off")
            total += line
    return total
