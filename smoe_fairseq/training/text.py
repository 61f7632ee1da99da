"""Data files and dictionaries: messages that name mismatched ones, and the sizes of all shards."""

from itertools import chain
from pathlib import Path

from fairseq.utils import split_paths

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain, read_text


@replaces("fairseq.data:LanguagePairDataset.__init__")
def name_uneven_pair(original, pairs, src, src_sizes, src_dict, tgt=None, *others, **options):
    if tgt is not None and len(src) != len(tgt):
        raise UsageError(
            f"{_path_of(src)}.idx has {len(src)} sentences, and {_path_of(tgt)}.idx {len(tgt)}: "
            "expected files of one preparation"
        )
    original(pairs, src, src_sizes, src_dict, tgt, *others, **options)


def check_folders(options) -> None:
    """Raise UsageError if the folders of the data, DATA1:DATA2, have different dictionaries."""
    extra = getattr(options, "extra_data", None) or {}
    first, *others = chain.from_iterable(
        map(split_paths, [getattr(options, "data", None) or "", *extra.values()])
    )
    for folder in others:
        for file in sorted(Path(first).glob("dict.*.txt")):
            other = Path(folder, file.name)
            if not other.is_file() or read_plain(other) == read_plain(file):
                continue
            if _words(other) != _words(file):  # the numbers behind them may differ
                raise UsageError(f"{other} differs from {file}: expected equal dictionaries")


def _words(file: Path) -> list[str]:
    return [line.rpartition(" ")[0] for line in read_text(file).splitlines()]


@replaces("fairseq.data:LanguagePairDataset.collater")
def name_short_dictionary(original, pairs, samples, *others, **options):
    if batch := original(pairs, samples, *others, **options):
        _check(batch["net_input"]["src_tokens"], pairs.src, pairs.src_dict)
        _check(batch.get("target"), pairs.tgt, pairs.tgt_dict)
    return batch


def _check(tokens, text, dictionary) -> None:
    """The model would stop with an index out of range, on a GPU without telling where."""
    if tokens is not None and (number := int(tokens.max())) >= len(dictionary):
        file = getattr(dictionary, "read_from", "its dictionary")
        expected = f"expected the dictionary that {_path_of(text)}.bin was made with"
        raise UsageError(
            f"{file} has {len(dictionary)} words, and the text word {number}: {expected}"
        )


def _path_of(dataset) -> str:
    """The file of a data set, which may be wrapped in others, without its extension."""
    while inner := getattr(dataset, "datasets", None) or getattr(dataset, "dataset", None):
        dataset = inner[0] if isinstance(inner, list) else inner
    return getattr(dataset, "_path", "the data")


@replaces(
    "fairseq.tasks.translation_multi_simple_epoch:MultilingualDatasetManager.get_split_num_data_shards"
)
def name_missing_text(original, manager, split):
    class Shards(dict):
        def __missing__(self, key):
            pair, args = key.partition(":")[2], manager.args
            raise UsageError(
                f"{_flags(args, pair)}: {args.data} has no {split}.{pair}.*, nor the reverse"
            )

    return Shards(original(manager, split))


def _flags(args, pair: str) -> str:
    if args.source_lang or args.target_lang:
        return f"--source-lang {args.source_lang} --target-lang {args.target_lang}"
    return f"--lang-pairs {pair}"


@replaces("fairseq.tasks.translation_multi_simple_epoch:MultilingualDatasetManager.load_langs")
def name_unknown_language(original, _, args, **options):
    langs = original(_, args, **options)
    has_direction = args.source_lang or args.target_lang
    for pair in [f"{args.source_lang}-{args.target_lang}"] if has_direction else args.lang_pairs:
        if len(pair.split("-")) != 2 or not {*pair.split("-")} <= {*langs}:
            raise UsageError(
                f"{_flags(args, pair)}: expected two of the languages {','.join(langs)} of {args.data}"
            )
    return langs


@replaces(
    "fairseq.tasks.translation_multi_simple_epoch:"
    "TranslationMultiSimpleEpochTask.build_dataset_for_inference"
)
def name_missing_direction(original, task, *others, **options):
    if not (task.args.source_lang and task.args.target_lang):
        langs = ", ".join(task.langs)
        raise UsageError(f"--source-lang or --target-lang is missing: expected two of {langs}")
    return original(task, *others, **options)


@replaces(
    "fairseq.tasks.translation_multi_simple_epoch:TranslationMultiSimpleEpochTask.check_dicts"
)
def name_other_dictionary(_, task, dicts, source_langs, target_langs) -> None:
    if task.args.source_dict is None and task.args.target_dict is None:
        for first, *others in (source_langs, target_langs):
            for other in dict.fromkeys(others):
                if dicts[first] is not dicts[other] and dicts[first] != dicts[other]:
                    files = [getattr(dicts[name], "read_from", name) for name in (other, first)]
                    raise UsageError(f"{' differs from '.join(files)}: expected equal dictionaries")


@replaces(
    "fairseq.tasks.translation_multi_simple_epoch:MultilingualDatasetManager.get_train_dataset_sizes"
)
def count_all_shards(original, manager, params, *others):
    """fairseq counts the shards that it has loaded, so a resumed run would draw other sentences."""
    split = params[0]["split"]
    shards = manager.get_split_num_data_shards(split)
    for epoch in range(1, max(shards.values()) + 1) if manager.has_sharded_data(split) else ():
        for param in manager.get_split_data_param_list(split, epoch):
            sizes = manager._training_data_sizes[key := param["key"]]
            shard = manager.get_shard_id(shards[key], epoch)
            if shard not in sizes:
                sizes[shard] = len(manager.load_a_dataset(combine=True, **param))
    return original(manager, params, *others)
