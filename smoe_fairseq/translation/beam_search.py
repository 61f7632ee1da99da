"""Beam search over the hypotheses of a batch, with the results of fairseq's `SequenceGenerator`.

Sooner: the vocabulary is gone through in pieces that stay in the cache, the first step has one hypothesis of
each sentence, and see `StepDecoder`.

Shapes: B sentences that are not finished, W hypotheses of each, R = B W rows, T tokens, C candidates, V
vocabulary.
"""

import threading
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.translation.best_of_many import best_of_many
from smoe_fairseq.translation.step_decoder import StepDecoder

_NEVER = float("-inf")
_CACHED = 3 << 20  # bytes of log-probabilities at a time, on a CPU


@dataclass
class BeamSearch:
    """What fairseq's flags of the same names say; called as its generators are, by ``task.inference_step``.

    A sentence is done when W hypotheses have ended, each among the W best candidates of its step. The score
    of one is the sum of its tokens' log-probabilities over ``length ** lenpen``, end of sentence included.
    """

    dictionary: object
    beam: int = 5
    lenpen: float = 1.0
    unkpen: float = 0.0
    min_len: int = 1
    max_len_a: float = 0.0
    max_len_b: int = 200

    def __post_init__(self):
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Ends the searches that are under way in other threads, by an exception."""
        self.stopped.set()

    @classmethod
    def options(cls) -> list[str]:
        """Names of the settings beside the dictionary."""
        return [each.name for each in fields(cls) if each.name != "dictionary"]

    @torch.inference_mode()
    def generate(
        self,
        models: list,
        sample: dict,
        prefix_tokens: Tensor | None = None,
        constraints: None = None,
        bos_token: int | None = None,
    ) -> list[list[dict]]:
        """Hypotheses of each sentence, best first, "tokens", "score" and "positional_scores" (to base e).

        Args:
            models: one `SMoETransformerModel` in evaluation mode.
            sample: fairseq's batch; "net_input" has "src_tokens" and "src_lengths".
            prefix_tokens: (B, P) without padding, with which every hypothesis begins.
            bos_token: what the decoder is given first; by default the end of sentence.
        """
        (model,) = models
        source_BS = sample["net_input"]["src_tokens"]
        encoder_out = model.encoder(source_BS)
        run = _Run(self, model.decoder, encoder_out, self._limits(model, source_BS), bos_token)
        for step in range(run.last_step + 1):
            forced_B = prefix_tokens[run.left, step] if _begins(prefix_tokens, step) else None
            if run.step(step, forced_B):
                break
            if self.stopped.is_set():
                raise RuntimeError("the search was stopped")
        return run.results()

    def _limits(self, model, source_BS: Tensor) -> Tensor:
        """(B,): how many tokens a translation has at most, beside its end."""
        length_B = source_BS.ne(self.dictionary.pad()).sum(1)
        limit_B = self.max_len_a * length_B.double() + float(self.max_len_b)
        return limit_B.clamp(max=model.max_decoder_positions() - 1).long()


def places_without(gone: set[int], number: int) -> list[int]:
    """What is to lie in each place of a shorter row: as before, or what fills the gaps from the end."""
    left = number - len(gone)
    last = (place for place in range(left, number) if place not in gone)
    return [next(last) if place in gone else place for place in range(left)]


def _begins(prefix_tokens: Tensor | None, step: int) -> bool:
    return prefix_tokens is not None and step < prefix_tokens.shape[1]


@dataclass
class _Ended:
    """Hypotheses that ended at one step."""

    tokens: Tensor  # (n, step + 1), with the end of sentence
    sums: Tensor  # (n, step + 1) of log-probabilities up to each


class _Run:
    """The search for one batch."""

    def __init__(self, search: BeamSearch, decoder, encoder_out: dict, limit_B: Tensor, bos):
        self.search, self.decoder = search, decoder
        dictionary = search.dictionary
        self.eos, self.pad, self.unk = dictionary.eos(), dictionary.pad(), dictionary.unk()
        self.beam = min(search.beam, len(dictionary) - 1)
        self.state = StepDecoder(decoder, encoder_out)
        batch, device = len(limit_B), limit_B.device
        self.limit_B = limit_B
        self.first_limit, self.last_step = int(limit_B.min()), int(limit_B.max())
        # Of each sentence: score, and which one it is of those that ended together.
        self.ended: list[list[tuple[float, _Ended, int]]] = [[] for _ in range(batch)]
        self.left = list(range(batch))  # sentences that are not finished
        # One hypothesis at first, which all begin with.
        first = self.eos if bos is None else bos
        self.tokens_BWT = torch.full((batch, 1, 1), first, device=device)
        self.sums_BWT = torch.zeros(batch, 1, 0, device=device)
        self.ignored_BW = torch.zeros(batch, self.beam, dtype=torch.bool, device=device)

    def step(self, step: int, forced_B: Tensor | None) -> bool:
        """Adds a token to each hypothesis; returns whether all sentences are finished."""
        features_RD = self.state.features(self.tokens_BWT.flatten(0, 1), self.tokens_BWT.shape[1])
        score_BC, index_BC = self._candidates(features_RD, step, forced_B)
        size = len(self.search.dictionary)
        parent_BC, token_BC = index_BC // size, index_BC % size

        ends_BC = (token_BC == self.eos) & (score_BC != _NEVER)
        ends_BC[:, : self.beam] &= ~self.ignored_BW
        finished = self._end(step, ends_BC[:, : self.beam], score_BC, parent_BC)
        if len(finished) == len(self.left):
            return True
        if finished:
            keep = places_without(finished, len(self.left))
            keep_B = torch.tensor(keep, device=score_BC.device)
            self.left = [self.left[b] for b in keep]
            score_BC, parent_BC, token_BC, ends_BC, self.ignored_BW = (
                x.index_select(0, keep_B)
                for x in (score_BC, parent_BC, token_BC, ends_BC, self.ignored_BW)
            )
            self.tokens_BWT, self.sums_BWT, self.limit_B = (
                x.index_select(0, keep_B) for x in (self.tokens_BWT, self.sums_BWT, self.limit_B)
            )
            self.first_limit = int(self.limit_B.min())
            self.state.keep(keep)

        # The best candidates that have not ended; where there are too few, ended ones that are ignored.
        candidates = score_BC.shape[1]
        ends_BC[:, : self.beam] |= self.ignored_BW
        rank_BC = torch.arange(candidates, device=score_BC.device) + ends_BC * 2 * self.beam
        rank_BW, chosen_BW = rank_BC.topk(self.beam, dim=1, largest=False)
        self.ignored_BW = rank_BW >= 2 * self.beam
        self._go_on(*(x.gather(1, chosen_BW) for x in (parent_BC, token_BC, score_BC)))
        return False

    def _candidates(
        self, features_RD: Tensor, step: int, forced_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums of log-probabilities and ``w V + token`` of the best, ``(B, C)``, best first."""
        batch, beam = self.tokens_BWT.shape[:2]
        size = len(self.search.dictionary)
        part = batch
        if features_RD.device.type == "cpu":
            part = max(1, _CACHED // (beam * size * 4))
        found = []
        for start in range(0, batch, part):
            sentences = slice(start, start + part)
            logits_RV = self.decoder.output_layer(features_RD[start * beam : (start + part) * beam])
            lprobs_RV = logits_RV.log_softmax(dim=-1, dtype=torch.float32)
            lprobs_BWV = lprobs_RV.view(-1, beam, size)
            forced = None if forced_B is None else forced_B[sentences]
            self._restrict(lprobs_BWV, step, forced, self.limit_B[sentences])
            if step > 0:
                lprobs_BWV += self.sums_BWT[sentences, :, -1:]
            flat = lprobs_BWV.flatten(1)
            number = min(2 * self.beam, flat.shape[1] - 1)
            best = best_of_many(flat, number)
            if best[0].isnan().any():  # which are taken for the greatest
                best = best_of_many(flat.masked_fill_(flat.isnan(), _NEVER), number)
            found.append(best)
        score_BC, index_BC = map(torch.cat, zip(*found, strict=True))
        return score_BC, index_BC

    def _restrict(self, lprobs_BWV, step: int, forced_B: Tensor | None, limit_B: Tensor) -> None:
        """Leaves only what may follow."""
        search = self.search
        lprobs_BWV[:, :, self.pad] = _NEVER
        lprobs_BWV[:, :, self.unk] -= search.unkpen
        if step >= self.first_limit:
            at_limit_B = step >= limit_B
            end_BW = lprobs_BWV[at_limit_B, :, self.eos]
            lprobs_BWV[at_limit_B] = _NEVER
            lprobs_BWV[at_limit_B, :, self.eos] = end_BW
        if forced_B is not None and step < self.first_limit:
            index_BW1 = forced_B.view(-1, 1, 1).expand(-1, lprobs_BWV.shape[1], 1)
            value_BW1 = lprobs_BWV.gather(2, index_BW1)
            lprobs_BWV.fill_(_NEVER).scatter_(2, index_BW1, value_BW1)
        elif step < search.min_len:
            lprobs_BWV[:, :, self.eos] = _NEVER

    def _end(self, step: int, ends_BW: Tensor, score_BC: Tensor, parent_BC: Tensor) -> set[int]:
        """Notes the hypotheses that end; returns which of the sentences are finished."""
        sentence_n, place_n = ends_BW.nonzero(as_tuple=True)
        at_limit = (
            {b for b, limit in enumerate(self.limit_B.tolist()) if step >= limit}
            if (step >= self.first_limit)
            else set()
        )
        if not len(sentence_n):
            return at_limit
        parent_n = parent_BC[sentence_n, place_n]
        sum_n = score_BC[sentence_n, place_n]
        tokens = self.tokens_BWT[sentence_n, parent_n, 1:]
        sums = self.sums_BWT[sentence_n, parent_n]
        ended = _Ended(
            torch.cat([tokens, torch.full_like(parent_n, self.eos).unsqueeze(1)], 1),
            torch.cat([sums, sum_n.unsqueeze(1)], 1),
        )
        scores = (sum_n / (step + 1) ** self.search.lenpen).tolist()
        finished = at_limit
        for i, (b, score) in enumerate(zip(sentence_n.tolist(), scores, strict=True)):
            of_sentence = self.ended[self.left[b]]
            if len(of_sentence) < self.beam:
                of_sentence.append((score, ended, i))
            if len(of_sentence) == self.beam:
                finished.add(b)
        return finished

    def _go_on(self, parent_BW: Tensor, token_BW: Tensor, score_BW: Tensor) -> None:
        self.state.follow(parent_BW)
        index_BW1 = parent_BW.unsqueeze(2)
        tokens, sums = (
            x.gather(1, index_BW1.expand(-1, -1, x.shape[2]))
            for x in (self.tokens_BWT, self.sums_BWT)
        )
        self.tokens_BWT = torch.cat([tokens, token_BW.unsqueeze(2)], dim=2)
        self.sums_BWT = torch.cat([sums, score_BW.unsqueeze(2)], dim=2)

    def results(self) -> list[list[dict]]:
        if not all(self.ended):
            raise UsageError(
                "the model gives no probabilities, but NaN: it has diverged in training"
            )
        return [self._sorted(ended) for ended in self.ended]

    @staticmethod
    def _sorted(ended: list[tuple[float, _Ended, int]]) -> list[dict]:
        order = torch.tensor([score for score, _, _ in ended]).sort(descending=True).indices
        hypotheses = []
        for score, at_step, i in (ended[n] for n in order.tolist()):
            sums = at_step.sums[i]
            hypotheses.append(
                {
                    "tokens": at_step.tokens[i],
                    "score": score,
                    "positional_scores": torch.diff(sums, prepend=sums.new_zeros(1)),
                }
            )
        return hypotheses
