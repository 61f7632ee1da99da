"""Beam search over the hypotheses of a batch, with the results of fairseq's `SequenceGenerator`.

It is faster: log-probabilities are processed in parts that fit the cache, the first step has one hypothesis
per sentence, and see `StepDecoder`.

Shapes: B unfinished sentences, W hypotheses of each, R = B W rows, T tokens, C candidates, V vocabulary.
"""

import math
import threading
import zlib
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import flag_of, number_fault
from smoe_fairseq.forms import check
from smoe_fairseq.modules.experts import cast_once
from smoe_fairseq.translate.step_decoder import StepDecoder

GROUP = 16  # the fastest one in benchmarks


def best_of_many(x_BV: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """``x.topk(number)`` of each row: values and indices ``(B, C)``.

    The C greatest are in the C groups with the greatest maxima. The elements of a group are ``V // GROUP``
    apart, so computing the maxima is as fast as reading the row. Ties are broken arbitrarily, as by ``topk``.
    """
    groups = x_BV.shape[1] // GROUP
    if groups < 2 * number or x_BV.device.type != "cpu":
        best = x_BV.topk(number)
        return best.values, best.indices
    x_BMG = x_BV[:, : groups * GROUP].unflatten(1, (GROUP, groups))
    group_BC = x_BMG.amax(1).topk(number, sorted=False).indices
    step_M = torch.arange(GROUP, device=x_BV.device) * groups
    index_BN = (group_BC.unsqueeze(2) + step_M).flatten(1)
    if rest := x_BV.shape[1] - groups * GROUP:
        rest_N = torch.arange(groups * GROUP, groups * GROUP + rest, device=x_BV.device)
        index_BN = torch.cat([index_BN, rest_N.expand(len(x_BV), -1)], dim=1)
    best = x_BV.gather(1, index_BN).topk(number)
    return best.values, index_BN.gather(1, best.indices)


_NEVER = float("-inf")
# Log-probabilities at a time, on a CPU: so many bytes stay in the cache, but fewer rows would read the
# weights of the output projection more often than is worth it.
_CACHE_BYTES, _LEAST_ROWS = 3 << 20, 160


def option(default, words: str, least: float = -math.inf, most: float = math.inf):
    """A field of `SearchOptions`: its default, its help, and its lowest and highest value."""
    return field(default=default, metadata={"words": words, "limits": (least, most)})


_OF_SAMPLING = ("sampling_topk", "sampling_topp", "seed")


@dataclass(frozen=True)
class SearchOptions:
    """How to search; names and defaults are those of fairseq's flags.

    With ``sampling``, a sentence's translations depend on its tokens and on ``seed``, not on the batch.

    Raises:
        UsageError: a value is of another type or outside its limits, or two exclude each other.
    """

    beam: int = option(5, "beam size", 1)
    lenpen: float = option(1.0, "length penalty: above 1 favours longer translations", -10, 10)
    unkpen: float = option(0.0, "penalty for unknown words: above 0 gives fewer of them")
    min_len: int = option(1, "minimum length of a translation in tokens", 0)
    max_len_a: float = option(0.0, "A in A n + B, the maximum length for n source tokens", 0)
    max_len_b: int = option(200, "B in A n + B", 0)
    no_repeat_ngram_size: int = option(
        0, "n-grams of this size occur only once in a translation; 0: no limit", 0
    )
    temperature: float = option(1.0, "above 1 flattens probabilities, below 1 sharpens them", 1e-3)
    sampling: bool = option(
        False, "draw --beam translations at random by their probabilities, instead of beam search"
    )
    sampling_topk: int = option(-1, "with --sampling: draw from the X most probable tokens", 1)
    sampling_topp: float = option(
        -1.0, "with --sampling: draw from the fewest tokens whose probabilities sum to X", 1e-9, 1
    )
    seed: int = option(1, "random seed of --sampling; a line's samples depend on no other line", 0)

    def __post_init__(self):
        check(vars(self), {each.name: each.type for each in fields(self)}, "options")
        for each in fields(self):
            value, limits = getattr(self, each.name), each.metadata.get("limits")
            if limits and each.type is not bool and value != each.default:
                if fault := number_fault(value, each.type, *limits):
                    raise UsageError(f"{flag_of(each.name)} {value}: {fault}")
                if each.name in _OF_SAMPLING and not self.sampling:
                    raise UsageError(f"{flag_of(each.name)} {value}: expected it with --sampling")
        if not self.max_len_a and self.min_len > self.max_len_b:
            raise UsageError(f"--min-len {self.min_len}: above --max-len-b {self.max_len_b}")
        if self.sampling_topk > 0 and self.sampling_topp > 0:
            raise UsageError("--sampling-topk with --sampling-topp: expected one of them")


class BeamSearch:
    """A generator for ``task.inference_step`` of fairseq.

    A sentence is finished when W hypotheses have ended, each among the W best candidates of its step. A
    hypothesis's score is the sum of its tokens' log-probabilities over ``length ** lenpen``, including the
    end of sentence.

    Args:
        dictionary: of the target.
    """

    def __init__(self, dictionary, options: SearchOptions = SearchOptions()):
        self.dictionary, self.options = dictionary, options
        self.stopped = threading.Event()

    def stop(self) -> None:
        """End searches in other threads, which then raise RuntimeError."""
        self.stopped.set()

    @cast_once()
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
            models: `SMoETransformerModel`, in evaluation mode; the probabilities of several are averaged.
            sample: fairseq's batch; "net_input" has "src_tokens" and "src_lengths".
            prefix_tokens: (B, P), the first tokens of a sentence's hypotheses; padding allows any token.
            bos_token: the decoder's first token; by default the end of sentence.
        """
        source_BS = sample["net_input"]["src_tokens"]
        encoded = [model.encoder(source_BS, with_stats=False) for model in models]
        limit_B = self._limits(models, source_BS)
        run = _Run(self, [model.decoder for model in models], encoded, limit_B, bos_token)
        if self.options.sampling:
            run.draw(source_BS)
        for step in range(run.last_step + 1):
            forced = prefix_tokens is not None and step < prefix_tokens.shape[1]
            if run.step(step, prefix_tokens[run.left, step] if forced else None):
                break
            if self.stopped.is_set():
                raise RuntimeError("the search was stopped")
        return run.results()

    def _limits(self, models: list, source_BS: Tensor) -> Tensor:
        """(B,): the maximum length of a translation, without the end of sentence."""
        length_B = source_BS.ne(self.dictionary.pad()).sum(1)
        limit_B = self.options.max_len_a * length_B.double() + float(self.options.max_len_b)
        most = min(model.max_decoder_positions() for model in models) - 1
        if self.options.min_len > most:
            raise UsageError(f"--min-len {self.options.min_len}: above the model's limit, {most}")
        return limit_B.clamp(max=most).long()


def indices_without(removed: set[int], number: int) -> list[int]:
    """The old index of each remaining element, if gaps are filled from the end."""
    left = number - len(removed)
    last = (index for index in range(left, number) if index not in removed)
    return [next(last) if index in removed else index for index in range(left)]


@dataclass
class _Ended:
    """Hypotheses that ended at one step."""

    tokens: Tensor  # (n, step + 1), with the end of sentence
    sums: Tensor  # (n, step + 1), cumulative log-probabilities


class _Run:
    def __init__(self, search: BeamSearch, decoders: list, encoded: list, limit_B: Tensor, bos):
        self.options, self.decoders = search.options, decoders
        dictionary = search.dictionary
        self.eos, self.pad, self.unk = dictionary.eos(), dictionary.pad(), dictionary.unk()
        self.size = len(dictionary)  # V
        self.beam = min(self.options.beam, self.size - 1)
        self.states = list(map(StepDecoder, decoders, encoded))
        batch, device = len(limit_B), limit_B.device
        self.limit_B = limit_B
        self.first_limit, self.last_step = int(limit_B.min()), int(limit_B.max())
        # Of each sentence: score, hypotheses that ended at the same step, and index among them.
        self.ended: list[list[tuple[float, _Ended, int]]] = [[] for _ in range(batch)]
        self.left = list(range(batch))  # unfinished sentences
        # One hypothesis per sentence before the first step.
        first = self.eos if bos is None else bos
        self.tokens_BWT = torch.full((batch, 1, 1), first, device=device)
        self.sums_BWT = torch.zeros(batch, 1, 0, device=device)
        self.ignored_BW = torch.zeros(batch, self.beam, dtype=torch.bool, device=device)

    def draw(self, source_BS: Tensor) -> None:
        """Draw numbers from 0 to 1 for the tokens of all steps, with a generator for each sentence."""
        seed = zlib.crc32(str(self.options.seed).encode())
        drawn = []
        for ids_S in source_BS:
            ids = ids_S[ids_S != self.pad].cpu().numpy().astype("<i8")
            # Of a seed, torch reads 32 bits.
            generator = torch.Generator().manual_seed(zlib.crc32(ids.tobytes(), seed))
            shape = self.last_step + 1, self.beam
            drawn.append(torch.rand(*shape, generator=generator, dtype=torch.float64).t())
        self.drawn_BWT = torch.stack(drawn).to(source_BS.device)

    def step(self, step: int, forced_B: Tensor | None) -> bool:
        """Add a token to each hypothesis; returns whether all sentences are finished."""
        tokens_RT, beam = self.tokens_BWT.flatten(0, 1), self.tokens_BWT.shape[1]
        features = [state.features(tokens_RT, beam) for state in self.states]
        score_BC, index_BC = self._candidates(features, step, forced_B)
        parent_BC, token_BC = index_BC // self.size, index_BC % self.size

        ends_BC = (token_BC == self.eos) & (score_BC != _NEVER)
        ends_BC[:, : self.beam] &= ~self.ignored_BW
        finished = self._end(step, ends_BC[:, : self.beam], score_BC, parent_BC)
        if len(finished) == len(self.left):
            return True
        if finished:
            keep = indices_without(finished, len(self.left))
            keep_B = torch.tensor(keep, device=score_BC.device)
            self.left = [self.left[b] for b in keep]
            score_BC, parent_BC, token_BC, ends_BC, self.ignored_BW = (
                x.index_select(0, keep_B)
                for x in (score_BC, parent_BC, token_BC, ends_BC, self.ignored_BW)
            )
            self.tokens_BWT, self.sums_BWT, self.limit_B = (
                x.index_select(0, keep_B) for x in (self.tokens_BWT, self.sums_BWT, self.limit_B)
            )
            if self.options.sampling:
                self.drawn_BWT = self.drawn_BWT.index_select(0, keep_B)
            self.first_limit = int(self.limit_B.min())
            for state in self.states:
                state.keep(keep)

        # The best candidates that have not ended; if there are too few, ended ones that are ignored.
        candidates = score_BC.shape[1]
        ends_BC[:, : self.beam] |= self.ignored_BW
        rank_BC = torch.arange(candidates, device=score_BC.device) + ends_BC * 2 * self.beam
        rank_BW, chosen_BW = rank_BC.topk(self.beam, dim=1, largest=False)
        self.ignored_BW = rank_BW >= 2 * self.beam
        self._extend(*(x.gather(1, chosen_BW) for x in (parent_BC, token_BC, score_BC)))
        return False

    def _candidates(
        self, features: list[Tensor], step: int, forced_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums of log-probabilities and ``w V + token``, ``(B, C)``: the best, best first, or sampled ones.

        Args:
            features: ``(R, D)`` of each model.
        """
        batch, beam = self.tokens_BWT.shape[:2]
        size = self.size
        part = batch
        if features[0].device.type == "cpu":
            part = max(1, max(_CACHE_BYTES // (size * 4), _LEAST_ROWS) // beam)
        parts = []
        for start in range(0, batch, part):
            sentences = slice(start, start + part)
            lprobs_RV = self._lprobs(features, slice(start * beam, (start + part) * beam))
            lprobs_BWV = lprobs_RV.view(-1, beam, size)
            forced = None if forced_B is None else forced_B[sentences]
            limit, tokens = self.limit_B[sentences], self.tokens_BWT[sentences]
            self._restrict(lprobs_BWV, step, forced, limit, tokens)
            if self.options.sampling:
                parts.append(self._sample(lprobs_BWV, step, sentences))
                continue
            if step > 0:
                lprobs_BWV += self.sums_BWT[sentences, :, -1:]
            flat = lprobs_BWV.flatten(1)
            number = min(2 * self.beam, flat.shape[1] - 1)
            best = best_of_many(flat, number)
            if best[0].isnan().any():  # topk sorts NaN first
                best = best_of_many(flat.masked_fill_(flat.isnan(), _NEVER), number)
            parts.append(best)
        score_BC, index_BC = map(torch.cat, zip(*parts, strict=True))
        return score_BC, index_BC

    def _lprobs(self, features: list[Tensor], rows: slice) -> Tensor:
        """Logarithms of the models' mean probabilities of the next token, for some rows."""
        lprobs = []
        for decoder, features_RD in zip(self.decoders, features, strict=True):
            logits_RV = decoder.output_layer(features_RD[rows])
            if self.options.temperature != 1:
                logits_RV = logits_RV.div_(self.options.temperature)
            lprobs.append(logits_RV.log_softmax(dim=-1, dtype=torch.float32))
        if len(lprobs) == 1:
            return lprobs[0]
        return torch.stack(lprobs).logsumexp(0).sub_(math.log(len(lprobs)))

    def _sample(self, lprobs_BWV: Tensor, step: int, sentences: slice) -> tuple[Tensor, Tensor]:
        """A token for each of the W hypotheses: score and index ``(B, W)``, as `_candidates` returns them."""
        options, batch = self.options, len(lprobs_BWV)
        # A hypothesis that cannot continue, because of NaN or the restrictions, gets a token at -inf.
        lprobs_BWV = lprobs_BWV.nan_to_num(nan=_NEVER, neginf=_NEVER)
        if options.sampling_topp > 0:
            lprobs_BWC, token_BWC = lprobs_BWV.sort(dim=2, descending=True)
            before_BWC = lprobs_BWC.exp().cumsum(2).roll(1, 2)
            before_BWC[:, :, 0] = 0
            lprobs_BWC = lprobs_BWC.masked_fill(before_BWC >= options.sampling_topp, _NEVER)
        elif options.sampling_topk > 0:
            best = lprobs_BWV.topk(min(options.sampling_topk, self.size), dim=2)
            lprobs_BWC, token_BWC = best.values, best.indices
        else:
            lprobs_BWC, token_BWC = lprobs_BWV, None
        sums_BWC = lprobs_BWC.double().exp().cumsum(2).expand(batch, self.beam, -1)
        threshold_BW1 = self.drawn_BWT[sentences, :, step : step + 1] * sums_BWC[:, :, -1:]
        index_BW1 = torch.searchsorted(sums_BWC.contiguous(), threshold_BW1, right=True)
        index_BW1.clamp_(max=sums_BWC.shape[2] - 1)
        score_BW = lprobs_BWC.expand(batch, self.beam, -1).gather(2, index_BW1).squeeze(2)
        if token_BWC is not None:
            index_BW1 = token_BWC.expand(batch, self.beam, -1).gather(2, index_BW1)
        token_BW = index_BW1.squeeze(2)
        if step == 0:
            return score_BW, token_BW
        parent_W = torch.arange(self.beam, device=token_BW.device)
        return score_BW + self.sums_BWT[sentences, :, -1], parent_W * self.size + token_BW

    def _restrict(
        self, lprobs_BWV, step: int, forced_B: Tensor | None, limit_B: Tensor, tokens_BWT: Tensor
    ) -> None:
        options = self.options
        lprobs_BWV[:, :, self.pad] = _NEVER
        lprobs_BWV[:, :, self.unk] -= options.unkpen
        if step >= self.first_limit:
            at_limit_B = step >= limit_B
            end_BW = lprobs_BWV[at_limit_B, :, self.eos]
            lprobs_BWV[at_limit_B] = _NEVER
            lprobs_BWV[at_limit_B, :, self.eos] = end_BW
        if forced_B is not None and step < self.first_limit:
            index_BW1 = forced_B.view(-1, 1, 1).expand(-1, lprobs_BWV.shape[1], 1)
            value_BW1 = lprobs_BWV.gather(2, index_BW1)
            free_B = forced_B == self.pad
            lprobs_BWV.masked_fill_(~free_B.view(-1, 1, 1), _NEVER)
            lprobs_BWV.scatter_(2, index_BW1, value_BW1.masked_fill_(free_B.view(-1, 1, 1), _NEVER))
        if step < options.min_len:
            lprobs_BWV[:, :, self.eos].masked_fill_((step < limit_B).unsqueeze(1), _NEVER)
        output_BWT = tokens_BWT[:, :, 1:]  # without the decoder's first token
        if 0 < (n := options.no_repeat_ngram_size) <= output_BWT.shape[2]:
            ngrams_BWNn = output_BWT.unfold(2, n, 1)
            last_BW1n = output_BWT[:, :, output_BWT.shape[2] + 1 - n :].unsqueeze(2)
            again_BWN = (ngrams_BWNn[..., :-1] == last_BW1n).all(3)
            if forced_B is not None:  # a prefix may repeat itself
                again_BWN &= (forced_B == self.pad).view(-1, 1, 1)
            banned_BWN = ngrams_BWNn[..., -1].masked_fill(~again_BWN, self.pad)
            lprobs_BWV.scatter_(2, banned_BWN, _NEVER)  # padding is never chosen anyway

    def _end(self, step: int, ends_BW: Tensor, score_BC: Tensor, parent_BC: Tensor) -> set[int]:
        """Record the hypotheses that end; returns the sentences that are finished."""
        sentence_n, candidate_n = ends_BW.nonzero(as_tuple=True)
        finished = set()
        if step >= self.first_limit:
            finished = {b for b, limit in enumerate(self.limit_B.tolist()) if step >= limit}
        if not len(sentence_n):
            return finished
        parent_n = parent_BC[sentence_n, candidate_n]
        sum_n = score_BC[sentence_n, candidate_n]
        tokens = self.tokens_BWT[sentence_n, parent_n, 1:]
        sums = self.sums_BWT[sentence_n, parent_n]
        ended = _Ended(
            torch.cat([tokens, torch.full_like(parent_n, self.eos).unsqueeze(1)], 1),
            torch.cat([sums, sum_n.unsqueeze(1)], 1),
        )
        scores = (sum_n / (step + 1) ** self.options.lenpen).tolist()
        for i, (b, score) in enumerate(zip(sentence_n.tolist(), scores, strict=True)):
            of_sentence = self.ended[self.left[b]]
            if len(of_sentence) < self.beam:
                of_sentence.append((score, ended, i))
            if len(of_sentence) == self.beam:
                finished.add(b)
        return finished

    def _extend(self, parent_BW: Tensor, token_BW: Tensor, score_BW: Tensor) -> None:
        for state in self.states:
            state.reorder(parent_BW)
        index_BW1 = parent_BW.unsqueeze(2)
        tokens, sums = (
            x.gather(1, index_BW1.expand(-1, -1, x.shape[2]))
            for x in (self.tokens_BWT, self.sums_BWT)
        )
        self.tokens_BWT = torch.cat([tokens, token_BW.unsqueeze(2)], dim=2)
        self.sums_BWT = torch.cat([sums, score_BW.unsqueeze(2)], dim=2)

    def results(self) -> list[list[dict]]:
        if not all(self.ended):
            raise UsageError("the model yields NaN: it has diverged in training")
        return [self._hypotheses(ended) for ended in self.ended]

    @staticmethod
    def _hypotheses(ended: list[tuple[float, _Ended, int]]) -> list[dict]:
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
