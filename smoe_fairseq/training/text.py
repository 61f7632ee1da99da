"""Names the files of text and dictionaries that do not belong together, for all commands of fairseq."""

import functools
from types import ModuleType

from smoe_fairseq.errors import UsageError


def name_files(tasks: ModuleType) -> None:
    """Change the task of several languages, and the data sets that it is made of."""
    from fairseq.data import LanguagePairDataset

    _name_uneven_pair(LanguagePairDataset)
    _name_missing_text(tasks.MultilingualDatasetManager)
    tasks.TranslationMultiSimpleEpochTask.check_dicts = _check_dicts


def _name_uneven_pair(pair: type) -> None:
    original = pair.__init__

    @functools.wraps(original)
    def __init__(self, src, src_sizes, src_dict, tgt=None, *others, **options):
        if tgt is not None and len(src) != len(tgt):
            raise UsageError(
                f"{_path_of(src)}.idx has {len(src)} sentences, and {_path_of(tgt)}.idx {len(tgt)}: "
                "expected files of one preparation"
            )
        original(self, src, src_sizes, src_dict, tgt, *others, **options)

    pair.__init__ = __init__


def _path_of(dataset) -> str:
    """The file below wrapped data, without its ending."""
    while within := getattr(dataset, "datasets", None) or getattr(dataset, "dataset", None):
        dataset = within[0] if isinstance(within, list) else within
    return getattr(dataset, "_path", "the data")


def _name_missing_text(manager: type) -> None:
    original = manager.get_split_num_data_shards

    @functools.wraps(original)
    def get_split_num_data_shards(self, split):
        class Shards(dict):
            def __missing__(_, key):
                pair = key.partition(":")[2]
                raise UsageError(f"{self.args.data} has no {split}.{pair}.*, nor the reverse")

        return Shards(original(self, split))

    manager.get_split_num_data_shards = get_split_num_data_shards


def _check_dicts(self, dicts, source_langs, target_langs) -> None:
    if self.args.source_dict is None and self.args.target_dict is None:
        for first, *others in (source_langs, target_langs):
            for other in others:
                if dicts[first] != dicts[other]:
                    one, two = (getattr(dicts[name], "read_from", name) for name in (first, other))
                    raise UsageError(f"{two} is not as {one}: expected one dictionary for all")
