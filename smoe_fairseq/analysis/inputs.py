"""Inputs of an analysis: a checkpoint, its directions and the text to run it on."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.multilingual.multilingual_utils import get_lang_tok
from fairseq.models import FairseqMultiModel
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import move_to_cuda, resolve_max_positions, split_paths
from torch import nn

from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.flags import add_flag, positive, values_of
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.routing import Capacity
from smoe_fairseq.progress import with_progress
from smoe_fairseq.translate.directions import direction_of, is_multilingual, task_for
from smoe_fairseq.translate.load import checkpoint_of, text_settings

TOKENS_PER_BATCH = 4096
SEED = 1
TEXT = "text"  # the only direction of a language model


def load(checkpoint: Path, data: str | Path) -> tuple[nn.Module, object]:
    """Model, in evaluation mode, and task of a checkpoint, for the binarised text in ``data``.

    ``data`` is a folder, or several joined by ":". Experts have no capacity limit, so that the requested
    capacity of a token does not depend on its batch.

    Raises:
        UsageError: the data is missing, or the checkpoint cannot be used.
    """
    state = open_checkpoint(checkpoint)  # fairseq reports only some of its faults in one sentence
    for path in map(Path, split_paths(str(data))):
        if not path.exists():
            raise UsageError(f"{path} is missing")
    settings = text_settings(str(data), values_of(state.get("cfg")).get("task"))
    load, files = checkpoint_utils.load_model_ensemble_and_task, [str(checkpoint)]
    try:
        models, _, task = load(files, arg_overrides=settings)
    except FileNotFoundError as error:
        expected = f"expected the binarised data that {checkpoint} was trained with, not {data}"
        raise UsageError(f"{error.filename} is missing: {expected}") from None
    # Gates whose experts choose have none: their number of tokens is not a limit.
    for capacity in capacities_of(models[0]):
        capacity.eval_factor = 0.0
    if isinstance(models[0], FairseqMultiModel):
        expected = "one model of all pairs, such as of --task translation_multi_simple_epoch"
        raise UsageError(f"{checkpoint} has a model per language pair: expected {expected}")
    return models[0].eval(), task


@dataclass(frozen=True)
class Subset:
    """The text of each direction."""

    name: str = "valid"  # train, valid or test
    sentences: int | None = None  # size of a random sample, with a fixed seed; None: all
    max_tokens: int = TOKENS_PER_BATCH  # padding included


def add_input_arguments(parser: ArgumentParser, lang_pairs: str) -> None:
    """The flags of `load_inputs` except ``path``; ``lang_pairs`` is the help of ``--lang-pairs``."""
    add = partial(add_flag, parser)
    parser.add_argument("data", metavar="DATA", help="binarised data, as for fairseq-train")
    add(
        "--lang-pairs",
        "PAIRS",
        f"{lang_pairs}, such as en-de,de-en; default: all of the checkpoint",
    )
    add("--gen-subset", None, "subset to run on: train, valid or test", default="valid")
    add("--sentences", "N", "run on a random sample of N sentences per direction", positive)
    add("--max-tokens", None, "tokens per batch", positive, TOKENS_PER_BATCH)
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")


def load_inputs(args: Namespace) -> tuple[nn.Module, object, list[str], Subset]:
    """Model, task, directions and subset of a command; a dense checkpoint is a `UsageError`."""
    args.path = checkpoint_of(args.path)
    model, task = load(args.path, args.data)
    if not moe_blocks(model):
        raise UsageError(f"{args.path} is a dense model: expected one with MoE layers")
    if torch.cuda.is_available() and not args.cpu:
        model.cuda()
    subset = Subset(args.gen_subset, args.sentences, args.max_tokens)
    return model, task, directions(task, args.lang_pairs), subset


def is_language_model(task) -> bool:
    """Whether a task is language modelling, without source and languages."""
    return isinstance(task, LanguageModelingTask)


def dictionary_of(task, side: str) -> Dictionary:
    """The dictionary of a side's input."""
    uses_source = side == "encoder" or is_language_model(task)
    return task.source_dictionary if uses_source else task.target_dictionary


def sides(task) -> list[str]:
    """The sides of a task's models."""
    return ["decoder"] if is_language_model(task) else ["encoder", "decoder"]


def longest(model: nn.Module, task) -> tuple[int, int] | int:
    """The maximum numbers of tokens of source and target, or of a text, for model and task."""
    return resolve_max_positions(task.max_positions(), model.max_positions())


def folders(task) -> list[Path]:
    """The folders of a task's binarised text; several if training data is divided."""
    data = (task.cfg or task.args).data
    return [Path(folder) for folder in split_paths(data)]


def directions(task, pairs: str | None = None) -> list[str]:
    """The directions of ``--lang-pairs`` (``en-de,de-en``), by default all that the model was trained on."""
    if is_language_model(task):
        if pairs is not None:
            raise UsageError(f"--lang-pairs {pairs}: a language model has none; leave it out")
        return [TEXT]
    known = list(task.lang_pairs) if is_multilingual(task) else ["-".join(direction_of(task))]
    if pairs is None:
        return known
    names = [name.strip() for name in pairs.split(",")]
    for i, name in enumerate(names):
        if name not in known:
            source, _, target = name.partition("-")
            directed = task_for(task, source or "?", target or "?", f"--lang-pairs {name}")
            names[i] = "-".join(direction_of(directed))
    return list(dict.fromkeys(names))


