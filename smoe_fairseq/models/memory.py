"""Memory of a model, measured on the model itself, built on torch's meta device.

The activations that training keeps grow with the tokens of a batch: a sum over sublayers, `_per_token`. The
peak is at one of three points: at the loss, with all activations; after the backward pass, with all
gradients; or in the optimizer's step. docs/cost.md compares forecasts with measurements.

Shapes: T tokens, S positions of a sentence, D embedding, F feed-forward, V vocabulary, H heads.
"""

import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.models.attention import Attention
from smoe_fairseq.models.layers import TransformerLayer
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.activation import Hidden
from smoe_fairseq.modules.branches import FeedForward
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.translate.load import WithoutRandomValues

LENGTH = 32  # tokens of a sentence, if the data is unknown
COPIES = 2 * 25 * 2**20  # bytes of gradients that legacy_ddp copies at a time
# Memory besides the tensors, as measured (docs/cost.md). On a CPU: bytes of a process, and gaps that malloc
# leaves, relative to the tensors. On a GPU: the context and gaps between blocks, as a share of all memory.
CPU_PROCESS, CPU_GAPS, GPU_SHARE = 400 * 2**20, 1 / 3, 0.1

# Numbers per weight: in the optimizer's state (SGD: depends on --momentum), and in float32 copies of the
# largest parameter during a step.
OPTIMIZERS = {
    "adadelta": (2, 2),
    "adafactor": (0, 2),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adamax": (2, 1),
    "nag": (1, 0),
    "sgd": (0, 0),
}


class NotForecastError(UsageError):
    """The memory of such a run is not modelled; the run itself may be possible."""


# ---- Before a model is built in the host's memory ----


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build models on the meta device: their shapes without their memory."""
    with torch.device("meta"), WithoutRandomValues():
        yield


@replaces(
    "fairseq.modules.sinusoidal_positional_embedding:SinusoidalPositionalEmbedding.get_embedding"
)
def positions_by_shape(original, rows, width, *padding):
    """On the meta device torch would load its compiler for them (seconds)."""
    if torch.empty(0).device.type == "meta":
        return torch.empty(rows, width)
    return original(rows, width, *padding)


def check_size(build: Callable[[], nn.Module]) -> None:
    """As `check_fits`, for a model that ``build`` will build on each rank."""
    if not torch.empty(0).is_meta:  # else it is built only for its shapes
        with shapes_only():
            model = build()
        check_fits(model, ranks_here())


def check_fits(model: nn.Module, ranks: int = 1) -> None:
    """Raise UsageError if a model on the meta device would not fit into this machine's memory.

    The sentence names the largest part. Each of ``ranks`` ranks has a model.
    """
    memory, sizes = machine_memory(), _sizes(model)
    total = sum(sizes.values())
    if memory is None or ranks * total <= memory:
        return
    largest = max(sizes, key=sizes.get)
    times = f" in each of {ranks} ranks" if ranks > 1 else ""
    raise UsageError(
        f"the model would take {_readable(total)}{times}, of which {largest} takes "
        f"{_readable(sizes[largest])}; expected one that fits into the {_readable(memory)} of memory here "
        "(--smoe-strata, --moe-freq, --moe-expert-ffn-dim, --encoder-embed-dim, --encoder-ffn-embed-dim, "
        "--encoder-layers, --max-source-positions and those of the decoder; a smaller dictionary)"
    )


def _sizes(model: nn.Module) -> dict[str, int]:
    """Bytes of the model's tensors, learned or computed, by name; each tensor once."""
    tensors = {
        id(tensor): (f"{module_name}.{name}", tensor.nbytes)
        for module_name, module in model.named_modules()
        for name, tensor in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(tensor, Tensor)
    }
    return dict(tensors.values())


