"""Trained models in Python: finding a run's files, loading, translating."""

import copy
import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.utils import split_paths
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.flags import values_of
from smoe_fairseq.forms import choice
from smoe_fairseq.modules.config import MoEConfig, without_effect
from smoe_fairseq.modules.strata import OptionError
from smoe_fairseq.modules.torch_features import without_default_device
from smoe_fairseq.subwords import CODES, SubwordNMT, checked_subwords, composer
from smoe_fairseq.translate.directions import (
    MULTILINGUAL,
    READING,
    check_languages,
    other_flags,
    task_for,
    task_name,
)
from smoe_fairseq.translate.readout import Readout, Translation
from smoe_fairseq.translate.text import BatchTranslator, Options, checked_texts

_NAMES = ("checkpoint_best.pt", "checkpoint_last.pt")


def checkpoint_of(run: Path | str, name: str | None = None) -> Path:
    """The checkpoint of a run: ``run`` if it is a file, else ``name`` in it, or its best or last one.

    Raises:
        UsageError: there is no such file.
    """
    run = Path(run)
    is_folder, names = run.is_dir(), (name,) if name else _NAMES
    for file in [run / each for each in names] if is_folder else [run]:
        if files_of(file):
            return file  # its reader names a file or set that cannot be read
    problem = f"has no {' or '.join(names)}" if is_folder else "is missing"
    advice = "; a folder of transformers has a config.json, and smoe import converts it"
    advice *= any((run / name).exists() for name in ("config.json", "tokenizer_config.json"))
    raise UsageError(f"{run} {problem}: expected the folder of a run, or a checkpoint{advice}")


def files_of(checkpoint: Path) -> list[Path]:
    """The file, or else those of its ranks, ``checkpoint_best-rank-0.pt`` and so on; empty without any."""
    if os.path.lexists(checkpoint):
        return [checkpoint]
    return sorted(checkpoint.parent.glob(f"{glob.escape(checkpoint.stem)}-rank-*.pt"))


def data_of(checkpoint: Path, task, data: Path | str | None = None) -> str:
    """The folder of the dictionaries: ``data``, the checkpoint's folder, or that of the training data.

    Args:
        task: settings of the training. A relative path of its data is tried from the folders above the
            checkpoint, then from the current one. Of sharded data, the first shard is used.

    Raises:
        UsageError: there are no dictionaries.
    """
    if data is not None:
        if any(Path(data).glob("dict.*txt")):
            return str(data)
        raise UsageError(f"{data} has no dictionaries: expected a folder with dict.*.txt")
    values, places = values_of(task), [folder := checkpoint.resolve().parent]
    saved = str(values.get("data") or "")
    parts = dict.fromkeys([saved, split_paths(saved)[0]]) if saved else ()  # it may have a colon
    for part in parts:
        places += [*(above / part for above in folder.parents), Path(part)]
    # Without --fixed-dictionary, dict.txt beside a checkpoint may be a copy for other programs.
    is_fixed = values.get("fixed_dictionary")
    for name in ("dict.*txt",) if is_fixed else ("dict.*.txt", "dict.txt"):
        for place in places:
            if place.is_dir() and any(place.glob(name)):
                return str(place)
    raise UsageError(
        f"{saved or 'a folder'}, with the dictionaries that {checkpoint} was trained with, is missing: "
        "expected dict.*.txt beside the checkpoint, or their folder (--data of commands that have it, "
        "data_name_or_path in Python)"
    )


def text_settings(data: str, task) -> dict[str, str]:
    """The settings that name the folder ``data``, and the task's fixed dictionary and languages there.

    For a shard of `prepare`, these are in the folder above it.
    """
    values, folder = values_of(task), Path(split_paths(data)[0])
    names = ("fixed_dictionary", "lang_dict")
    folder = folder.parent if re.fullmatch(r"shard\d+", folder.name) else folder
    files = {name: folder / Path(values[name]).name for name in names if values.get(name)}
    return {"data": data} | {name: str(file) for name, file in files.items() if file.is_file()}


@contextmanager
def knowing_direction(data: str, expected: str) -> Iterator[None]:
    """Raise UsageError if fairseq cannot infer the direction of a task; ``expected`` is what would set it."""
    try:
        yield
    except Exception as error:
        if not str(error).startswith("Could not infer language pair"):
            raise
        raise UsageError(f"{data}: unknown direction; expected {expected}") from None


