"""Requested capacity against quality: what dropping and the exit bias cost."""

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data.multilingual.sampled_multi_dataset import SampledMultiDataset
from sacrebleu import corpus_bleu
from torch import nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.gates.linear import exit_bias, exit_biases_of
from smoe_fairseq.modules.layer import RoutingStats
from smoe_fairseq.modules.statistics import (
    FIFTHS,
    by_position,
    is_limited_in_training,
    percent_dropped,
    training_capacity,
)


@dataclass
class CapacityCheck:
    """The same batches without a limit and with training's, references as decoder input.

    Args:
        tokens: target tokens, </s> included.
        nll_loss: in bits per target token, under evaluation's capacity: `inputs.load` takes all limits off.
        limited_nll_loss: the same with experts limited as in training.
        fifths: by MoE layer ``(2, FIFTHS)``, first choices by position and of these the dropped ones.
    """

    tokens: int = 0
    nll_loss: float = 0.0
    limited_nll_loss: float = 0.0
    fifths: dict[str, np.ndarray] = field(default_factory=dict)

    def percent_dropped(self, side: str) -> np.ndarray:
        """``(FIFTHS,)``, all MoE layers of one side taken together."""
        return percent_dropped(sum(t for n, t in self.fifths.items() if n.startswith(side)))

    def sides(self) -> list[str]:
        return list(dict.fromkeys(name.split(".")[0] for name in self.fifths))

    @property
    def gap(self) -> float:
        """Well above 0: experts get tokens that they were not trained on."""
        return self.nll_loss - self.limited_nll_loss


@torch.no_grad()
def check_capacity(
    model: nn.Module,
    task,
    directions: list[str],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
) -> CapacityCheck | None:
    """Runs a model over a subset twice; None where training has no limit."""
    if not is_limited_in_training(model):
        return None
    torch.manual_seed(inputs.SEED)  # for tokens that are drawn (`--moe-drop-order random`)
    found = CapacityCheck(
        fifths={name: np.zeros((2, FIFTHS), dtype=np.int64) for name in moe_blocks(model)}
    )
    for sample in samples(model, task, directions, subset, sentences, max_tokens):
        found.tokens += sample["ntokens"]
        found.nll_loss += nll(model, sample)[0]
        with training_capacity(model):
            limited, moe_stats = nll(model, sample)
        found.limited_nll_loss += limited
        for name, stats in moe_stats.items():
            found.fifths[name] += by_position(stats).cpu().numpy()
    tokens = max(found.tokens, 1)
    found.nll_loss /= tokens
    found.limited_nll_loss /= tokens
    return found


def samples(
    model: nn.Module,
    task,
    directions: list[str],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
) -> Iterator[dict]:
    """Batches as in training: sentences of about one length from all directions.

    What is dropped depends on what else is in a batch. ``sentences``: how many to draw, on average of
    each direction; None: all.
    """
    parts = [part for name in directions for part in inputs.datasets(task, name, subset)]
    together = parts[0]
    if len(parts) > 1:
        shared = inputs.is_multilingual(task) and task.data_manager._shared_collater()
        together = SampledMultiDataset(parts, shared_collater=shared, shuffle=False)
    number = None if sentences is None else sentences * len(directions)
    order = np.random.default_rng(inputs.SEED).permutation(len(together))
    batches, _ = inputs.batches(together, inputs.longest(model, task), number, max_tokens, order)
    for batch in batches:
        yield inputs.on_device(model, together.collater([together[i] for i in batch]))


def nll(model: nn.Module, sample: dict) -> tuple[float, dict[str, RoutingStats]]:
    """Bits of all target tokens of a batch, and the statistics of the MoE layers that ran."""
    logits, extra = model(**sample["net_input"])
    target = sample["target"].view(-1)
    padding = model.decoder.dictionary.pad()
    nats = F.cross_entropy(
        logits.view(len(target), -1).float(), target, ignore_index=padding, reduction="sum"
    )
    moe_stats = dict(zip(extra["moe_layers"], extra["moe_stats"], strict=True))
    return nats.item() / math.log(2), moe_stats


# Quality and time over the exit bias: a subset translated by one model with several biases in
# turns.

BEAM = 5


