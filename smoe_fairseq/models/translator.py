"""A trained model that translates text: raw text in, detokenised text out."""

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from fairseq import checkpoint_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.hub_utils import GeneratorHubInterface
from omegaconf import OmegaConf

from smoe_fairseq.models.run_files import SUBWORDS, checkpoint_of, data_of, subwords_of
from smoe_fairseq.system.errors import UsageError

_BEGINS_WORD = "\u2581"  # how sentencepiece marks it


class Translator(GeneratorHubInterface):
    """fairseq's interface to a trained model, in evaluation mode, whose directions are chosen call by call.

    ``.cuda()`` moves it to a GPU; ``generate``, ``encode`` and so on are fairseq's.
    """

    def __init__(
        self, cfg, task, models, subwords: Path | None, source_lang=None, target_lang=None
    ):
        super().__init__(cfg, task, models)
        self.source_lang, self.target_lang = source_lang, target_lang
        if subwords is not None:
            self.bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(subwords)))
        self.eval()

    @classmethod
    def of_run(
        cls, run, checkpoint_file=None, data=None, source_lang=None, target_lang=None, **overrides
    ) -> "Translator":
        """As `SMoETransformerModel.from_pretrained` says."""
        checkpoint = checkpoint_of(run, checkpoint_file)
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
        saved = state.get("cfg")
        if saved is None or saved.get("task") is None:
            raise UsageError(
                f"{checkpoint} does not say what its task is: cfg.task is missing in it"
            )
        data = data_of(checkpoint, str(getattr(saved.task, "data", None) or ""), data)
        languages = {"source_lang": source_lang, "target_lang": target_lang}
        if not _is_multilingual(saved.task):  # which is told its direction at each translation
            overrides |= {name: lang for name, lang in languages.items() if lang is not None}
        _check_names(saved, overrides)
        overwrite_args_by_name(saved, {**overrides, "data": data})
        try:
            models, cfg, task = checkpoint_utils.load_model_ensemble_and_task(
                [str(checkpoint)], state=state
            )
        except Exception as error:
            if not str(error).startswith("Could not infer language pair"):
                raise
            raise UsageError(
                f"{data} has dictionaries and no text, which would say the direction: expected source_lang "
                "and target_lang"
            ) from None
        subwords = subwords_of(data)
        if subwords is None and cfg.bpe is None and _has_pieces(task.source_dictionary):
            raise UsageError(
                f"{data} has no {SUBWORDS[0]}, by which the pieces of words in its dictionaries were made: "
                "expected it beside them"
            )
        return cls(cfg, task, models, subwords, **languages)

    def translate(
        self,
        sentences: str | list[str],
        beam: int | None = None,
        verbose: bool = False,
        source_lang: str | None = None,
        target_lang: str | None = None,
        **options,
    ) -> str | list[str]:
        """Translations of raw text, one for each sentence, in their order.

        Args:
            beam: 5 unless the checkpoint's settings were changed.
            source_lang, target_lang: may be left out where only one direction is possible.
            options: fairseq's of generation, such as ``lenpen=1.2``.

        Raises:
            UsageError: the direction is not known or not clear, or a sentence is too long.
        """
        if not isinstance(sentences, str) and not sentences:
            return []
        self.turn_to(source_lang or self.source_lang, target_lang or self.target_lang)
        return super().translate(sentences, beam or self.cfg.generation.beam, verbose, **options)

    def encode(self, sentence: str):
        tokens = super().encode(sentence)
        longest = self.max_positions[0]
        if len(tokens) > longest:
            raise UsageError(
                f"a sentence of {len(tokens)} tokens is longer than the model takes ({longest}): divide it; "
                f"it begins with {sentence[:40]!r}"
            )
        return tokens

    def turn_to(self, source: str | None, target: str | None, asked: str | None = None) -> None:
        """Translates from ``source`` to ``target`` from now on; None: as is the only possibility.

        Args:
            asked: how the sentence of an error calls what was asked for.

        Raises:
            UsageError: the direction is not known or not clear.
        """
        multilingual = _is_multilingual(self.cfg.task)
        options = self.task.args if multilingual else self.task.cfg
        known = (
            list(self.task.lang_pairs)
            if multilingual
            else [f"{options.source_lang}-{options.target_lang}"]
        )
        pairs = [tuple(pair.split("-")) for pair in known]
        found = [p for p in pairs if source in (None, p[0]) and target in (None, p[1])]
        if (
            not found
            and multilingual
            and source != target
            and {source, target} <= set(self.task.langs)
        ):
            found = [
                (source, target)
            ]  # languages that it knows, in a direction of which it has seen no text
        if len(found) != 1:
            asked = asked or f"source_lang={source!r}, target_lang={target!r}"
            why = "several directions are possible" if found else "no such direction"
            raise UsageError(f"{asked}: {why}; expected one of {', '.join(known)}")
        if multilingual:
            options.source_lang, options.target_lang = found[0]


def _is_multilingual(task_config) -> bool:
    return getattr(task_config, "_name", None) == "translation_multi_simple_epoch"


def _check_names(config, overrides: dict) -> None:
    """fairseq takes settings that there are not without a word."""
    known = {name for part in config.values() if part is not None for name in _names_of(part)}
    for name in overrides:
        if name not in known:
            raise UsageError(
                f"{name}: the checkpoint has no such setting; expected one of fairseq's, such as beam, or "
                "of the model's, such as moe_eval_capacity_factor"
            )


def _names_of(part) -> Iterable[str]:
    if isinstance(part, Namespace):
        return vars(part)
    return part.keys() if OmegaConf.is_dict(part) else ()


def _has_pieces(dictionary) -> bool:
    return any(symbol.startswith(_BEGINS_WORD) for symbol in dictionary.symbols)
