"""What training takes of memory and of the network, by a formula.

What each sublayer keeps for the backward pass and takes during it is a sum of its shapes; the peak
is the highest point of the way back through them. docs/cost.md compares it with measurements.

Shapes: T tokens, S positions of a sentence, D embedding, H heads, F feed-forward, V vocabulary.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from tabulate import tabulate
from torch import nn

from smoe_fairseq.analysis.cost import (
    build_meta_model,
    config_of,
    copies_per_stop,
    is_language_model,
)
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.experts import MANY_ROWS
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
MEMORY_EFFICIENT = ("adafactor", "adam", "adamax", "nag")  # that --memory-efficient-fp16 takes


@dataclass(frozen=True)
class Run:
    """What is trained: flags of fairseq-train as `parse_run` gives them, and what they do not say.

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
        """The type that is computed in, where that is not float32."""
        flags = self.flags
        if flags.bf16 or flags.memory_efficient_bf16:
            return torch.bfloat16
        return torch.float16 if flags.fp16 or flags.memory_efficient_fp16 else None

    @property
    def bytes(self) -> int:
        """Of a weight, a gradient or an activation."""
        return 4 if self.half is None else 2

    @property
    def memory_efficient(self) -> bool:
        """Whether there is no copy of the weights in float32."""
        return self.flags.memory_efficient_fp16 or self.flags.memory_efficient_bf16

    @property
    def tokens(self) -> int:
        """Of a batch, on each side."""
        most = max(1, self.flags.max_tokens // self.length)
        return min(most, self.flags.batch_size or most) * self.length


@dataclass(frozen=True)
class Forecast:
    """Bytes of one process; with sharded experts or optimizer state of the one that has most.

    The peak is below the sum of the others where gradients come as activations go, and above it
    where a sublayer or the optimizer takes something for a moment. Not in it: what the device,
    torch and its allocator need for themselves.
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

    Every gate is taken to choose evenly, every sentence to be of the same length.

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
    """That of the last process, whose experts every gate sees."""
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
        embeddings = Part(
            (results + len(sides) - 1) * rows + len(sides) * self.dropped(rows),
            *(matrix, max(others - matrix, 0)),
        )
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
        """Of each stratum its tokens twice, about the layer norm, and between experts' matrices.

        With few rows per expert also what the experts get and return; copies that travel, once more.
        """
        _, width, dim = block.experts.w1.shape
        place, strata = _placement(self.run, block), block.strata
        grouped, kept, most = _is_grouped(self.run, block), 0.0, 0.0
        for i, (gate, share) in enumerate(zip(block.gates, strata.expected_visits(), strict=True)):
            tokens = self.tokens * (1 if grouped else share)
            factor = getattr(getattr(gate, "capacity", None), "factor_in_force", 0)
            choices = gate.expected_choices
            copies = tokens * (choices if grouped or not factor else min(choices, factor))
            first, visible = strata.first_experts[i], strata.visible[i]
            own = len(set(place.local) & set(range(first, first + visible)))
            received = copies * own / visible * place.group_size
            few = grouped or place.is_sharded or copies < MANY_ROWS * visible
            rows = tokens * dim * self.bytes
            kept += (1 if strata.stacked else 2) * rows + self.dropped(rows)
            kept += self._network(received, width) + 2 * few * received * dim * self.bytes
            kept += place.is_sharded * copies * dim * self.bytes + grouped * rows
            at_once = received if grouped else received / len(place.local)
            most = max(most, 2 * at_once * width * self.bytes + 2 * rows)
        for network in (block.cmr, block.residual, block.shared):
            if network is not None:
                kept += self._network(self.tokens, network.fc1.out_features)
                kept += 0 if network is block.shared else 2 * self.rows(dim)
                most += 2 * self.rows(network.fc1.out_features)
        kept += self.rows(dim) * block.layer_norms.has_output_norm
        weights = sum(p.numel() for p in block.parameters())
        experts = sum(p.numel() for p in block.experts.parameters())
        weights += experts // place.group_size - experts
        return Part(kept, most, weights * self.bytes)


def _is_grouped(run: Run, block: StratifiedMoE) -> bool:
    """Whether the GPU that is here computes all experts in one kernel."""
    if run.flags.cpu or not torch.cuda.is_available():
        return False
    weight = block.experts.w1.to(run.half or torch.float32)
    return can_group(weight) and one_kernel(torch.device("cuda", 0), weight.dtype)


# What each process of a run holds and sends: replicated experts beside sharded ones
# (docs/distributed.md).
#
# An all-reduce over n processes is counted as a ring: each sends 2 (n - 1) / n of what is reduced.
# What each of them sends to all others (``--zero-sharding os``) is half of that.


@dataclass(frozen=True)
class ProcessCost:
    """Bytes of one process: held, and sent per update."""

    held: Forecast
    gradients: float  # sent
    tokens: float  # sent, forward and backward, under uniform routing
    parameters: float  # sent, where each process has the optimizer's state of some

    @property
    def sent(self) -> float:
        return self.gradients + self.tokens + self.parameters

    def as_dict(self) -> dict:
        return {**asdict(self), "memory": self.held.memory, "sent": self.sent}


def process_costs(run: Run, model: nn.Module) -> dict[str, ProcessCost]:
    """Keys "replicated" and "sharded"; a dense model has only the first.

    Args:
        run: whatever it says of ``--expert-parallel``.
        model: the run's, on the meta device or another, with all experts.

    Raises:
        ValueError: the experts cannot be spread over so many processes.
    """
    sharded = {"replicated": False} | ({"sharded": True} if moe_blocks(model) else {})
    return {
        name: process_cost(run.with_flags(expert_parallel=how), model)
        for name, how in sharded.items()
    }


def process_cost(run: Run, model: nn.Module) -> ProcessCost:
    """As `process_costs`, of the run as its flags say."""
    flags = run.flags
    blocks = moe_blocks(model).values()
    of_block = [sum(p.numel() for p in block.experts.parameters()) for block in blocks]
    experts = sum(of_block)
    shared = sum(p.numel() for p in model.parameters()) - experts
    number = 4 if run.half is None else 2  # bytes of a gradient or an activation on its way
    gradients, tokens = (shared + experts) * _ring(run.processes), 0.0
    if flags.expert_parallel and blocks:
        gradients, rows = shared * _ring(run.processes), 0.0
        for block, weights in zip(blocks, of_block, strict=True):
            place = Placement(block.strata.num_experts, run.processes)
            gradients += weights / place.group_size * _ring(place.num_replicas)
            away = (place.group_size - 1) / place.group_size  # share of the copies that travel
            copies = copies_per_stop(block) * block.strata.expected_requested_capacity()
            rows += (
                away * 4 * copies * _width(block)
            )  # there and back, and their gradients the same
        tokens = rows * flags.max_tokens * flags.update_freq * number
    parameters = 0.0
    if (
        flags.zero_sharding == "os"
    ):  # what the optimizer updates: float32 but for memory-efficient ones
        spread = shared if flags.expert_parallel else shared + experts
        parameters = spread * _ring(run.processes) / 2 * (number if run.memory_efficient else 4)
    return ProcessCost(forecast(run, model), gradients * number, tokens, parameters)


def _ring(processes: int) -> float:
    return 2 * (processes - 1) / processes


def _width(block) -> int:
    return block.experts.w1.shape[2]


def print_process_costs(costs: dict[str, ProcessCost], run: Run) -> None:
    """A table; of what is sent, tokens and parameters have columns where there are any."""
    each = "one process" if run.processes == 1 else f"each of {run.processes} processes"
    print(
        f"\n{each}, {run.flags.max_tokens} tokens per batch in sentences of "
        f"{run.length}, uniform routing"
    )
    header = ["experts", "weights, gradients,\noptimizer", "activations", "at the\npeak"]
    header += ["sent per update", "of it\ngradients", "of it\ntokens"]
    columns = ["memory", "activations", "peak", "sent", "gradients", "tokens"]
    if any(cost.parameters for cost in costs.values()):
        header, columns = [*header, "of it\nparameters"], [*columns, "parameters"]
    rows = []
    for name, cost in costs.items():
        numbers = cost.as_dict()
        numbers |= {key: numbers["held"][key] for key in ("activations", "peak")}
        rows.append([name, *(mebibytes(numbers[column]) for column in columns)])
    print(aligned(header, rows))


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """A name and numbers in each row, for a terminal; a header may have several lines."""
    alignment = ["left", *["right"] * (len(header) - 1)]
    return tabulate(rows, header, tablefmt="plain", colalign=alignment, disable_numparse=True)


def mebibytes(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"


# What would make a run fit into memory: changes of its flags that the forecast says are enough.


def first_that_fits(run: Run, room: float) -> tuple[str, int] | None:
    """The first change with a peak of at most ``room`` bytes, as words to add, and that peak; or None.

    Those that leave the result as it is come first: batches in more parts, then what is spread over
    processes, then fewer copies in float32, recomputing, and all of these together; last, more GPUs.
    """
    model = build_meta_model(run.flags, run.vocabulary)
    for changed in filter(None, _candidates(run)):
        if (peak := forecast(changed, model).peak) <= room:
            return _words(run, changed), peak
    return None


def _candidates(run: Run) -> Iterator[Run | None]:
    yield from _smaller_batches(run)
    sharded = _sharded(run)
    yield sharded
    yield _zero(run)
    yield sharded and _zero(sharded)
    yield _memory_efficient(run)
    yield _checkpointed(run)
    for change in (_sharded, _zero, _memory_efficient, _checkpointed):
        run = change(run) or run
    yield run
    yield from _smaller_batches(run)
    if not run.flags.cpu:  # where more processes share one memory
        yield from _more_processes(run)


def _smaller_batches(run: Run) -> Iterator[Run]:
    """By half and half again, in more parts of the same update, until a sentence fills one."""
    flags = run.flags
    tokens, parts = flags.max_tokens // 2, 2
    while tokens >= max(run.length, 1) and flags.batch_size is None:
        yield run.with_flags(max_tokens=tokens, update_freq=flags.update_freq * parts)
        tokens, parts = tokens // 2, parts * 2


def _more_processes(run: Run) -> Iterator[Run | None]:
    """Twice as many and so on, each with fewer of the experts, for the same update."""
    parts = run.flags.update_freq
    while run.processes < max(_experts(run), default=0):
        parts = max(1, parts // 2)
        run = replace(run, processes=2 * run.processes).with_flags(update_freq=parts)
        wider = _sharded(run.with_flags(expert_parallel=False))
        yield wider
        yield from _smaller_batches(wider) if wider else ()


def _sharded(run: Run) -> Run | None:
    if run.processes == 1 or run.flags.expert_parallel or not (experts := _experts(run)):
        return None
    try:
        for number in experts:
            Placement(number, run.processes)
    except ValueError:
        return None
    return _unflattened(run.with_flags(expert_parallel=True, ddp_backend="legacy_ddp"))


def _experts(run: Run) -> list[int]:
    """Of each MoE layer; a dense model has none."""
    config = config_of(run.flags)
    return [strata.num_experts for side in config.SIDES for strata in config.strata_of(side)]


def _zero(run: Run) -> Run | None:
    if run.processes == 1 or run.flags.zero_sharding == "os":
        return None
    return _unflattened(run.with_flags(zero_sharding="os"))


def _unflattened(run: Run) -> Run:
    flags = run.flags
    return (
        run.with_flags(fp16_no_flatten_grads=True)
        if flags.fp16 and not run.memory_efficient
        else run
    )


def _memory_efficient(run: Run) -> Run | None:
    flags = run.flags
    if run.memory_efficient or run.half is None or flags.optimizer not in MEMORY_EFFICIENT:
        return None
    name = "memory_efficient_bf16" if flags.bf16 else "memory_efficient_fp16"
    return run.with_flags(**{name: True, "fp16_no_flatten_grads": False})


def _checkpointed(run: Run) -> Run | None:
    if getattr(run.flags, "checkpoint_activations", False):
        return None
    return run.with_flags(checkpoint_activations=True)


def _words(before: Run, after: Run) -> str:
    """The flags that are new; more processes come first."""
    old, words = vars(before.flags), []
    if after.processes > before.processes:
        words.append(f"{after.processes} GPUs with")
    for name, value in vars(after.flags).items():
        if value != old.get(name, False) and name != "ddp_backend" and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(words)
