"""From what a search has found to translations: text, scores, requested capacity.

Shapes: B sentences, S source positions.
"""

import math

import torch
from torch import Tensor

from smoe_fairseq.models.translator import Translator
from smoe_fairseq.translation.hypothesis import Hypothesis, Translation
from smoe_fairseq.translation.requested import requested_capacity


class Readout:
    """For the direction that the translator is turned to."""

    def __init__(self, translator: Translator):
        self.translator = translator
        task = translator.task
        self.source, self.target = task.source_dictionary, task.target_dictionary
        self.first = self.target.eos()  # what the decoder is given before the translation
        self.unsaid = {self.first}
        if hasattr(task, "data_manager"):  # of several directions
            spec = task.args.langtoks["main"][1]
            if spec:  # a translation begins with the token of its language
                language = task.data_manager.get_decoder_langtok(task.args.target_lang, spec)
                self.unsaid.add(language)
                if task.args.lang_tok_replacing_bos_eos:
                    self.first = language

    def translations(
        self, texts: list[str], source_BS: Tensor, found: list[list[dict]], requested: bool
    ) -> list[Translation]:
        """Of a batch; ``found`` as fairseq's generators give it."""
        real_BS = source_BS != self.source.pad()
        of_source: list = [None] * len(texts)
        of_target: list = [[None] * len(hypotheses) for hypotheses in found]
        if requested:
            of_source, of_target = self._requested(source_BS, real_BS, found)
        return [
            Translation(
                text,
                [self._hypothesis(*both) for both in zip(found[b], of_target[b], strict=True)],
                [self.source[i] for i in source_BS[b][real_BS[b]].tolist()],
                of_source[b],
            )
            for b, text in enumerate(texts)
        ]

    def _hypothesis(self, found: dict, requested: list[float | None] | None) -> Hypothesis:
        ids = found["tokens"]
        text = self.target.string(ids, extra_symbols_to_ignore=self.unsaid)
        return Hypothesis(
            text=self.translator.detokenize(self.translator.remove_bpe(text)),
            score=float(found["score"]) / math.log(2),
            tokens=[self.target[i] for i in ids.tolist()],
            scores=[score / math.log(2) for score in found["positional_scores"].tolist()],
            requested=requested,
        )

    def _requested(
        self, source_BS: Tensor, real_BS: Tensor, found: list[list[dict]]
    ) -> tuple[list, list]:
        """Of each source's tokens, and of those of each of its hypotheses."""
        of_source: list = [None] * len(found)
        of_target: list = [[None] * len(hypotheses) for hypotheses in found]
        (model,) = self.translator.models
        for n in range(max(map(len, found))):  # all first hypotheses at once, then all second ones
            rows = [b for b, hypotheses in enumerate(found) if n < len(hypotheses)]
            ids = [found[b][n]["tokens"] for b in rows]
            given = [torch.cat([i.new_tensor([self.first]), i[:-1]]) for i in ids]
            encoder_BS, decoder_BT = requested_capacity(
                model, source_BS[rows], given, self.target.pad()
            )
            for i, b in enumerate(rows):
                if encoder_BS is not None:
                    of_source[b] = encoder_BS[i][real_BS[b]].tolist()
                if decoder_BT is not None:
                    of_target[b][n] = [*decoder_BT[i, 1 : len(given[i])].tolist(), None]
        return of_source, of_target
