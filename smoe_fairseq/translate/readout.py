"""From the results of a search to translations: text, scores, requested capacity.

Shapes: B sentences, S source positions, T target positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from fairseq.hub_utils import GeneratorHubInterface
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from smoe_fairseq.errors import UsageError
from smoe_fairseq.translate.directions import is_multilingual
from smoe_fairseq.translate.sentences import join_sentences


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    Args:
        text: detokenised.
        score: ``sum(scores) / len(scores) ** lenpen``, as fairseq-generate prints it.
        tokens: subwords, with the end of sentence.
        scores: log-probability of each token, to base 2.
        requested: requested capacity of each token as the decoder's input, mean over its MoE layers; None for
            the end of sentence, which is never fed back. None instead of a list for a dense decoder, or if
            it was not requested.
    """

    text: str
    score: float
    tokens: list[str]
    scores: list[float]
    requested: list[float | None] | None = None


@dataclass(frozen=True)
class Translation:
    """A text and its translations, best first.

    Args:
        tokens: the encoder's input, including tokens of languages and the end of sentence.
        requested: requested capacity of these tokens, see `Hypothesis`.
        parts: number of parts, more than one if the text was divided.
    """

    source: str
    hypotheses: list[Hypothesis]
    tokens: list[str]
    requested: list[float] | None = None
    parts: int = 1


def joined(
    source: str, parts: list[Translation], gaps: list[str], nbest: int, lenpen: float
) -> Translation:
    """The translation of a text from those of its parts: hypotheses of equal rank are concatenated.

    A text without parts has ``nbest`` empty hypotheses.

    Args:
        gaps: before, between and after the parts, see `join_sentences`.
    """
    number = min((len(part.hypotheses) for part in parts), default=nbest)
    by_rank = ([part.hypotheses[n] for part in parts] for n in range(number))
    return Translation(
        source,
        [_concatenated(hypotheses, gaps, lenpen) for hypotheses in by_rank],
        [token for part in parts for token in part.tokens],
        _flat([part.requested for part in parts]),
        len(parts),
    )


def _concatenated(hypotheses: list[Hypothesis], gaps: list[str], lenpen: float) -> Hypothesis:
    text = join_sentences([hypothesis.text for hypothesis in hypotheses], gaps)
    if len(hypotheses) == 1:
        return replace(hypotheses[0], text=text)
    scores = [score for hypothesis in hypotheses for score in hypothesis.scores]
    return Hypothesis(
        text,
        sum(scores) / max(1, len(scores)) ** lenpen,
        [token for hypothesis in hypotheses for token in hypothesis.tokens],
        scores,
        _flat([hypothesis.requested for hypothesis in hypotheses]),
    )


def _flat(parts: list[list | None]) -> list | None:
    return None if None in parts or not parts else [value for part in parts for value in part]


@torch.inference_mode()
def requested_capacity(
    model: nn.Module, source_BS: Tensor, decoder_input: list[Tensor], padding: int
) -> tuple[Tensor | None, Tensor | None]:
    """Gates that each translated token passed, means over the MoE layers of a side, from one more pass.

    Args:
        decoder_input: of each sentence, including its first token.

    Returns:
        ``(B, S)`` and ``(B, T)``; None for a side without MoE layers.
    """
    input_BT = pad_sequence(decoder_input, batch_first=True, padding_value=padding)
    encoder_out = model.encoder(source_BS)
    _, extra = model.decoder.extract_features(input_BT, encoder_out)
    sides = {"encoder": [], "decoder": []}
    for name, stats in zip(extra["moe_layers"], extra["moe_stats"], strict=True):
        sides[name.split(".")[0]].append(stats.requested_capacity)
    encoder_BS, decoder_BT = (
        torch.stack(layers).float().mean(0) if layers else None for layers in sides.values()
    )
    return encoder_BS, decoder_BT


