"""A trained model that translates text: raw text in, detokenised text out."""

from smoe_fairseq.models.trained_model import TrainedModel
from smoe_fairseq.system.errors import UsageError

# Tasks whose models it does not open, and what to do.
_OTHERS = {
    "language_modeling": "is a language model: expected one of translation, or "
    "SMoETransformerLanguageModel.from_pretrained",
    "multilingual_translation": "has a model per language pair: expected one model, or fairseq-interactive "
    "with --task multilingual_translation",
}


class Translator(TrainedModel):
    """A `TrainedModel` whose directions are chosen call by call."""

    source_lang = target_lang = None

    @classmethod
    def of_run(
        cls, run, checkpoint_file=None, data=None, source_lang=None, target_lang=None, **overrides
    ) -> "Translator":
        """As `SMoETransformerModel.from_pretrained` says."""
        languages = {"source_lang": source_lang, "target_lang": target_lang}

        def prepare(saved, overrides: dict) -> None:
            if instead := _OTHERS.get(_name(saved.task)):
                raise UsageError(f"{run} {instead}")
            if not _is_multilingual(saved.task):  # which is told its direction at each translation
                overrides |= {name: lang for name, lang in languages.items() if lang is not None}

        translator = super().of_run(run, checkpoint_file, data, prepare, **overrides)
        translator.source_lang, translator.target_lang = source_lang, target_lang
        return translator

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
    return _name(task_config) == "translation_multi_simple_epoch"


def _name(task_config) -> str | None:
    return getattr(task_config, "_name", None) or getattr(task_config, "task", None)
