"""A pretrained model for a data set: its weights, dictionary and subwords, with what the data set adds."""

import filecmp
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq.data import Dictionary
from fairseq.data.multilingual.multilingual_utils import augment_dictionary, get_lang_tok

from smoe_fairseq.checkpoints import huggingface_m2m, huggingface_m2m_text, sets
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.checkpoints.model import (
    has_experts,
    is_free,
    known_options,
    transformer_options,
    with_model_options,
)
from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.checkpoints.trained_with import DICTIONARIES, checksum, dictionary_mismatch
from smoe_fairseq.checkpoints.upcycle import size_flags
from smoe_fairseq.checkpoints.vocabulary import Vocabulary
from smoe_fairseq.errors import UsageError, nearest, quietly
from smoe_fairseq.files import read_plain, whole_files
from smoe_fairseq.flags import flag_of, values_of
from smoe_fairseq.forms import read_json
from smoe_fairseq.languages import assign
from smoe_fairseq.recipes.data import readers
from smoe_fairseq.recipes.data.raw import text_files
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import final
from smoe_fairseq.recipes.pretrained import MODEL, RECORD, is_foreign, source_of
from smoe_fairseq.subwords import NAMES, SPECIAL, read_subwords, subwords_of
from smoe_fairseq.translate.directions import TOKEN_FLAGS
from smoe_fairseq.translate.load import checkpoint_of, data_of

TASK = "translation_multi_simple_epoch"


def task_of(source: Path) -> tuple[Path, dict]:
    """The checkpoint of a run or file, and its task's settings; raises UsageError without language tokens."""
    checkpoint = checkpoint_of(source)
    state = open_checkpoint(checkpoint)
    task = dict(values_of((state.get("cfg") or {}).get("task")))
    if task.get("_name") != TASK or not task.get("langs"):
        raise UsageError(f"{checkpoint}: expected a model of --task {TASK}, with --langs")
    return checkpoint, task


def languages_of(source: Path) -> list[str] | None:
    """The languages of a folder of transformers (None: our export), a run or a checkpoint; see `task_of`."""
    if not os.path.lexists(source) and source.suffix != ".pt":
        advice = "`hf download NAME --local-dir FOLDER` gets a model from the hub"
        raise UsageError(f"{source}: expected a pretrained run, checkpoint or folder; {advice}")
    if not is_foreign(source):
        return task_of(source)[1]["langs"]
    if read_json(source / "config.json").get("model_type") in huggingface_m2m.KINDS:
        return huggingface_m2m_text.languages_of(source)
    return None


def check_languages(dataset: Dataset, known: Sequence[str]) -> None:
    """Raise UsageError unless the model knows the languages that are not declared as new, and no other."""
    file = dataset.file
    for language in dataset.languages:
        if language not in {*known, *dataset.new_languages}:
            (near,) = assign((language,), tuple(known))
            near = near or nearest(language, known)
            code = {model: code for code, model in dataset.codes.items()}.get(language, language)
            own = f"{language}: expected one of {', '.join(known[:9])}{', ...' * (len(known) > 9)}"
            if near:
                own = f"{language}, but {near}: expected `languages: {{{code}: {near}}}`"
            raise UsageError(f"{file}: `pretrained` has no language {own}, or `new-languages`")
    for language, settings in dataset.new_languages.items():
        key = f"{file}: `new-languages.{language}"
        if language not in dataset.languages:
            raise UsageError(f"{key}`: no pair has this language; leave it out")
        if language in known:
            raise UsageError(f"{key}`: `pretrained` has this language; leave it out")
        if (like := settings.get("like", known[0])) not in known:
            raise UsageError(f"{key}.like`: the pretrained model has no language {like}")


def adapt(dataset: Dataset, source: Path, raw: Path, output: Path) -> None:
    """Write the model for a data set: ``pretrained.pt``, ``dict.txt``, ``spm.model``, ``pretrained.json``.

    ``source`` is a run, a checkpoint or what ``smoe import`` wrote, with its dictionary beside it. Raises
    UsageError if the model lacks that, or does not know a language.
    """
    try:
        _adapt(dataset, source, raw, output)
    except UsageError as error:  # about a temporary file, if `smoe import` wrote the model
        named = f"`pretrained: {source_of(dataset)}`"
        raise UsageError(str(error).replace(str(source), named)) from error