class Readout:
    """Converts results in the direction of ``task``, see `directions.task_for`."""

    def __init__(self, translator: GeneratorHubInterface, models: Sequence[nn.Module], task):
        self.translator, self.models = translator, models
        self.source, self.target = task.source_dictionary, task.target_dictionary
        self.first = self.target.eos()  # the decoder's first token
        self.forced: list[int] = []  # first tokens of every translation
        self.hidden = {self.first}
        if is_multilingual(task):
            spec = task.args.langtoks["main"][1]
            if spec:  # translations begin with the token of their language
                language = task.data_manager.get_decoder_langtok(task.args.target_lang, spec)
                self.hidden.add(language)
                if task.args.lang_tok_replacing_bos_eos:
                    self.first = language
                else:
                    self.forced = [language]

    def prefixes(self, text: str, begins_B: list[bool]) -> Tensor | None:
        """``(B, P)``: first tokens of each translation; ``text`` only if it begins that of a whole text.

        None if the task determines them.

        Raises:
            UsageError: the model lacks a token of ``text``, or it ends with a blank.
        """
        if not text or not any(begins_B):
            return None
        if text != text.rstrip():
            raise UsageError(
                f"--prefix {text!r}: expected no blank at its end, which says nothing of the next letter"
            )
        ids = encoded(self.translator, text, self.target).tolist()[:-1]
        if self.target.unk() in ids:
            raise UsageError(
                f"--prefix {text!r}: expected text without characters that the model lacks"
            )
        free = [self.target.pad()] * len(ids)
        return torch.tensor([self.forced + (ids if begins else free) for begins in begins_B])

    def translations(
        self, texts: list[str], source_BS: Tensor, results: list[list[dict]], requested: bool
    ) -> list[Translation]:
        """The translations of a batch; ``results`` are those of one of fairseq's generators.

        ``requested`` needs a single model.
        """
        real_BS = source_BS != self.source.pad()
        source_capacity: list = [None] * len(texts)
        target_capacity: list = [[None] * len(hypotheses) for hypotheses in results]
        # All first hypotheses at once, then all second ones.
        for n in range(max(map(len, results)) if requested else 0):
            rows = [b for b, hypotheses in enumerate(results) if n < len(hypotheses)]
            ids = [results[b][n]["tokens"] for b in rows]
            inputs = [torch.cat([i.new_tensor([self.first]), i[:-1]]) for i in ids]
            encoder_BS, decoder_BT = requested_capacity(
                self.models[0], source_BS[rows], inputs, self.target.pad()
            )
            for i, b in enumerate(rows):
                if encoder_BS is not None:
                    source_capacity[b] = encoder_BS[i][real_BS[b]].tolist()
                if decoder_BT is not None:
                    target_capacity[b][n] = [*decoder_BT[i, 1 : len(inputs[i])].tolist(), None]
        return [
            Translation(
                text,
                list(map(self._hypothesis, results[b], target_capacity[b])),
                [self.source[i] for i in source_BS[b][real_BS[b]].tolist()],
                source_capacity[b],
            )
            for b, text in enumerate(texts)
        ]

    def text(self, ids: Tensor) -> str:
        """The detokenised text, without the token of its language."""
        text = self.target.string(ids, extra_symbols_to_ignore=self.hidden)
        return self.translator.detokenize(self.translator.remove_bpe(text))

    def _hypothesis(self, result: dict, requested: list[float | None] | None) -> Hypothesis:
        ids = result["tokens"]
        return Hypothesis(
            text=self.text(ids),
            score=float(result["score"]) / math.log(2),
            tokens=[self.target[i] for i in ids.tolist()],
            scores=[score / math.log(2) for score in result["positional_scores"].tolist()],
            requested=requested,
        )


def encoded(translator: GeneratorHubInterface, text: str, dictionary) -> Tensor:
    """The subwords of a text, and the end of sentence."""
    subwords = translator.apply_bpe(translator.tokenize(text))
    return dictionary.encode_line(subwords, add_if_not_exist=False).long()