_RANDOM = (
    *(Tensor.normal_, Tensor.uniform_),
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
)


class WithoutRandomValues(TorchFunctionMode):
    """Skips random initial values, of models that are loaded or that are built for their shapes.

    On the meta device torch would load its compiler for them (seconds).
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@cache  # a registration cannot be undone: once per process, not once per model
def _use_one_thread_after_fork() -> None:
    """OpenMP would wait forever for the threads of the parent, which a forked process lacks."""
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def segmenter(subwords: Path) -> SentencepieceBPE | SubwordNMT:
    """``encode`` and ``decode`` of text by the file of `checked_subwords`."""
    if subwords.name in CODES:
        return SubwordNMT(subwords)
    found = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(subwords)))
    divide, compose = found.encode, composer(found.sp)
    found.encode = lambda text: divide(compose(text))
    return found


class TrainedModel(GeneratorHubInterface):
    """fairseq's interface to a trained model, in evaluation mode: ``sample``, ``score``, ``generate``.

    ``.cuda()`` moves it to a GPU.
    """

    def __init__(self, cfg, task, models, subwords: Path | None):
        cfg.generation.no_beamable_mm = True  # each call chooses its beam
        try:
            super().__init__(cfg, task, models)
        except Exception as error:  # of fairseq's tokenizers and subwords, of any type
            names = (getattr(each, "_name", each) for each in (cfg.bpe, cfg.tokenizer))
            reason = f"{type(error).__name__} {error}".splitlines()[0]
            raise UsageError("bpe={}, tokenizer={}: {}".format(*names, reason)) from None
        if subwords is not None:
            self.bpe = segmenter(subwords)
        self.engines = {}  # by `int8`; they have copies of the weights
        self.eval()

    def __deepcopy__(self, memo: dict) -> "TrainedModel":
        """A copy of the models, with the same task and settings, since fairseq's cannot be copied."""
        made = copy.copy(self)
        parts = ("_modules", "_parameters", "_buffers")
        vars(made).update({name: copy.deepcopy(vars(self)[name], memo) for name in parts})
        made.engines = {}
        return made

    def __copy__(self) -> "TrainedModel":
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce__(self):
        raise TypeError("a loaded model cannot be pickled: call from_pretrained in each process")

    @classmethod
    @without_default_device()
    def of_run(
        cls, run, checkpoint_file=None, data=None, prepare: Callable | None = None, **overrides
    ):
        """Load the model of a run's folder or checkpoint.

        Args:
            prepare: called with the saved config, ``overrides`` and ``data``, before these are applied.

        Raises:
            UsageError: a file is missing, damaged, or does not fit the others.
        """
        checkpoint = checkpoint_of(run, checkpoint_file)
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
        saved = state.get("cfg")
        if saved is None or saved.get("task") is None:
            raise UsageError(f"{checkpoint}: cfg.task is missing")
        with naming_file(checkpoint):
            data = data_of(checkpoint, saved.task, data)
            if prepare is not None:
                prepare(saved, overrides, data)
            check_names(saved, overrides)
            overwrite_args_by_name(saved, text_settings(data, saved.task) | overrides)
        known = knowing_direction(data, "source_lang and target_lang")
        with known, WithoutRandomValues():
            load, files = checkpoint_utils.load_model_ensemble_and_task, [str(checkpoint)]
            models, cfg, task = load(files, state=state)
        _use_one_thread_after_fork()
        subwords = checked_subwords(data, task.source_dictionary, cfg.bpe is None)
        return cls(cfg, task, models, subwords)

    def has_words(self, sentence: str) -> bool:
        """Whether the sentence has any subwords, and more than blanks and invisible marks."""
        if not any(c.isprintable() and not c.isspace() for c in sentence):
            return False
        return bool(self.apply_bpe(self.tokenize(sentence)).strip())

    def encode(self, sentence: str):
        tokens = super().encode(sentence)
        limit = self.max_positions
        longest = limit if isinstance(limit, int) else limit[0]  # the source's limit
        if len(tokens) > longest:
            raise UsageError(
                f"a sentence of {len(tokens)} tokens is longer than the model's limit, {longest}: divide it; "
                f"it begins with {sentence[:40]!r}"
            )
        return tokens


