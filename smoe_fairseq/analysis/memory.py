"""What training takes of memory, by a formula.

What each sublayer keeps for the backward pass and takes during it is a sum of its shapes; the peak
is the highest point of the way back through them. docs/cost.md compares it with measurements.

Shapes: T tokens, S positions of a sentence, D embedding, H heads, F feed-forward, V vocabulary.
"""

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
from torch import nn

from smoe_fairseq.analysis.cost import build_meta_model, config_of, is_language_model
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.grouped import can_group, one_kernel
from smoe_fairseq.modules.layer import StratifiedMoE
from smoe_fairseq.modules.parallel import Placement

LENGTH = 32  # tokens of a sentence, where nothing is known of the data
BUFFER = 2**28  # numbers that legacy_ddp sends at a time

# Of each weight: numbers in the optimizer's state, and in float32 copies that its step makes of the
# largest parameter. Those of SGD depend on --momentum.
OPTIMIZERS = {
    "adadelta": (2, 2),
    "adafactor": (0, 2),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adamax": (2, 1),
    "nag": (1, 0),
    "sgd": (0, 0),
}


@dataclass(frozen=True)
class Run:
    """A training run: its flags of fairseq-train, as `parse_run` gives them, and what they leave open.

    Attributes:
        vocabulary: entries of the dictionary, special ones included.
        length: tokens of each sentence, on the source and on the target side, or of each text.
    """

    flags: Namespace
    vocabulary: int
    processes: int = 1
    length: int = LENGTH

    def with_flags(self, **changed) -> "Run":
        return replace(self, flags=Namespace(**vars(self.flags) | changed))

    @property
    def half(self) -> torch.dtype | None:
        """The type to compute in; None: float32."""
        flags = self.flags
        if flags.bf16 or flags.memory_efficient_bf16:
            return torch.bfloat16
        return torch.float16 if flags.fp16 or flags.memory_efficient_fp16 else None

    @property
    def bytes(self) -> int:
        """Bytes of a weight, a gradient or an activation."""
        return 4 if self.half is None else 2

    @property
    def memory_efficient(self) -> bool:
        """Whether there is no copy of the weights in float32."""
        return self.flags.memory_efficient_fp16 or self.flags.memory_efficient_bf16

    @property
    def tokens(self) -> int:
        """Tokens of a batch on each side."""
        most = max(1, self.flags.max_tokens // self.length)
        return min(most, self.flags.batch_size or most) * self.length


@dataclass(frozen=True)
class Forecast:
    """Bytes of one process: of the one that has most, if experts or optimizer state are sharded.

    The peak is below the sum of the others where gradients appear while activations are freed, and
    above it where a sublayer or the optimizer needs temporary memory. What the device, torch and its
    allocator need for themselves is not counted.
    """

    weights: int
    gradients: int  # of the weights, in their type
    optimizer: int  # its state, and in half precision copies in float32 of weights and gradients
    exchange: int  # what gradients of several processes are gathered in
    activations: int  # what the forward pass of a batch keeps for the backward pass
    peak: int  # of an update

    @property
    def memory(self) -> int:
        """What is held from one update to the next."""
        return self.weights + self.gradients + self.optimizer


def forecast(run: Run, model: nn.Module | None = None) -> Forecast:
    """The memory of an update.

    It assumes that every gate chooses evenly and that all sentences have the same length.

    Args:
        model: the run's, on the meta device or another, with all experts; built if it is missing.

    Raises:
        UsageError, ValueError: flags make no model, or experts do not fit so many processes.
    """
    flags = run.flags
    if flags.amp:
        raise UsageError(
            "--amp cannot be forecast: it needs a GPU to say what is computed in which type"
        )
    if flags.optimizer not in OPTIMIZERS:
        raise UsageError(f"--optimizer {flags.optimizer}: what it takes of memory is not known")
    model = model or build_meta_model(flags, run.vocabulary)
    shared, experts = _parameters(run, model)
    size = sum(shared) + sum(experts)
    layers = _Sublayers(run, model).layers()
    activations = sum(part.kept for layer in layers for part in layer)
    gradients = size * run.bytes
    state, copies = OPTIMIZERS[flags.optimizer]
    if getattr(flags, "momentum", 0) and flags.optimizer == "sgd":
        state = 1
    spread = sum(shared)
    if flags.zero_sharding == "os" and run.processes > 1:
        spread = _largest_share(shared, run.processes)
    optimizer = 4 * state * (spread + sum(experts))
    largest = max(shared + experts)
    if run.memory_efficient:
        copies += 2  # the parameter and its gradient
    elif run.half is not None:
        optimizer += 8 * size
        largest = largest if flags.fp16_no_flatten_grads else size
    exchange = size if run.processes > 1 else 0
    if flags.ddp_backend in ("legacy_ddp", "no_c10d"):
        exchange = min(exchange, BUFFER)
    exchange *= run.bytes
    way_back = _peak_of_backward(layers, gradients if flags.update_freq > 1 else 0)
    peak = max(way_back, gradients + 4 * copies * largest) + gradients + optimizer + exchange
    return Forecast(gradients, gradients, optimizer, exchange, round(activations), round(peak))


def _parameters(run: Run, model: nn.Module) -> tuple[list[int], list[int]]:
    """Sizes of the parameters that all processes have, and of the experts' of this process alone."""
    sharded = {}
    for block in moe_blocks(model).values():
        if (place := _placement(run, block)).is_sharded:
            sharded |= dict.fromkeys(block.experts.parameters(), place.group_size)
    own = [parameter.numel() // group for parameter, group in sharded.items()]
    return [p.numel() for p in model.parameters() if p not in sharded], own


def _placement(run: Run, block: StratifiedMoE) -> Placement:
    """The placement of the last process, whose experts every gate sees."""
    processes = run.processes if run.flags.expert_parallel else 1
    return Placement(block.strata.num_experts, processes, processes - 1)


def _largest_share(sizes: list[int], processes: int) -> int:
    """As fairscale's OSS shares parameters out: each to the process that has least so far."""
    shares = [0] * processes
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)


@dataclass(frozen=True)
class Part:
    """Bytes of one sublayer."""

    kept: float  # by the forward pass for the backward pass
    moment: float  # what the backward pass takes for a moment
    weights: float  # gradients of its weights


def _peak_of_backward(layers: list[list[Part]], earlier: float) -> float:
    """The most that activations and gradients take; ``earlier`` gradients are there before."""
    kept = sum(part.kept for layer in layers for part in layer)
    gradients, peak = earlier, 0.0
    for part in (part for layer in reversed(layers) for part in reversed(layer)):
        peak = max(peak, kept + gradients + part.weights + part.moment)
        kept -= part.kept
        if not earlier:
            gradients += part.weights
    return peak


class _Sublayers:
    """What the sublayers of a run's model keep and take.

    Attention within a side is torch's fused one, which keeps no scores; on a CPU it has no dropout.
    A GPU keeps one byte of each number that dropout has seen.
    """

    def __init__(self, run: Run, model: nn.Module):
        self.run, self.model = run, model
        self.config = config_of(run.flags)
        self.tokens, self.bytes = run.tokens, run.bytes
        self.mask = run.bytes if run.flags.cpu else 1
        self.hidden = 1 if self.config.activation_fn == "relu" else 2  # kept of an activation

    def layers(self) -> list[list[Part]]:
        """From the input to the output."""
        sides = [s for s in (getattr(self.model, "encoder", None), self.model.decoder) if s]
        layers = [self._layer(layer) for side in sides for layer in side.layers]
        embeddings, output = self._ends(sides, layers)
        if self.run.flags.checkpoint_activations:
            x = self.rows(self.model.decoder.embed_tokens.embedding_dim)
            layers = [self._checkpointed(layer, x) for layer in layers]
        return [[embeddings], *layers, [output]]

    @staticmethod
    def _checkpointed(layer: list[Part], x: float) -> list[Part]:
        """Only the input ``x`` is kept, and the whole layer recomputed."""
        again = sum(part.kept for part in layer) + max(part.moment for part in layer)
        return [Part(x, again, sum(part.weights for part in layer))]

    def _ends(self, sides: list[nn.Module], layers: list[list[Part]]) -> tuple[Part, Part]:
        """Embeddings, and output projection with loss, whose log-probabilities are in float32."""
        rows = self.rows(self.model.decoder.embed_tokens.embedding_dim)
        logits = self.tokens * self.run.vocabulary
        matrix = self.run.vocabulary * self.model.decoder.output_embed_dim * self.bytes
        in_layers = sum(part.weights for layer in layers for part in layer)
        others = sum(map(sum, _parameters(self.run, self.model))) * self.bytes - in_layers
        results = sum(1 if side.layer_norm is not None else 2 for side in sides)
        moment = logits * (4 if self.run.half is None else 4 + self.bytes)
        kept = (results + len(sides) - 1) * rows + len(sides) * self.dropped(rows)
        embeddings = Part(kept, matrix, max(others - matrix, 0))
        return embeddings, Part(4 * logits + rows, moment, matrix)

    def _layer(self, layer: nn.Module) -> list[Part]:
        parts = [self._attention(layer.self_attn)]
        if getattr(layer, "encoder_attn", None) is not None:
            parts.append(self._attention(layer.encoder_attn, cross=True))
        return [*parts, self._experts(layer.moe) if layer.is_moe else self._dense(layer)]

    def rows(self, width: float) -> float:
        """Bytes of ``(T, width)``."""
        return self.tokens * width * self.bytes

    def dropped(self, size: float, p: float | None = None) -> float:
        """Bytes that dropout of ``size`` bytes keeps."""
        return size / self.bytes * self.mask if (self.config.dropout if p is None else p) else 0

    def _attention(self, attention: nn.Module, cross: bool = False) -> Part:
        """Input, queries, keys, values, their sum of values (twice if fused) and the residual."""
        rows = self.rows(attention.embed_dim)
        scores = self.rows(attention.num_heads * self.run.length)
        p = self.config.attention_dropout
        kept = (6 if cross else 7) * rows + self.dropped(rows)
        if cross:
            kept += scores * (1 + 4 / self.bytes) + (p and scores + self.dropped(scores, p))
        elif p and self.run.flags.cpu:
            kept += 2.5 * scores
        elif is_language_model(self.run.flags):
            kept += scores  # the mask of later positions and of padding
        weights = sum(parameter.numel() for parameter in attention.parameters()) * self.bytes
        return Part(kept, 4 * rows + 2 * scores * cross, weights)

    def _network(self, rows: float, width: int) -> float:
        """Kept between the two matrices of a feed-forward network, of ``rows`` inputs."""
        hidden, p = rows * width * self.bytes, self.config.activation_dropout
        return 2 * hidden + self.dropped(hidden, p) if p else self.hidden * hidden

    def _dense(self, layer: nn.Module) -> Part:
        rows, width = self.rows(layer.embed_dim), layer.fc1.out_features
        weights = [*layer.fc1.parameters(), *layer.fc2.parameters()]
        return Part(
            2 * rows + self._network(self.tokens, width) + self.dropped(rows),
            2 * self.rows(width),
            sum(parameter.numel() for parameter in weights) * self.bytes,
        )

    def _experts(self, block: StratifiedMoE) -> Part:
        """A block: per stratum, its tokens about the layer norm and the experts' hidden rows."""
        _, width, dim = block.experts.w1.shape
        place, strata = _placement(self.run, block), block.strata
        grouped, kept, moment = _is_grouped(self.run, block), 0.0, 0.0
        for i, (gate, share) in enumerate(zip(block.gates, strata.expected_visits(), strict=True)):
            tokens = self.tokens * (1 if grouped else share)  # at this stratum
            factor = getattr(getattr(gate, "capacity", None), "factor_in_force", 0)
            choices = gate.expected_choices
            copies = tokens * (choices if grouped or not factor else min(choices, factor))
            first, visible = strata.first_experts[i], strata.visible[i]
            own = len(set(place.local) & set(range(first, first + visible)))
            received = copies * own / visible * place.group_size  # by this process's experts
            rows, row = self.rows(dim) * tokens / self.tokens, dim * self.bytes
            kept += (1 if strata.stacked else 2) * rows + self.dropped(
                rows
            )  # in and out of the norm
            kept += self._network(received, width)
            if place.is_sharded:
                kept += 2 * received * row  # what the experts get and return
            kept += place.is_sharded * copies * row  # copies that travel
            kept += grouped * rows
            at_once = received if grouped else received / len(place.local)
            moment = max(moment, 2 * at_once * width * self.bytes + 2 * rows)
        for network in (
            block.cmr,
            block.residual,
            block.shared,
        ):  # dense networks beside the experts
            if network is not None:
                hidden = network.fc1.out_features
                kept += self._network(self.tokens, hidden)
                kept += 0 if network is block.shared else 2 * self.rows(dim)
                moment += 2 * self.rows(hidden)
        kept += self.rows(dim) * block.layer_norms.has_output_norm
        experts = sum(p.numel() for p in block.experts.parameters())
        others = sum(p.numel() for p in block.parameters()) - experts
        return Part(kept, moment, (others + experts // place.group_size) * self.bytes)


def _is_grouped(run: Run, block: StratifiedMoE) -> bool:
    """Whether the GPU that is here computes all experts in one kernel."""
    if run.flags.cpu or not torch.cuda.is_available():
        return False
    weight = block.experts.w1.to(run.half or torch.float32)
    return can_group(weight) and one_kernel(torch.device("cuda", 0), weight.dtype)
