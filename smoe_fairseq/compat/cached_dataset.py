"""Lets data sets of the older format (``--dataset-impl lazy`` or ``cached``) train.

For fairseq 0.12.2 on any Python. Training reads the first batch before the cache of such a data set
has been filled, and the cache stops with a KeyError. Here it reads from the file what it lacks.
"""

from types import ModuleType


def read_past_cache(indexed_dataset: ModuleType) -> None:
    cached = indexed_dataset.IndexedCachedDataset
    from_cache = cached.__getitem__
    from_file = indexed_dataset.IndexedDataset.__getitem__

    def getitem(self, index):
        return (from_cache if index in self.cache_index else from_file)(self, index)

    cached.__getitem__ = getitem