def ranks_here() -> int:
    """Ranks on this machine, each of which builds its model in host memory."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    if local_world_size.isdecimal():
        return int(local_world_size)
    return min(dist.get_world_size(), max(torch.cuda.device_count(), 1))  # fairseq's own spawn


def _readable(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


# ---- Training ----


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        model: built by `shapes_only`, with all experts.
        flags: fairseq-train's, as returned by `parse_run`.
        length: tokens per sentence on each side, or per text.
    """

    model: nn.Module
    flags: Namespace
    processes: int = 1
    length: int = LENGTH

    def with_flags(self, **changed) -> "Run":
        return replace(self, flags=Namespace(**vars(self.flags) | changed))

    @property
    def is_half(self) -> bool:
        """Whether weights, gradients and activations are in bf16 or fp16."""
        flags = self.flags
        return flags.bf16 or flags.fp16 or self.memory_efficient

    @property
    def bytes(self) -> int:
        """Bytes per weight, gradient or activation."""
        return 2 if self.is_half else 4

    @property
    def memory_efficient(self) -> bool:
        """Whether there is no copy of the weights in float32."""
        return self.flags.memory_efficient_fp16 or self.flags.memory_efficient_bf16

    @property
    def tokens(self) -> int:
        """Tokens per batch on each side."""
        most = max(1, self.flags.max_tokens // self.length)
        return min(most, self.flags.batch_size or most) * self.length

    @property
    def sharing(self) -> int:
        """Ranks that share the experts."""
        return self.processes if self.flags.expert_parallel else 1

    @property
    def blocks(self) -> list[StratifiedMoE]:
        return [m for m in self.model.modules() if isinstance(m, StratifiedMoE)]

    def share(self, block: StratifiedMoE) -> float:
        """The share of a block's experts that one rank has."""
        return 1 / Placement(block.strata.num_experts, self.sharing).group_size

    def weights_by_layer(self) -> tuple[int, list[int]]:
        """Weights on one rank: shared by all ranks, and the experts of each MoE layer."""
        experts = [_size(block.experts) for block in self.blocks]
        shares = [round(n * self.share(b)) for n, b in zip(experts, self.blocks, strict=True)]
        return _size(self.model) - sum(experts), shares


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Forecast:
    """Bytes on one rank: the one that needs most, if experts or optimizer state are sharded.

    The peak is below the sum of the other fields if gradients replace activations, and above it if a
    sublayer or the optimizer needs temporary memory. The memory of the device's context, torch and its
    allocator is not included.
    """

    weights: int
    gradients: int  # in the type of the weights
    optimizer: int  # its state; in half precision also float32 copies of weights and gradients
    exchange: int  # buffers in which ranks exchange gradients
    activations: int  # kept for the backward pass of a batch
    peak: int  # of an update

    @property
    def memory(self) -> int:
        """Bytes that are kept between updates."""
        return self.weights + self.gradients + self.optimizer


def forecast(run: Run) -> Forecast:
    """The memory of an update with even gates and sentences of equal length.

    Raises:
        UsageError, ValueError: a flag is not supported, or experts cannot be spread over the ranks.
    """
    fixed_part, per_token, points = _terms(run)
    peak = max(fixed + slope * run.tokens for fixed, slope in points)
    return replace(fixed_part, activations=round(per_token * run.tokens), peak=round(peak))


def tokens_that_fit(run: Run, room: float) -> int:
    """The largest ``--max-tokens`` with a peak of at most ``room`` bytes in an update of several batches."""
    _, _, points = _terms(run.with_flags(update_freq=max(2, run.flags.update_freq)))
    most = math.inf
    for fixed, slope in points:
        if fixed > room:
            return 0
        most = min(most, (room - fixed) / slope if slope else math.inf)
    return int(most)


def same_batch(max_tokens: int, update_freq: int, most: int) -> tuple[int, int]:
    """``--max-tokens`` of at most ``most``, and ``--update-freq``, for the same tokens per update."""
    total = max_tokens * update_freq
    parts = -(-total // max(1, most))
    return total // parts, parts


def _terms(run: Run) -> tuple[Forecast, float, list[tuple[float, float]]]:
    """The forecast without activations and peak; activations per token; (bytes, per token) at each peak."""
    flags = run.flags
    if flags.amp:
        raise NotForecastError("--amp cannot be forecast: autocast chooses the types")
    if flags.optimizer not in OPTIMIZERS:
        raise NotForecastError(f"--optimizer {flags.optimizer}: its memory is unknown")
    shared, experts = run.weights_by_layer()
    size = shared + sum(experts)
    in_blocks = {p: run.share(block) for block in run.blocks for p in block.experts.parameters()}
    largest = max(p.numel() * in_blocks.get(p, 1) for p in run.model.parameters())
    weights = size * run.bytes
    frozen = [p for p in run.model.parameters() if not p.requires_grad]  # by --freeze
    size -= round(sum(p.numel() * in_blocks.get(p, 1) for p in frozen))
    shared -= sum(p.numel() for p in frozen if p not in in_blocks)
    state, copies = OPTIMIZERS[flags.optimizer]
    if flags.optimizer == "sgd" and getattr(flags, "momentum", 0):
        state = 1
    sharded = shared if flags.expert_parallel else size  # by --zero-sharding
    zero = flags.zero_sharding == "os" and run.processes > 1
    optimizer = 4 * state * (size - (sharded - sharded / run.processes) * zero)
    if run.memory_efficient:
        copies += 2  # the parameter and its gradient
    elif run.is_half:
        optimizer += 8 * size
        largest = largest if flags.fp16_no_flatten_grads else size
    exchange = size * run.bytes if run.processes > 1 else 0
    if flags.ddp_backend in ("legacy_ddp", "no_c10d"):
        exchange = min(exchange, COPIES)
    gradients = size * run.bytes
    kept, at_loss, in_layer, maps = _per_token(run)
    held = weights + optimizer + exchange
    earlier = gradients if flags.update_freq > 1 else 0
    output = run.model.decoder.output_projection.weight.numel() * run.bytes
    points = [
        (held + earlier + maps + (0 if earlier else output), kept + at_loss),
        (held + gradients, in_layer),
        (held + gradients + 4 * copies * largest, 0),
    ]
    return Forecast(weights, gradients, round(optimizer), exchange, 0, 0), kept, points


def _per_token(run: Run) -> tuple[float, float, float, float]:
    """Bytes per token: kept by the forward pass, in addition at the loss, in addition in the largest layer.

    torch's fused attention keeps no scores, except with dropout on a CPU. The fourth number is the bytes of
    the joined maps of queries, keys and values, which are kept, too; they do not depend on the tokens.
    """
    b, on_cpu = run.bytes, run.flags.cpu
    checkpoints = run.flags.checkpoint_activations or run.flags.offload_activations
    mask = (b if on_cpu else 1) / b  # of dropout, per number
    kept, maps, largest = 0.0, 0.0, 0.0
    for layer in run.model.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        D = layer.self_attn.embed_dim
        dropped = D * mask if layer.dropout else 0
        held, moment = 0.0, 0.0
        for attention in layer.modules():
            if isinstance(attention, Attention):
                dropout = on_cpu and attention.dropout_module.p
                held += 7 * D + dropped + (2.5 * attention.num_heads * run.length if dropout else 0)
                maps += (3 if attention.self_attention else 2) * D**2
        if layer.is_moe:
            more, moment = _block(run, layer.moe, dropped, mask)
            held += more
        else:
            F = layer.fc1.out_features
            held, moment = held + 2 * D + _hidden(layer, F, mask) + dropped, 2 * F
        if checkpoints:  # keeps the input, and recomputes the layer
            held, moment = D, held + moment
        kept, largest = kept + held, max(largest, moment)
    for side in [m for m in (getattr(run.model, "encoder", None), run.model.decoder) if m]:
        D = side.embed_tokens.embedding_dim
        kept += D * (1 + bool(side.dropout_module.p) * mask)  # embeddings and the last norm
    V, D = run.model.decoder.output_projection.weight.shape
    kept = b * (kept + D) + 4 * V  # log-probabilities are in float32
    return kept, V * (4 if b == 4 else 4 + b), b * largest, 0 if checkpoints else b * maps


def _hidden(network: nn.Module, numbers: float, mask: float) -> float:
    """Numbers that a feed-forward network keeps of so many hidden ones."""
    if network.activation_dropout:
        return numbers * (2 + mask)
    return numbers * (1 if Hidden(network.activation_fn, 0).is_relu else 2)


def _block(run: Run, block: StratifiedMoE, dropped: float, mask: float) -> tuple[float, float]:
    """Numbers per token of an MoE layer: kept, and in addition in its backward pass.

    A GPU computes all experts of a stratum at once, and all tokens in each stratum; a CPU computes expert by
    expert, and only the tokens of the stratum.
    """
    strata, on_cpu = block.strata, run.flags.cpu
    _, F, D = block.experts.w1.shape
    # The last rank, whose experts every gate sees.
    place = Placement(strata.num_experts, run.sharing, run.sharing - 1)
    kept = moment = 0.0
    for i, (share, gate) in enumerate(zip(strata.expected_visits(), block.gates, strict=True)):
        first, visible = strata.first_experts[i], strata.visible[i]
        tokens, copies = 1.0, gate.experts_per_token(block.config, gate.num_experts)
        if on_cpu:
            tokens = share
            factor = float(block.config.capacity_factor)
            copies *= share if not factor else min(1, factor / copies) * share
        own = len(set(place.local) & set(range(first, first + visible)))
        received = copies * own / visible * place.group_size  # by this rank's experts
        kept += tokens * ((1 if strata.stacked else 2) * D + dropped)
        kept += _hidden(block.experts, received, mask) * F
        if place.is_sharded:  # inputs and outputs of the experts, and copies that are sent
            kept += 2 * received * D + copies * D
        kept += (not on_cpu) * D
        at_once = 2 * received / len(place.local) if on_cpu else 3 * received
        moment = max(moment, at_once * (F + D) + 2 * tokens * D)
    for branch in block.branches:
        if isinstance(branch, FeedForward):
            kept += _hidden(branch, branch.fc1.out_features, mask) + 2 * D
            moment += 2 * branch.fc1.out_features
    return kept + D * block.layer_norms.has_output_norm, moment


# ---- Translating ----


def translation(run: Run, beam: int = 5) -> tuple[float, float]:
    """Bytes, and bytes per source token, of translation with all experts on one device.

    The source's keys and values are kept once, the target's for each hypothesis, up to twice the source's
    length. Scores are in float32.
    """
    b, blocks = run.bytes, run.blocks
    V, D = run.model.decoder.output_projection.weight.shape
    keys = 2 * len(run.model.decoder.layers) * D
    widths = [block.experts.w1.shape[1] * block.config.top_k for block in blocks]
    widths += [2 * m.out_features for n, m in run.model.named_modules() if n.endswith(".fc1")]
    scores = 3 * 4 * beam * V / run.length
    per_token = b * (keys * (1 + 2 * beam) + 8 * D + 3 * max(widths)) + scores
    return b * _size(run.model), per_token


def gpu_room(total: float) -> float:
    """Bytes of a GPU's memory that tensors can use."""
    return total * (1 - GPU_SHARE)
