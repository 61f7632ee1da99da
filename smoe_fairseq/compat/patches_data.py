"""Patches of fairseq's data sets and of the processes that load them."""

import functools
import inspect
import weakref
from contextlib import suppress
from types import ModuleType, SimpleNamespace

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain

from .patches import PATCHES, patches

__all__ = ["PATCHES", "patches"]  # those of commands, options and models, and these

# Lets data sets of the older format (``--dataset-impl lazy`` or ``cached``) train.
#
# For fairseq 0.12.2 on any Python. Training reads the first batch before the cache of such a data
# set has been filled, and the cache stops with a KeyError. Here it reads from the file what it
# lacks.


@patches("fairseq.data.indexed_dataset")
def read_past_cache(indexed_dataset: ModuleType) -> None:
    cached = indexed_dataset.IndexedCachedDataset
    from_cache = cached.__getitem__
    from_file = indexed_dataset.IndexedDataset.__getitem__

    def getitem(self, index):
        return (from_cache if index in self.cache_index else from_file)(self, index)

    cached.__getitem__ = getitem


# No second error where the files of a data set cannot be opened.
#
# For fairseq 0.12.2 on any Python. ``__del__`` closes files that were never opened, and Python prints
# a stack trace of that below the first error.


@patches("fairseq.data.indexed_dataset")
def put_away_half_made(indexed_dataset: ModuleType) -> None:
    original = indexed_dataset.MMapIndexedDataset.__del__

    def __del__(self):
        with suppress(AttributeError):
            original(self)

    indexed_dataset.MMapIndexedDataset.__del__ = __del__


# Refuses a pipe or a device in the place of a data file.
#
# For fairseq 0.12.2 on any Python. It opens whatever has the name, and waits for ever for a pipe's
# writer.


@patches("fairseq.data.indexed_dataset")
def open_plain_files(indexed_dataset: ModuleType) -> None:
    for name in ("index_file_path", "data_file_path"):
        setattr(indexed_dataset, name, _plain(getattr(indexed_dataset, name)))


def _plain(path_of):
    @functools.wraps(path_of)
    def plain_path_of(prefix_path):
        check_plain(path := path_of(prefix_path))
        return path

    return plain_path_of


# Lets fairseq use ``np.compat.long``, which numpy 2 no longer has, as ``int``.
#
# For fairseq 0.12.2 and numpy 2.0 and later. Language models with ``--sample-break-mode eos``, and
# their sampling and interactive use, end in an AttributeError. Only fairseq's module that divides
# text into samples sees the name again; numpy stays as it is for everybody else.


class _WithLong:
    """numpy, and what it had."""

    compat = SimpleNamespace(long=int)

    def __init__(self, numpy: ModuleType):
        self._numpy = numpy

    def __getattr__(self, name: str):
        return getattr(self._numpy, name)


@patches("fairseq.data.token_block_dataset")
def keep_long(module: ModuleType) -> None:
    if not hasattr(module.np, "compat"):
        module.np = _WithLong(module.np)


# Keeps the names of data files from being run by a shell.
#
# For fairseq 0.12.2 on any system. It indexes data sets of the kind ``fasta`` with a line of shell
# into which the file's name is pasted as it is. A checkpoint's config chooses kind and name (data
# folder and languages), so that a file named ``; rm -r x;.fasta`` beside a checkpoint would be
# enough. The same numbers, counted in Python: where each description starts, and how long the
# sequence below it is.


@patches("fairseq.data.fasta_dataset")
def index_without_shell(fasta_dataset: ModuleType) -> None:
    import numpy as np

    def _build_index(self, path: str):
        offsets, lengths, position = [], [], 0
        with open(fasta_dataset.fasta_file_path(path), "rb") as file:
            for line in file:
                if line.startswith(b">"):
                    offsets.append(position)
                    lengths.append(0)
                elif lengths:
                    lengths[-1] += len(line.strip())
                position += len(line)
        return np.array(offsets, dtype=np.int64), np.array(lengths, dtype=np.int64)

    fasta_dataset.FastaDataset._build_index = _build_index


# Names the data that a model of several languages lacks.
#
# For fairseq 0.12.2 on any Python, whose own answer to a mistyped ``--train-subset``, or to a language
# pair that is not in the folder, is ``KeyError: 'main:de-en'``.


@patches("fairseq.data.multilingual.multilingual_data_manager")
def name_missing_data(multilingual_data_manager: ModuleType) -> None:
    manager = multilingual_data_manager.MultilingualDatasetManager
    original = manager.get_split_data_param_list

    @functools.wraps(original)
    def get_split_data_param_list(self, split, *others, **options):
        try:
            return original(self, split, *others, **options)
        except KeyError as error:
            kind, _, pair = str(error.args[0]).rpartition(":")
            if not kind:
                raise
            raise UsageError(
                f"{self.args.data} has no data {split!r} of {pair}: expected files such as "
                f"{split}.{pair}.*.bin"
            ) from None

    manager.get_split_data_param_list = get_split_data_param_list


# Ends data-loading processes together with their iterator.
#
# For fairseq 0.12.2 on any torch. `EpochBatchIterator` refers to the sampler of its batches, and the
# sampler, by a bound method, to it. Because of this cycle, an unused iterator stays, with its
# processes, until the garbage collector runs; then Python closes their queues first, and torch waits
# five seconds before it kills them. Every validation leaves some behind, every translated direction,
# and with ``--task translation_multi_simple_epoch`` every epoch. With a weak reference they end within
# milliseconds. Only the iterator itself calls the method, so the reference is alive.


@patches("fairseq.data.iterators")
def end_loading_processes(iterators: ModuleType) -> None:
    """`FrozenBatchSampler` does not keep the iterator that has made it."""
    original = iterators.FrozenBatchSampler.__init__

    @functools.wraps(original)
    def __init__(self, ordered_batches, *arguments, **options):
        original(self, _weak(ordered_batches), *arguments, **options)

    iterators.FrozenBatchSampler.__init__ = __init__


def _weak(method):
    if not inspect.ismethod(method):
        return method
    found = weakref.WeakMethod(method)
    return lambda *arguments: found()(*arguments)
