"""``smoe translate``: text in, translations out."""

import hashlib
import json
import os
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO, TextIO

from fairseq.utils import split_paths
from tqdm import tqdm

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import whole_file
from smoe_fairseq.flags import at_least, decoded, filled, flag_of
from smoe_fairseq.host_memory import keep_freed_memory
from smoe_fairseq.journal import Journal
from smoe_fairseq.subwords import subwords_of
from smoe_fairseq.translate.directions import direction_of
from smoe_fairseq.translate.int8 import INT8_HELP
from smoe_fairseq.translate.load import Translator, checkpoint_of, files_of
from smoe_fairseq.translate.readout import Translation
from smoe_fairseq.translate.sentences import split_sentences
from smoe_fairseq.translate.text import MAX_TOKENS, BatchTranslator, Options, device_of


def text_lines(stream: BinaryIO, size: int, first: int = 1) -> list[str]:
    """The next ``size`` lines, or fewer at the end; without their ends (``\\n`` or ``\\r\\n``).

    Args:
        first: number of the first one.

    Raises:
        UsageError: a line is not UTF-8.
    """
    return [_decoded(line, number) for number, line in enumerate(islice(stream, size), first)]


def _decoded(line: bytes, number: int) -> str:
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors' first bytes
    except UnicodeDecodeError as error:
        raise UsageError(
            f"line {number} of standard input is not UTF-8, at position {error.start + 1}"
        ) from None


_LINE_ENDS = "[\x85\u2028\u2029]"  # of some programs, in addition to those that JSON escapes
CHUNK_LINES = 4000  # that are read at a time and sorted by length


def add_model_arguments(parser: ArgumentParser) -> None:
    """The flags of `load_model`."""
    parser.add_argument("--from", dest="source", metavar="LANG", help="language of the text")
    parser.add_argument(
        "--to",
        dest="target",
        metavar="LANG",
        help="language to translate to; --from and --to may be omitted if only one is possible",
    )
    words = "folder with dict.*.txt and spm.model; default: the run's"
    parser.add_argument("--data", metavar="DIR", help=words)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, cuda:1, ...")
    parser.add_argument("--int8", action="store_true", help=INT8_HELP)


def load_model(args: Namespace, max_tokens: int = MAX_TOKENS) -> BatchTranslator:
    """The model of a run, or of several, on its device."""
    device = device_of(args.device, args.int8)
    if device.type == "cpu":
        keep_freed_memory()
    with quietly():
        translator = Translator.of_run(
            args.path, data=args.data, source_lang=args.source, target_lang=args.target
        )
        return BatchTranslator(translator.to(device), max_tokens, args.int8)


def requested_direction(model: BatchTranslator, args: Namespace) -> tuple[str, str]:
    """The direction of ``--from`` and ``--to``; raises UsageError if it is unknown or ambiguous."""
    languages = {"--from": args.source, "--to": args.target}
    flags = " ".join(f"{flag} {lang}" for flag, lang in languages.items() if lang)
    flags = flags or "neither --from nor --to is given"
    return direction_of(model.translator.task_for(args.source, args.target, flags))


def _model_path(path: str) -> str:
    """The type of ``RUN``: neither empty nor a file of text."""
    file = Path(filled(path))
    if file.is_file() and file.stat().st_size and not _is_binary(path):
        raise ArgumentTypeError(f"{path} is text, which is read from standard input: < {path}")
    return path


def _is_binary(path: str) -> bool:
    """Whether a file is a checkpoint, an archive or a model of subwords."""
    with open(path, "rb") as file:
        return b"\0" in file.read(100)


def add_translate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="RUN",
        type=_model_path,
        nargs="+",
        help="folder of a run, or a checkpoint; the probabilities of several are averaged",
    )
    words = "file to write, instead of standard output"
    parser.add_argument("--output", metavar="FILE", help=words)
    parser.add_argument(
        "--line-by-line",
        action="store_true",
        help="translate each line before reading the next, for programs that wait; slower",
    )
    words = "start of every translation"
    parser.add_argument("--prefix", default="", metavar="TEXT", type=decoded, help=words)
    parser.add_argument("--json", action="store_true", help="print a JSON object per line")
    parser.add_argument(
        *("--nbest", "-n"),
        type=at_least(int, 1),
        metavar="N",
        help="print the N best translations of each line: its number, score and translation, with tabs",
    )
    for each in fields(Options):
        flag = each.metadata.get("flag", flag_of(each.name))
        words = each.metadata.get("words")
        if each.type is bool and words:
            parser.add_argument(flag, dest=each.name, action="store_true", help=words)
        elif words:
            kind, default = at_least(each.type, *each.metadata["limits"]), each.default
            words += f" (default: {default})" * (default != -1)
            parser.add_argument(flag, type=kind, default=default, metavar="X", help=words)
    words = f"source tokens per batch, padding included (default: {MAX_TOKENS})"
    kind = at_least(int, 1)
    parser.add_argument("--max-tokens", type=kind, default=MAX_TOKENS, metavar="N", help=words)
    add_model_arguments(parser)


