"""A trained model and what goes with it: text in, text out, by fairseq's interface."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

from fairseq import checkpoint_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.hub_utils import GeneratorHubInterface
from omegaconf import OmegaConf

from smoe_fairseq.models.run_files import SUBWORDS, checkpoint_of, data_of, subwords_of
from smoe_fairseq.system.errors import UsageError

_BEGINS_WORD = "\u2581"  # how sentencepiece marks it


class TrainedModel(GeneratorHubInterface):
    """fairseq's interface to a trained model, in evaluation mode: ``sample``, ``score``, ``generate``.

    ``.cuda()`` moves it to a GPU.
    """

    def __init__(self, cfg, task, models, subwords: Path | None):
        super().__init__(cfg, task, models)
        if subwords is not None:
            self.bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(subwords)))
        self.eval()

    @classmethod
    def of_run(
        cls, run, checkpoint_file=None, data=None, prepare: Callable | None = None, **overrides
    ):
        """The model of a run's folder or checkpoint.

        Args:
            prepare: called with the saved config and ``overrides``, before these are written into it.

        Raises:
            UsageError: a file is missing, damaged, or does not go with the others.
        """
        checkpoint = checkpoint_of(run, checkpoint_file)
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
        saved = state.get("cfg")
        if saved is None or saved.get("task") is None:
            raise UsageError(
                f"{checkpoint} does not say what its task is: cfg.task is missing in it"
            )
        data = data_of(checkpoint, str(getattr(saved.task, "data", None) or ""), data)
        if prepare is not None:
            prepare(saved, overrides)
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
        return cls(cfg, task, models, subwords)

    def has_words(self, sentence: str) -> bool:
        """Whether there is anything to translate: subwords beside language and end of sentence."""
        return bool(self.apply_bpe(self.tokenize(sentence)).strip())

    def encode(self, sentence: str):
        tokens = super().encode(sentence)
        limit = self.max_positions
        longest = limit if isinstance(limit, int) else limit[0]  # of the source
        if len(tokens) > longest:
            raise UsageError(
                f"a sentence of {len(tokens)} tokens is longer than the model takes ({longest}): divide it; "
                f"it begins with {sentence[:40]!r}"
            )
        return tokens


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
