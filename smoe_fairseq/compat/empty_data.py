"""One sentence for a data file without sentences, where fairseq ends in a stack trace about memory maps.

For fairseq 0.12.2 on any Python. fairseq-preprocess makes such a file of an empty text and says nothing;
data sets of the older format fail only after the first epoch, when they are to be validated on. The same
for data of which every sentence is too long.
"""

import functools
import os
from types import ModuleType

from smoe_fairseq.system.errors import UsageError


def name_empty_files(indexed_dataset: ModuleType) -> None:
    original = indexed_dataset.make_dataset

    @functools.wraps(original)
    def make_dataset(path, impl, *others, **options):
        file = indexed_dataset.data_file_path(path)
        empty = impl == "mmap" and os.path.exists(file) and os.path.getsize(file) == 0
        dataset = None if empty else original(path, impl, *others, **options)
        if empty or (dataset is not None and len(dataset) == 0):
            raise UsageError(
                f"{path if impl == 'raw' else file} has no sentences: expected at least one in every file "
                "that is trained, validated or tested on"
            )
        return dataset

    indexed_dataset.make_dataset = make_dataset


def name_no_batches(iterators: ModuleType) -> None:
    iterator = iterators.EpochBatchIterator
    original = iterator.first_batch.fget

    @functools.wraps(original)
    def first_batch(self):
        if len(self.frozen_batches) == 0:
            raise UsageError(
                "no sentence of the data is short enough for the model: expected at least one within "
                "--max-source-positions and --max-target-positions"
            )
        return original(self)

    iterator.first_batch = property(first_batch)