def check_names(config: Mapping, overrides: Mapping, flag: str = "") -> None:
    """Raise UsageError for settings that change nothing; ``flag`` starts the message.

    They are unknown, which fairseq ignores silently, or without effect beside the others of the model.
    """
    parts = map(values_of, config.values())
    known = {name: part for part in parts for name in part.keys()}
    # fairseq makes them of two other settings, once.
    langtoks = known.get("langtoks", {}).get("langtoks")
    for name in overrides:
        if name not in known:
            raise UsageError(
                f"{flag}{name}: unknown setting; expected one of the checkpoint's config"
            )
        if langtoks and name in ("encoder_langtok", "decoder_langtok"):
            instead = f"expected `langtoks`, which is {langtoks}, in its place"
            raise UsageError(f"{flag}{name}: {instead}")
    flags = MoEConfig.flags()
    options = {name: getattr(MoEConfig, name) for name in flags}
    options |= {name: known[option][option] for name, option in flags.items() if option in known}
    options |= {n: overrides[option] for n, option in flags.items() if option in overrides}
    for name, sentence in without_effect(options).items():
        if flags[name] in overrides:
            raise UsageError(f"{flag}{OptionError(sentence).named(flags)}")


# Tasks whose models `Translator` does not load, and what to use instead.
_OTHERS = {
    "language_modeling": "is a language model: expected one of translation, or "
    "SMoETransformerLanguageModel.from_pretrained",
    "multilingual_translation": "has a model per language pair: expected one model, or fairseq-interactive "
    "with --task multilingual_translation",
}


# Options of fairseq's search that its commands read, and its class does not.
_OF_COMMANDS = re.compile(
    "_|constraints|lm_|score_reference|prefix_size|decoding_format|eos_token|iter_|retain_"
)


