"""Text from elsewhere: a Hugging Face data set, a test set of sacreBLEU."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.data.readers import Languages, Pair, record_pair, some_complete


def read_datasets(source: Mapping, split: str, languages: Languages) -> Iterator[Pair]:
    """The pairs in a split of a Hugging Face data set, or of a folder of ``save_to_disk``, by ``source``."""
    try:
        import datasets
    except ImportError:
        raise UsageError("`source.datasets` needs `pip install datasets`") from None
    name, config = str(source["datasets"]), source.get("config")
    split = source.get("splits", {}).get(split, {"valid": "validation"}.get(split, split))
    place = f"{name}{f' ({config})' * (config is not None)}, split {split}"
    try:
        if Path(name).is_dir() and not any(Path(name).glob("*.parquet")):
            records = datasets.load_from_disk(name)[split]
        else:
            records = datasets.load_dataset(name, config, split=split)
    except KeyError:
        raise UsageError(f"{place}: there is no such split; name it in `source.splits`") from None
    except Exception as error:  # of the hub, the network, the file system or pyarrow
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{place} cannot be loaded ({type(error).__name__}: {reason})") from None
    pairs = (record_pair(r, languages, f"{place}, record {n}") for n, r in enumerate(records, 1))
    yield from some_complete(pairs, place, languages)


def sacrebleu_files(name: str, languages: Languages) -> dict[str, Path]:
    """The files of a sacreBLEU test set by language; sacreBLEU downloads them once."""
    from sacrebleu import utils

    if name not in utils.get_available_testsets():
        raise UsageError(f"`source.sacrebleu` {name}: `sacrebleu --list` has all test sets")
    known = utils.get_langpairs_for_testset(name)
    orders = [tuple(pair.split("-")) for pair in known]
    for order in sorted(orders, key=lambda order: languages.found(order) != order):
        if None in (found := languages.found(order)):
            continue
        pair = "-".join(order)
        try:
            files = utils.get_source_file(name, pair), utils.get_reference_files(name, pair)[0]
        except (Exception, SystemExit) as error:
            failed = f"sacreBLEU's {name} of {pair} cannot be loaded"
            raise UsageError(f"{failed}: {' '.join(str(error).split())}") from None
        by_name = dict(zip(order, map(Path, files), strict=True))
        return {own: by_name[name] for own, name in zip(languages.own, found, strict=True)}
    pair = "-".join(languages.own)
    raise UsageError(f"sacreBLEU's {name} has no {pair}; it has {', '.join(known)}")