def run_translate(args: Namespace) -> None:
    if sys.stdin is None:
        raise UsageError("standard input is closed: expected text, a line for each translation")
    names = {each.name for each in fields(Options)} & vars(args).keys()
    options = Options(
        **{name: getattr(args, name) for name in names if getattr(args, name) is not None},
        requested=args.json,
    )
    model = load_model(args, args.max_tokens)
    requested_direction(model, args)
    start, lines, kept = time.monotonic(), 0, 0
    size = 1 if args.line_by_line or sys.stdin.isatty() else CHUNK_LINES
    with _output(args, model, size) as (journal, file), tqdm(unit=" lines", disable=None) as bar:
        before = _chunks(journal or (), size)
        try:
            while texts := text_lines(sys.stdin.buffer, size, lines + 1):
                chunk = next(before, {})
                _check_texts(chunk, texts, lines + 1, args)
                kept += len(chunk)
                bar.update(len(chunk))
                _translate(model, texts, lines + 1, chunk, options, args, journal, bar)
                if file is not None:
                    _print(chunk, file)
                lines += len(texts)
        except SystemExit:  # a signal
            if journal is not None and journal.parts:
                done = f"{journal.parts} lines are done, in {journal.file}"
                print(f"ended: {done}; the same command continues", file=sys.stderr)
            raise
        _check_texts(next(before, {}), [], lines + 1, args)
    took = max(time.monotonic() - start, 1e-3)
    new = lines - kept
    speed = f"{new} line{'s' * (new != 1)} in {took:.1f} s ({new / took:.1f} per second)"
    print(f"{speed}; {kept} were done" if kept else speed, file=sys.stderr)


Chunk = dict[int, tuple[str, list[str]]]  # by index: a text and the lines to write for it


def _translate(
    model: BatchTranslator,
    texts: list[str],
    first: int,
    chunk: Chunk,
    options: Options,
    args: Namespace,
    journal: Journal | None,
    bar: tqdm,
) -> None:
    """Add to ``chunk`` what it lacks of ``texts``; ``first`` is the number of the first line."""
    long = []

    def finish(index: int, translation: Translation) -> None:
        number = first + index
        chunk[index] = texts[index], list(_output_lines(number, translation, args))
        if journal is not None:
            journal.append((number, *chunk[index]))
        sentences = len(split_sentences(texts[index])[0]) if options.by_sentence else 1
        if translation.parts > sentences:
            long.append((number, translation.parts))
        bar.update()

    with quietly():
        direction = args.source, args.target
        model.translate_batch(texts, *direction, options, finish, known=frozenset(chunk))
    for number, parts in sorted(long):
        with tqdm.external_write_mode(sys.stderr):
            message = f"line {number} is long: translated in {parts} parts"
            print(message, file=sys.stderr)


def _chunks(journal: Iterable, size: int) -> Iterator[Chunk]:
    """The parts of a journal in chunks of ``size`` lines, of which the last one may be incomplete."""
    for _, parts in groupby(journal, lambda part: (part[0] - 1) // size):
        yield {(number - 1) % size: (text, lines) for number, text, lines in parts}


def _check_texts(found: Chunk, texts: list[str], first: int, args: Namespace) -> None:
    """Raise UsageError if what was found is of other text; ``first`` is the number of the first line."""
    for index, (text, _) in sorted(found.items()):
        if texts[index : index + 1] != [text]:
            raise UsageError(
                f"line {first + index} of standard input is not the one that {_partial(args.output)} "
                "continues: delete that file to begin again"
            )


@contextmanager
def _output(
    args: Namespace, model: BatchTranslator, size: int
) -> Iterator[tuple[Journal | None, TextIO | None]]:
    """Yield a journal, of which the output is made at the end, or else a file to print to.

    ``size`` is that of the journal's chunks.
    """
    path = args.output
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8")  # like the input, whatever the terminal's encoding
        yield None, sys.stdout
        return
    if Path(path).is_dir():
        raise UsageError(f"--output {path}: it is a folder; expected a file's name")
    if Path(path).is_file() and _is_binary(path):  # by completion of a name: such as a checkpoint
        raise UsageError(f"--output {path} exists and is not text: choose another name")
    called = f"--output {path}"
    if Path(path).exists() and not Path(path).is_file():  # a pipe or a device
        with whole_file(path, called) as name, open(name, "w", encoding="utf-8") as file:
            yield None, file
        return
    others = ("run", "command", "output")
    flags = {name: value for name, value in vars(args).items() if name not in others}
    digests = [_digest(file) for file in _files(args, model)]
    with Journal(_partial(path), [digests, flags, size], called) as journal:
        yield journal, None
        with whole_file(path, called) as name, open(name, "w", encoding="utf-8") as file:
            for chunk in _chunks(journal, size):
                _print(chunk, file)
        journal.finish()


def _partial(output: str) -> Path:
    """The `Journal` of an output."""
    return Path(f"{os.path.realpath(output)}.partial")


def _print(chunk: Chunk, file: TextIO) -> None:
    for _, (_, lines) in sorted(chunk.items()):
        file.write("".join(f"{line}\n" for line in lines))
    file.flush()


def _files(args: Namespace, model: BatchTranslator) -> Iterator[Path]:
    """What translations depend on besides flags and text."""
    for run in args.path:
        yield from files_of(checkpoint_of(run))
    data = split_paths(model.translator.cfg.task.data)[0]
    yield from sorted(Path(data).glob("dict.*"))
    if (subwords := subwords_of(data)) is not None:
        yield subwords


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _output_lines(line: int, translation: Translation, args: Namespace) -> Iterator[str]:
    if args.json:
        text = json.dumps({"line": line, **asdict(translation)}, ensure_ascii=False)
        yield re.sub(_LINE_ENDS, lambda match: f"\\u{ord(match[0]):04x}", text)
    elif args.nbest is None:
        yield translation.hypotheses[0].text
    else:
        for hypothesis in translation.hypotheses:
            text = hypothesis.text.replace("\t", " ")  # between sentences
            yield f"{line}\t{hypothesis.score:.4f}\t{text}"
