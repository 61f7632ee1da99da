"""Patches of fairseq's data sets and of the processes that load them."""

import functools
import inspect
import logging
import os
import re
import weakref
from contextlib import suppress
from glob import escape, glob
from types import ModuleType, SimpleNamespace

from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.files import check_plain

from .patches import is_fairseq_command
from .replacing import patches

logger = logging.getLogger(__name__)

# Refuses kinds of data sets whose code fails, or runs a shell.
#
# For fairseq 0.12.2 on any Python. Training reads past the cache of the older formats (``lazy``,
# ``cached``), and ``fasta`` inserts the file's name, which may come from a checkpoint, into a shell command.


@patches("fairseq.data.indexed_dataset")
@patches("fairseq.data.fasta_dataset")
def refuse_kinds(module: ModuleType) -> None:
    for name in ("IndexedDataset", "IndexedDatasetBuilder", "FastaDataset"):
        if hasattr(module, name):
            getattr(module, name).__new__ = staticmethod(_make)


def _make(cls: type, path: str = "", *_, **__):
    """Refuses the older formats only in fairseq's commands: other programs may use these classes."""
    if "Fasta" in cls.__name__ or is_fairseq_command():
        raise UsageError(f"{path}: cut off, or --dataset-impl lazy, cached or fasta; expected mmap")
    return object.__new__(cls)


# Joins the bytes of sentencepiece's byte fallback to characters.
#
# For fairseq 0.12.2 on any Python, which leaves ``<0xE2> <0x82> <0xAC>`` in its output. Only whole pieces
# are bytes: if a text contains these characters, they are parts of other pieces.

_BLANK = "\u2581"  # as pieces have it
_BYTES = re.compile(r"(?:(?<!\S)<0x[0-9A-F]{2}>(?:\s+|$))+")


def join_bytes(pieces: str) -> str:
    """The pieces, separated by blanks, with each run of bytes as one piece.

    An end of a line becomes a blank, since a translation is one line.
    """
    if "<0x" not in pieces:
        return pieces

    def characters(run: re.Match) -> str:
        codes = (int(piece[3:5], 16) for piece in run[0].split())
        text = bytes(codes).decode("utf-8", "replace")
        return re.sub("[ \r\n]", _BLANK, text) + " "

    return _BYTES.sub(characters, pieces)


@patches("fairseq.data.data_utils:post_process")
def join_bytes_of_output(original, sentence, symbol):
    return original(join_bytes(sentence) if symbol == "sentencepiece" else sentence, symbol)


@patches("fairseq.data.encoders.sentencepiece_bpe:SentencepieceBPE.decode")
def join_bytes_of_pieces(original, encoder, pieces):
    return original(encoder, join_bytes(pieces))


# Names the dictionary or data file that cannot be used, and refuses pipes and devices.
#
# For fairseq 0.12.2 on any Python. Its messages about a dictionary's lines do not name the dictionary; it
# waits for ever for a pipe's writer; and its ``__del__`` fails for data files that were never opened.


@patches("fairseq.data.indexed_dataset:MMapIndexedDataset._do_init")
def name_data_file(original, data, path):
    with naming_file(f"{path}.idx", f"it or {os.path.basename(path)}.bin"):
        original(data, path)
        starts, sizes = data._index._pointers[-1:], data._index._sizes[-1:]
        ends = starts + sizes.astype("int64") * data._index._dtype_size
        if os.path.getsize(f"{path}.bin") < max(ends, default=0):
            raise ValueError("cut off")


@patches("fairseq.data.indexed_dataset:MMapIndexedDataset.__del__")
def close_what_was_opened(original, data):
    with suppress(AttributeError):
        original(data)


@patches("fairseq.data.indexed_dataset:index_file_path")
@patches("fairseq.data.indexed_dataset:data_file_path")
def read_plain_data(original, prefix_path):
    check_plain(path := original(prefix_path))
    return path


def _refuse_folder_above(folder: str) -> None:
    """Raise UsageError for a data set's folder in place of its ``bin``, which has the binarised data."""
    inside = os.path.join(folder, "bin")
    if glob(f"{escape(inside)}/dict.*.txt") and not glob(f"{escape(folder)}/dict.*.txt"):
        raise UsageError(f"{folder} has no dict.*.txt: expected the binarised data in {inside}")


@patches("fairseq.data.data_utils:infer_language_pair")
def infer_pair_of_binarised(original, path):
    _refuse_folder_above(path)
    return original(path)


@patches("fairseq.data.dictionary:Dictionary.load")
def name_dictionary(original, cls, f):
    if not isinstance(f, str):
        return original(cls, f)
    if not os.path.exists(f):
        _refuse_folder_above(os.path.dirname(f))
    check_plain(f)
    with naming_file(f, "it"):
        try:
            loaded = original(cls, f)
        except RuntimeError as error:  # a duplicate word
            raise ValueError(str(error)) from None
        if "".join(loaded.symbols[loaded.nspecial :][:1]).startswith("\ufeff"):
            raise ValueError("begins with a byte order mark")
        return loaded


@patches(
    "fairseq.data.multilingual.multilingual_data_manager:"
    "MultilingualDatasetManager.get_sampling_ratios"
)
def name_weights(original, manager, parameters, datasets, *others, **options):
    given = manager.args.sampling_weights or manager.args.sampling_weights_from_file
    try:
        return original(manager, parameters, datasets, *others, **options)
    except KeyError as error:
        if not given:
            raise
        expected = ", ".join(key for key, _ in datasets)
        raise UsageError(f"--sampling-weights lacks {error}: expected {expected}") from None