def _adapt(dataset: Dataset, source: Path, raw: Path, output: Path) -> None:
    with quietly():
        checkpoint, task = task_of(source)
        check_languages(dataset, task["langs"])
        state = sets.weights_of(checkpoint)
        if dense := not has_experts(state):
            options = transformer_options(checkpoint, state) | {"moe_freq": 0}
        else:
            options = known_options(checkpoint, state) | {"expert_parallel": False}
        vocabulary, style = _vocabulary(checkpoint, state, task)
        rows, size = len(vocabulary.symbols), vocabulary.bytes
        for language, settings in dataset.new_languages.items():
            like = [settings["like"]] if "like" in settings else task["langs"]
            token, *tokens = (get_lang_tok(each, style) for each in (language, *like))
            vocabulary.append({token: tokens})
        if dataset.add_subwords:
            new = dataset.new_languages
            texts = (line for lang, line in _lines(dataset, raw, "train") if lang in new)
            others = (line for lang, line in _lines(dataset, raw) if lang not in new)
            added = vocabulary.add_pieces(texts, others, dataset.add_subwords)
            what = f"{len(added):,} subwords and letters of {', '.join(new)} added"
            print(f"{final(output)}: {what}", flush=True)
        if dataset.trim:
            vocabulary.trim(_pieces(vocabulary.subwords, dataset, raw))
        languages = [*task["langs"], *dataset.new_languages]
        symbols, digest = vocabulary.symbols, checksum(vocabulary.symbols)
        task |= {"data": "", "fixed_dictionary": "dict.txt"}
        task |= {"langs": languages, "lang_pairs": [*dataset.directions]}
        state = with_model_options({**state, "model": vocabulary.weights}, options)
        state |= {"cfg": {**state["cfg"], "task": Namespace(**task)}}
        state |= {DICTIONARIES: dict.fromkeys(dataset.languages, digest)}
        model, others = {}, {}
        for name, value in size_flags(options).items():
            (others if is_free(name.replace("-", "_")) else model)[name] = value
        written = [output / name for name in ("dict.txt", "spm.model", MODEL, RECORD)]
        with whole_files(written, parents=True) as partials:
            words = "".join(f"{word} 1\n" for word in symbols[len(SPECIAL) :])
            Path(partials[0]).write_text(words, "utf-8")
            Path(partials[1]).write_bytes(vocabulary.subwords)
            sets.write_converted(state, Path(partials[2]), True)
            names = ("moe_freq", *options)  # the first that differs is named
            fixed = {n: options[n] for n in names if not is_free(n)}
            experts = size_flags(fixed, experts=True)
            if dense:  # a method may give it experts
                fixed.pop("moe_freq")
            record = {
                "source": source_of(dataset) or str(source),
                "named": dataset.pretrained,
                "fingerprint": fingerprint(Path(partials[2])),
                "rows": len(symbols),
                "languages": languages,
                "task": {flag_of(name)[2:]: task.get(name) for name in sorted(TOKEN_FLAGS)},
                "train": others,
                "model": model,
                "experts": experts,
                "options": fixed,
            }
            Path(partials[3]).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    change = f"{rows:,} embeddings ({size / 1e6:,.1f} MB)"
    if rows != len(symbols):
        change += f", now {len(symbols):,} ({vocabulary.bytes / 1e6:,.1f} MB)"
    print(f"{final(output / MODEL)}: from {final(checkpoint)}, {change}", flush=True)


def _vocabulary(checkpoint: Path, state: dict, task: dict) -> tuple[Vocabulary, str]:
    """The model's vocabulary with its language tokens, and their style."""
    folder = Path(data_of(checkpoint, task))
    first, *others = sorted(folder.glob("dict.*txt"))
    for other in others:
        if not filecmp.cmp(first, other, shallow=False):
            raise UsageError(f"{first} and {other} differ: expected one dictionary")
    if (subwords := subwords_of(str(folder))) is None:
        raise UsageError(f"{folder} has no {NAMES[0]}: expected the model of the subwords there")
    read_subwords(subwords)
    dictionary, style = Dictionary.load(str(first)), task.get("lang_tok_style") or "multilingual"
    specs = task.get("langtoks_specs") or ["main"]
    augment_dictionary(dictionary, task["langs"], style, specs, task.get("extra_data"))
    own = Namespace(dicts=dict.fromkeys(task["langs"], dictionary))
    if mismatch := dictionary_mismatch(checkpoint, state, own):
        raise UsageError(mismatch)
    try:
        return Vocabulary(state["model"], dictionary.symbols, read_plain(subwords)), style
    except UsageError as error:
        other = f"{checkpoint} was trained with another dictionary than {first}"
        raise UsageError(f"{other}: {error}") from None


def _lines(dataset: Dataset, raw: Path, split: str = "") -> Iterator[tuple[str, str]]:
    """Language and line of all text, or of a split's."""
    for file in text_files(raw, ",".join(dataset.all_pairs)):
        for line in readers.lines(file) if file.name.startswith(split) else ():
            yield file.suffix[1:], line


def _pieces(subwords: bytes, dataset: Dataset, raw: Path) -> set[str]:
    """The pieces of all text."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=subwords)
    return {piece for _, line in _lines(dataset, raw) for piece in model.encode(line, out_type=str)}