class Translator(TrainedModel):
    """A `TrainedModel` that translates raw text; the direction is chosen at each call."""

    source_lang = target_lang = None

    def __init__(self, *args):
        super().__init__(*args)
        self.of_fairseq: set[str] = set()  # overridden settings of a search that only fairseq has

    @classmethod
    def of_run(
        cls, run, checkpoint_file=None, data=None, source_lang=None, target_lang=None, **overrides
    ) -> "Translator":
        """See `SMoETransformerModel.from_pretrained`."""
        if not isinstance(run, list | tuple):
            run = [run]
        if not run:
            raise UsageError("expected a run, or a list of runs; the list is empty")
        first, *others = run
        languages = {"source_lang": source_lang, "target_lang": target_lang}

        def prepare(saved, overrides: dict, data: str) -> None:
            if instead := _OTHERS.get(task_name(saved.task)):
                raise UsageError(f"{first} {instead}")
            # A multilingual task gets its direction later.
            if task_name(saved.task) != MULTILINGUAL:
                given = {name: lang for name, lang in languages.items() if lang is not None}
                overrides |= check_languages(first, saved.task, given, data)

        translator = super().of_run(first, checkpoint_file, data, prepare, **overrides)
        searching = values_of(translator.cfg.generation).keys() - vars(Options()).keys()
        translator.of_fairseq = overrides.keys() & searching
        if unread := sorted(filter(_OF_COMMANDS.match, translator.of_fairseq)):
            raise UsageError(f"{unread[0]}: only commands of fairseq read it")
        translator.source_lang, translator.target_lang = source_lang, target_lang
        for other in others:
            more = cls.of_run(other, checkpoint_file, data, source_lang, target_lang, **overrides)
            if (more.src_dict, more.tgt_dict) != (translator.src_dict, translator.tgt_dict):
                raise UsageError(f"{other} has another dictionary than {first}; expected the same")
            tasks = (each.task.cfg or each.task.args for each in (more, translator))
            if (flags := other_flags(*tasks)).keys() & READING:
                had = " ".join(flags.values())
                raise UsageError(f"{other}: its training had {had}; expected that of {first}")
            translator.models.extend(more.models)
            limits = zip(translator.max_positions, more.max_positions, strict=True)
            translator.max_positions = tuple(map(min, limits))
        return translator

    def translate(
        self,
        sentences: str | Iterable[str],
        beam: int | None = None,
        verbose: bool = False,
        source_lang: str | None = None,
        target_lang: str | None = None,
        int8: bool = False,
        **options,
    ) -> str | list[str]:
        """Translate raw text; returns one translation per sentence, in order.

        Args:
            beam, source_lang, target_lang, int8, options: as in `translations`. ``verbose`` and options that
                only fairseq has, such as ``diverse_beam_groups=2``, use fairseq's search.

        Raises:
            UsageError: as in `translations`.
        """
        if isinstance(sentences, str):
            return self.translate(
                *([sentences], beam, verbose, source_lang, target_lang, int8), **options
            )[0]
        direction = {"source_lang": source_lang, "target_lang": target_lang}
        if verbose or self.of_fairseq or options.keys() - self._defaults().keys():
            known = set(values_of(self.cfg.generation))
            self._check_options(options, {each for each in known if not _OF_COMMANDS.match(each)})
            if unused := [*sorted(options.keys() - known), *["int8"] * int8]:
                raise UsageError(
                    f"{unused[0]}: expected it without verbose and options of fairseq alone"
                )
            return self._by_fairseq(sentences, beam, verbose, **direction, **options)
        results = self.translations(sentences, beam, **direction, int8=int8, **options)
        return [each.hypotheses[0].text for each in results]

    def _by_fairseq(self, sentences, beam, verbose, source_lang, target_lang, **options):
        """Translations by fairseq's search, with the text as in `translations`."""
        sentences = checked_texts(sentences)
        beam = Options(beam=self.cfg.generation.beam if beam is None else beam).beam
        source, target = source_lang or self.source_lang, target_lang or self.target_lang
        readout = Readout(self, self.models, self.task_for(source, target))
        tokens = [self.encode(sentence) for sentence in sentences]
        some = [ids for ids in tokens if len(ids) > 1]  # the others are just the end of sentence
        direction = {"source_lang": source, "target_lang": target}
        results = iter(some and self.generate(some, beam, verbose, **direction, **options))
        return [readout.text(next(results)[0]["tokens"]) if len(ids) > 1 else "" for ids in tokens]

    def translations(
        self,
        sentences: str | Iterable[str],
        beam: int | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        int8: bool = False,
        **options,
    ) -> list[Translation]:
        """Translate raw text by the search of ``smoe translate``; returns a `Translation` per sentence.

        The first call on a CPU copies the large weights into a faster layout; later changes of the weights
        have no effect.

        Args:
            beam: beam size; by default that of the checkpoint's settings, 5.
            source_lang, target_lang: may be omitted if only one direction is possible.
            int8: compute in 8-bit integers, on a CPU.
            options: fields of `smoe_fairseq.translate.text.Options`: ``nbest=5``, ``lenpen=1.2``,
                ``sampling=True``, ``prefix="..."``. Their defaults are the checkpoint's settings.

        Raises:
            UsageError: the direction is unknown or ambiguous, or an option is unknown.
        """
        self._check_options(options)
        if self.of_fairseq:
            raise UsageError(
                f"{min(self.of_fairseq)}: expected it with translate, as fairseq's search"
            )
        if isinstance(sentences, str):
            sentences = [sentences]
        if beam is not None:
            options["beam"] = beam
        options = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
        if int8 not in self.engines:
            self.engines[int8] = BatchTranslator(self, int8=int8, keep=True)
        source, target = source_lang or self.source_lang, target_lang or self.target_lang
        return self.engines[int8].translate_batch(
            sentences, source, target, Options(**self._defaults() | options)
        )

    def _defaults(self) -> dict:
        """The options of our search, with the checkpoint's settings as defaults."""
        return {
            name: getattr(self.cfg.generation, name, default)
            for name, default in vars(Options()).items()
        } | {"nbest": 1}

    def _check_options(self, options: dict, others: Collection[str] = ()) -> None:
        known = {*self._defaults(), *others}
        for name in options:
            if name not in known:
                raise UsageError(f"{name} is unknown; {choice(name, sorted(known))}")

    def generate(
        self, tokenized_sentences, *args, source_lang=None, target_lang=None, **options
    ) -> list:
        """fairseq's search on the results of `encode`; ``sample`` calls it, too.

        Raises:
            UsageError: the direction is unknown or ambiguous.
        """
        source, target = source_lang or self.source_lang, target_lang or self.target_lang
        directed = copy.copy(self)
        directed.task = self.task_for(source, target)
        directed.source_lang, directed.target_lang = source, target
        return super(Translator, directed).generate(tokenized_sentences, *args, **options)

    def _apply(self, *args, **options):
        self.engines = {}  # they have copies of the weights
        return super()._apply(*args, **options)

    def task_for(self, source: str | None, target: str | None, request: str | None = None):
        """See `smoe_fairseq.translate.directions.task_for`."""
        return task_for(self.task, source, target, request)