@patches("fairseq.file_chunker_utils:find_offsets")
def name_workers(original, filename, num_chunks):
    if num_chunks < 1:
        raise UsageError(f"--workers {num_chunks}: expected a number of at least 1")
    return original(filename, num_chunks)


# Takes a path with a colon as one path if it exists.
#
# For fairseq 0.12.2 on any Python, which would read the parts around the colon as several paths.


@patches("fairseq.utils:split_paths")
def keep_existing_path(original, paths, *separator):
    return [paths] if os.path.exists(paths) else original(paths, *separator)


# Gives fairseq's modules what newer libraries lack.
#
# For fairseq 0.12.2 and bitarray 3, whose ``util.rindex`` is a method now (``--dataset-impl huffman``),
# numpy 2, which has no ``np.compat.long`` (language models with ``--sample-break-mode eos``) and another name
# for a percentile's ``interpolation`` (both: ``--num-batch-buckets``), and sacreBLEU 2, which takes lists but
# not open files (``fairseq-score --sacrebleu``).


@patches("fairseq.data.huffman.huffman_coder")
def find_last_bit(huffman_coder: ModuleType) -> None:
    if not hasattr(huffman_coder.util, "rindex"):
        find = huffman_coder.bitarray.find
        huffman_coder.util = SimpleNamespace(rindex=functools.partial(find, right=True))


@patches("fairseq.data.language_pair_dataset")
@patches("fairseq.data.token_block_dataset")
def keep_long(module: ModuleType) -> None:
    if not hasattr(numpy := module.np, "compat"):
        module.np = ModuleType("numpy")
        # numpy loads some of its parts when they are asked for.
        module.np.__getattr__ = functools.partial(getattr, numpy)
        module.np.compat = SimpleNamespace(long=int)


@patches("fairseq.data.data_utils:get_buckets")
def take_lower_percentiles(original, sizes, count: int):
    import numpy

    percents = numpy.linspace(0, 100, count + 1)[1:]
    return numpy.unique(numpy.percentile(sizes, percents, method="lower"))


@patches("sacrebleu:corpus_bleu")
def read_open_files(original, hypotheses, references, *arguments, **options):
    hypotheses, *references = _lines_of(hypotheses, *references)
    return original(hypotheses, references, *arguments, **options)


# Lets ``fairseq-score --sentence-bleu`` make a scorer: for fairseq 0.12.2, which passes numbers for a config.


@patches("fairseq.scoring.bleu:Scorer.__init__")
def take_numbers(original, scorer, *config):
    numbers = SimpleNamespace(**dict(zip(("pad", "eos", "unk"), config)))
    original(scorer, numbers if len(config) == 3 else config[0])


# Scores all of a text or none of it.
#
# For fairseq 0.12.2 on any Python. ``fairseq-score`` leaves out lines that only one file has, and
# ``fairseq-eval-lm`` blocks that are too long for the model; they print the score of the rest.


@patches("fairseq_cli.score")
def pair_all_lines(score: ModuleType) -> None:
    score.zip = lambda *texts: zip(*_lines_of(*texts))


def _lines_of(*texts) -> list[list[str]]:
    texts = [list(text) for text in texts]
    if is_fairseq_command() and len({len(text) for text in texts}) > 1:
        lines = " and ".join(f"{len(text):,}" for text in texts)
        raise UsageError(f"--sys and --ref have {lines} lines: expected as many in both")
    return texts


@patches("fairseq.tasks.language_modeling:LanguageModelingTask.eval_lm_dataloader")
def check_block_size(original, task, dataset, *arguments, **options):
    window, most = options.get("context_window", 0), options.get("max_positions")
    too_long = most and max(dataset.sizes, default=0) + window > most
    if too_long and task.args.sample_break_mode in (None, "none"):
        size = task.args.tokens_per_sample + window
        message = f"--tokens-per-sample {size}: expected at most {most}, the model's limit"
        if is_fairseq_command():
            raise UsageError(message)
        logger.warning("%s; longer blocks are not scored", message)
    return original(task, dataset, *arguments, **options)


# Resumes exactly with ``--virtual-epoch-size``.
#
# For fairseq 0.12.2 on any Python. A pass over the data takes several virtual epochs, and the first one's
# number is the seed of its order; but a run that resumes within a pass takes that of the resumed epoch.


@patches(
    "fairseq.data.multilingual.sampled_multi_epoch_dataset:SampledMultiEpochDataset._next_virtual_epoch"
)
def draw_by_first_epoch(original, data, epoch):
    first = epoch - (epoch - 1) % data.num_virtual_epochs
    if data._random_global_indices is None and first < epoch:
        original(data, first)
    original(data, epoch)


# Ends data-loading processes together with their iterator.
#
# For fairseq 0.12.2 on any torch. `EpochBatchIterator` refers to the sampler of its batches, and that, by a
# bound method, to the iterator. So an unused iterator and its processes live until the garbage collector
# runs, after each validation and direction; then torch waits five seconds before it kills them. With a weak
# reference they end within milliseconds. Only the iterator calls the method, so it is alive.


@patches("fairseq.data.iterators:FrozenBatchSampler.__init__")
def end_loading_processes(original, sampler, ordered_batches, *arguments, **options):
    if inspect.ismethod(ordered_batches):
        method = weakref.WeakMethod(ordered_batches)
        ordered_batches = lambda *arguments: method()(*arguments)  # noqa: E731
    original(sampler, ordered_batches, *arguments, **options)