def languages(task, direction: str) -> list[str]:
    """Source and target of a direction; their codes may have hyphens if there is only one direction."""
    if is_multilingual(task) or is_language_model(task):
        return direction.split("-")
    return [*direction_of(task)]


def special(dictionary, task) -> np.ndarray:
    """``(V,)``: whether a type is special, that is, a language's token or ``<s> <pad> </s> <unk>``."""
    is_special = np.zeros(len(dictionary), dtype=bool)
    is_special[: dictionary.nspecial] = True
    if is_multilingual(task):
        style, specs = task.args.lang_tok_style, task.args.langtoks_specs
        tokens = {get_lang_tok(lang, style, spec) for lang in task.langs for spec in specs}
        is_special[[dictionary.index(token) for token in tokens if token in dictionary]] = True
    return is_special


def datasets(task, direction: str, subset: str) -> Iterator[FairseqDataset]:
    """The sentence pairs of one direction, a data set per folder of training data.

    For a language model, its text, divided into samples as in training.
    """
    parts = folders(task) if subset == "train" else folders(task)[:1]
    try:
        if not is_multilingual(task):
            for epoch in range(1, len(parts) + 1):
                task.load_dataset(subset, epoch=epoch)
                yield task.dataset(subset)
            return
        manager = task.data_manager
        source, target = direction.split("-")
        # fairseq knows the dictionaries of trained pairs alone.
        manager.dicts = dict.fromkeys(task.langs, task.source_dictionary) | manager.dicts
        of_source = {"src": source, "src_dict": manager.get_source_dictionary(source)}
        of_target = {"tgt": target, "tgt_dict": manager.get_target_dictionary(target)}
        main = {"data_category": "main", "langtok_spec": task.args.langtoks["main"]}
        main |= {"split": subset, "combine": False}
        for folder in parts:
            yield manager.load_a_dataset(data_path=str(folder), **of_source, **of_target, **main)
    except (FileNotFoundError, AttributeError) as error:
        if isinstance(error, AttributeError) and "'NoneType'" not in str(error):
            raise  # fairseq continues with None only if a file is missing
        files = f"{subset}.{direction}.* (nor the reverse direction)"
        files = f"{subset}.bin" if is_language_model(task) else files
        raise UsageError(
            f"--gen-subset {subset}: {parts[0]} has no binarised text {files}"
        ) from None


def batches(
    dataset: FairseqDataset,
    max_positions: tuple[int, int] | int,
    max_tokens: int,
    order: np.ndarray,
) -> tuple[list[np.ndarray], int]:
    """Batches of the sentences of ``order``, and the number of those that are too long for the model.

    Sentences are sorted by length, those of equal length in their order.
    """
    lengths = np.array([max(np.atleast_1d(dataset.size(i))) for i in order], dtype=np.int64)
    index = order[np.argsort(lengths, kind="stable")]
    index, too_long = dataset.filter_indices_by_size(index, max_positions)
    return list(dataset.batch_by_size(index, max_tokens=max_tokens)), len(too_long)


def drawn(number: int, sentences: int | None) -> np.ndarray:
    """Indices of a random sample of so many of ``number`` sentences, in their order; None: of all."""
    if sentences is None or sentences >= number:
        return np.arange(number)
    return np.sort(np.random.default_rng(SEED).choice(number, sentences, replace=False))


class Samples:
    """Iterates over one direction's batches, as fairseq's samples on the model's device.

    Attributes:
        seen, too_long: numbers of sentences so far, and of skipped ones that are too long for the model.

    Raises:
        UsageError: in the iteration: the subset is missing, or has no sentence that fits.
    """

    def __init__(self, model: nn.Module, task, direction: str, subset: Subset):
        self.model, self.task, self.direction, self.subset = model, task, direction, subset
        self.seen = self.too_long = 0

    def __iter__(self) -> Iterator[dict]:
        limit = longest(self.model, self.task)
        parts = list(datasets(self.task, self.direction, self.subset.name))
        ends = np.cumsum([len(dataset) for dataset in parts])
        index = drawn(ends[-1], self.subset.sentences)
        of_parts = np.split(index, np.searchsorted(index, ends[:-1]))
        for dataset, end, order in zip(parts, ends, of_parts, strict=True):
            order = order - (end - len(dataset))
            indices, skipped = batches(dataset, limit, self.subset.max_tokens, order)
            self.too_long += skipped
            for batch in with_progress(self.direction, indices):
                yield sample_of(self.model, self.task, dataset, batch)
                self.seen += len(batch)
        if not self.seen:
            subset = f"--gen-subset {self.subset.name}"
            raise UsageError(f"{subset}: {self.direction} has no sentence to run on")


def sample_of(model: nn.Module, task, dataset: FairseqDataset, batch: Iterable[int]) -> dict:
    """These sentences as a sample on the model's device; errors name the data folder."""
    with naming_file(folders(task)[0], "the text"):
        return on_device(model, dataset.collater([dataset[i] for i in batch]))


def on_device(model: nn.Module, sample: dict) -> dict:
    """A sample, or its inputs, on the model's device."""
    device = next(model.parameters()).device
    return sample if device.type == "cpu" else move_to_cuda(sample, device)


def capacities_of(model: nn.Module) -> list[Capacity]:
    """Those of all gates that can limit their experts."""
    return [module for module in model.modules() if isinstance(module, Capacity)]