@dataclass
class Point:
    """One direction with one bias.

    Args:
        seconds: of the search alone; on a CPU those of the process itself, all its threads together, since
            by the clock other work on the machine would count; on a GPU by the clock.
        stops, visits: strata stopped at with the references as decoder input, and tokens, over all blocks.
        bits: of all target tokens, references as decoder input.
        targets: these tokens, </s> included.
        translations, references: text, as far as the dictionary knows it.
    """

    direction: str
    bias: float
    seconds: float = 0.0
    stops: int = 0
    visits: int = 0
    bits: float = 0.0
    targets: int = 0
    translations: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> int:
        return len(self.references)

    @property
    def requested_capacity(self) -> float:
        return self.stops / max(self.visits, 1)

    @property
    def nll_loss(self) -> float:
        """Bits per target token."""
        return self.bits / max(self.targets, 1)

    @property
    def bleu(self) -> float:
        """In points, by sacreBLEU's defaults."""
        return corpus_bleu(self.translations, [self.references]).score


@dataclass(frozen=True)
class Curve:
    """Points of all directions and biases; means over the directions, biases ascending."""

    points: list[Point]

    @property
    def biases(self) -> list[float]:
        return sorted({point.bias for point in self.points})

    def mean(self, name: str) -> list[float]:
        """Of an attribute of the points, by bias."""
        means = []
        for bias in self.biases:
            values = [getattr(point, name) for point in self.points if point.bias == bias]
            means.append(sum(values) / len(values))
        return means

    def milliseconds(self) -> list[float]:
        """Per sentence, by bias; of all directions together."""
        of_bias = [[p for p in self.points if p.bias == bias] for bias in self.biases]
        return [1000 * sum(p.seconds for p in of) / sum(p.sentences for p in of) for of in of_bias]


def check(model: nn.Module, task) -> None:
    """Raise UsageError where no gate has a later stratum, or the model does not translate."""
    if inputs.is_language_model(task):
        raise UsageError(
            "--exit-bias: translations are compared, and this is a language model; leave it out"
        )
    if not any(each.own_experts < each.num_experts for each in exit_biases_of(model)):
        raise UsageError(
            "--exit-bias: no gate of this model sees later strata; expected one with several, such as "
            "--smoe-strata 4-4, and without --moe-stacked"
        )


@torch.no_grad()
def curve(
    model: nn.Module,
    task,
    directions: list[str],
    biases: list[float],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
) -> Curve:
    """Translates a subset with each bias, beam 5, by the task's own search.

    Each batch is translated with all biases, in rotating order, so that other work on the machine slows
    all of them alike.

    Args:
        sentences: of each direction; None: all.
        max_tokens: of a batch, padding included.
    """
    turn, points = 0, []
    for direction in directions:
        if inputs.is_multilingual(task):
            task.args.source_lang, task.args.target_lang = direction.split("-")
        generator = task.build_generator([model], Namespace(beam=BEAM))
        of_bias = [Point(direction, bias) for bias in biases]
        points += of_bias
        for sample in inputs.Samples(model, task, direction, subset, sentences, max_tokens):
            if turn == 0:  # warm-up: no bias pays for what is made once
                task.inference_step(generator, [model], sample)
            for n in range(len(biases)):
                _run(of_bias[(turn + n) % len(biases)], model, task, generator, sample)
            turn += 1
    return Curve(points)


def _run(point: Point, model: nn.Module, task, generator, sample: dict) -> None:
    with exit_bias(model, point.bias):
        start = _seconds(sample)
        found = task.inference_step(generator, [model], sample)
        point.seconds += _seconds(sample) - start
        bits, moe_stats = nll(model, sample)
    point.bits += bits
    point.targets += sample["ntokens"]
    for stats in moe_stats.values():
        point.stops += int(stats.requested_capacity.sum())
        point.visits += int((stats.requested_capacity > 0).sum())
    point.translations += [_text(task, best[0]["tokens"]) for best in found]
    point.references += [_text(task, tokens) for tokens in sample["target"]]


def _text(task, tokens: torch.Tensor) -> str:
    """Words of a sentence, subwords joined again."""
    dictionary = task.target_dictionary
    left_out = {dictionary.pad(), *map(dictionary.index, inputs.language_tokens(task))}
    left_out.discard(dictionary.unk())
    pieces = dictionary.symbols
    joint = "sentencepiece" if any(piece.startswith("\u2581") for piece in pieces) else None
    if joint is None and any(piece.endswith("@@") for piece in pieces):
        joint = "@@ "
    return dictionary.string(tokens, joint, extra_symbols_to_ignore=left_out)


def _seconds(sample: dict) -> float:
    if not sample["target"].is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
