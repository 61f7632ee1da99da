"""Memory of a model, computed from its options without building it.

The weights are a sum of shapes. The activations that training keeps grow with the tokens of a batch: a sum
over sublayers, `_per_token`. The peak is at one of three points: at the loss, with all activations; after the
backward pass, with all gradients; or in the optimizer's step. docs/cost.md compares forecasts with
measurements.

Shapes: T tokens, S positions of a sentence, D embedding, F feed-forward, V vocabulary, H heads.
"""

import math
import os
from argparse import Namespace
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import flag_of
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.models.options import DecoderOptions
from smoe_fairseq.modules.config import FIRST_RESIDUAL, MoEConfig
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.gates.linear import Gate
from smoe_fairseq.modules.parallel import Placement

LENGTH = 32  # tokens of a sentence, if the data is unknown
BUFFER = 2**28  # numbers that legacy_ddp sends at a time
# Bytes of the Python objects of a layer and a gate; all that a model on the meta device needs.
LAYER_OBJECTS, GATE_OBJECTS = 50_000, 5_000
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


# ---- Weights ----


@dataclass(frozen=True)
class Part:
    """A part of a model, named by the flags that set its size.

    Attributes:
        shared: weights that every rank has.
        experts: for each MoE layer, the weights and the number of its experts.
        tables: numbers that are computed, not learned.
        objects: bytes of Python objects.
    """

    flags: str
    shared: int = 0
    experts: tuple[tuple[int, int], ...] = ()
    tables: int = 0
    objects: int = 0

    def weights(self, ranks: int = 1) -> int:
        """Weights and tables on one of ``ranks`` that share the experts."""
        experts = (size // min(number, ranks) for size, number in self.experts)
        return self.shared + sum(experts) + self.tables


def parts(config: DecoderOptions, task) -> list[Part]:
    """The parts of a model, which add up to its parameters.

    Args:
        task: for the sizes of its dictionaries.
    """
    result = []
    for side in config.SIDES:
        copies = _copies(config, side, task)
        D, F, layers = (
            getattr(config, f"{side}_{name}") for name in ("embed_dim", "ffn_embed_dim", "layers")
        )
        strata = config.strata_of(side)
        flags = f"--{side}-embed-dim {D} --{side}-ffn-embed-dim {F} --{side}-layers {layers}"
        network = 2 * D * F + F + D
        dense = layers - len(strata)
        source = getattr(config, "encoder_embed_dim", D)  # of the keys and values of the source
        attention = _attentions(config, side) * (4 * D**2 + 6 * D) + 2 * D * (source - D)
        trunk = layers * attention + dense * (network + 2 * D)
        trunk += 2 * D * (1 + config.layernorm_embedding)
        result.append(Part(flags, copies * trunk, objects=copies * layers * LAYER_OBJECTS))
        width = config.moe_expert_ffn_dim or F
        shared = 0  # gates, norms and branches of MoE layers
        for each in strata:
            norms = 1 if config.moe_stacked else len(each) + (config.smoe_norm == "released")
            free = config.moe_null_experts + config.moe_copy_experts + config.moe_constant_experts
            scores = (sum(each.visible) + free * len(each)) * (
                "weight" in _gate(config, side).per_expert
            )
            shared += D * (scores + 2 * norms + 3 * config.moe_constant_experts)
            first = FIRST_RESIDUAL.get(str(config.moe_gate_residual), len(each))
            shared += sum((seen + free) ** 2 for seen in each.visible[first:])
            shared += config.moe_cmr * (network + D) + config.moe_residual * (network + 2 * D + 2)
            if shared_width := config.moe_shared_experts * width:
                shared += 2 * D * shared_width + shared_width + D
        size = 2 * D * width + width + D
        experts = tuple((copies * each.num_experts * size, each.num_experts) for each in strata)
        name = config.strata_option_of(side)
        objects = copies * sum(map(len, strata)) * GATE_OBJECTS
        flags = f"{flag_of(name)} {_short(getattr(config, name))} with {flags}"
        result.append(Part(flags, copies * shared, experts, objects=objects))
        name = config.positions_option_of(side)
        learned = getattr(config, f"{side}_learned_pos", False)
        rows = getattr(config, name) + 2 * learned  # fairseq's positions begin after padding
        table = 0 if config.no_token_positional_embeddings else copies * rows * D
        flags = f"{flag_of(name)} {getattr(config, name)} with --{side}-embed-dim {D}"
        result.append(Part(flags, **{"shared" if learned else "tables": table}))
        words = len(task.source_dictionary if side == "encoder" else task.target_dictionary)
        tables = _tables(config, side, copies) * words * D
        result.append(Part(f"--{side}-embed-dim {D} and a dictionary of {words}", tables))
    return result


def _attentions(config: DecoderOptions, side: str) -> int:
    return 2 if side == "decoder" and "encoder" in config.SIDES else 1


def _copies(config: DecoderOptions, side: str, task) -> int:
    """The number of encoders or decoders: one per language in a model per language pair."""
    pairs = getattr(task, "model_lang_pairs", None)
    if pairs is None or getattr(config, f"share_{side}s", False):
        return 1
    return len({pair.split("-")[side == "decoder"] for pair in pairs})


def _tables(config: DecoderOptions, side: str, copies: int) -> int:
    """The number of embedding matrices that a side's copies add, of the input and of the output."""
    if getattr(config, "share_all_embeddings", False):
        return 1 if side == "encoder" else 0
    inputs = 1 if getattr(config, f"share_{side}_embeddings", False) else copies
    if side == "encoder" or config.share_decoder_input_output_embed:
        return inputs
    return inputs + copies


# ---- Before a model is built in the host's memory ----


def check_size(config: DecoderOptions, task) -> None:
    """Raise ValueError with one sentence that names the flags of the largest part if memory is too small.

    The config's sizes have to be positive numbers.
    """
    memory, ranks = machine_memory(), ranks_here()
    on_meta = torch.empty(0).is_meta  # built only for its shapes
    sharing = dist.get_world_size() if config.expert_parallel and dist.is_initialized() else 1
    sizes = {
        part.flags: part.objects + (0 if on_meta else 4 * part.weights(sharing))
        for part in parts(config, task)
    }
    if memory is None or ranks * sum(sizes.values()) <= memory:
        return
    largest = max(sizes, key=sizes.get)
    times = f" in each of {ranks} ranks" if ranks > 1 else ""
    raise ValueError(
        f"{largest}: the model would take {_readable(sum(sizes.values()))}{times}, of which this part takes "
        f"{_readable(sizes[largest])}; expected one that fits into the {_readable(memory)} of memory here"
    )


def ranks_here() -> int:
    """Ranks on this machine, each of which builds its model in host memory."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    if local_world_size.isdecimal():
        return int(local_world_size)
    return min(dist.get_world_size(), max(torch.cuda.device_count(), 1))  # fairseq's own spawn


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def _readable(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:,.0f} MiB"
    # In integers, since the size may not fit a float.
    return f"{size * 10 // 2**30 / 10:,.1f} GiB" if size < 2**60 else "more than an EiB"


# ---- Training ----


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        config: the model's options.
        flags: fairseq-train's, as returned by `parse_run`.
        vocabulary: number of dictionary entries, special ones included.
        length: tokens per sentence on each side, or per text.
    """

    config: DecoderOptions
    flags: Namespace
    vocabulary: int
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

    def weights(self) -> tuple[int, int]:
        """Weights on one rank: shared by all ranks, and experts."""
        shared, experts = self.weights_by_layer()
        return shared, sum(experts)

    def weights_by_layer(self) -> tuple[int, list[int]]:
        """Weights on one rank: shared by all ranks, and the experts of each MoE layer."""
        words = range(self.vocabulary)
        task = Namespace(source_dictionary=words, target_dictionary=words)
        model = parts(self.config, task)
        experts = [size // min(n, self.sharing) for part in model for size, n in part.experts]
        return sum(part.shared for part in model), experts


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
    shared, experts = run.weights()
    size, largest = shared + experts, _largest(run)
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
    exchange = size if run.processes > 1 else 0
    if flags.ddp_backend in ("legacy_ddp", "no_c10d"):
        exchange = min(exchange, BUFFER)
    exchange *= run.bytes
    gradients = size * run.bytes
    kept, at_loss, in_layer, maps = _per_token(run)
    held = gradients + optimizer + exchange  # `gradients` bytes of weights
    earlier = gradients if flags.update_freq > 1 else 0
    output = run.vocabulary * run.config.decoder_embed_dim * run.bytes
    points = [
        (held + earlier + maps + (0 if earlier else output), kept + at_loss),
        (held + gradients, in_layer),
        (held + gradients + 4 * copies * largest, 0),
    ]
    return Forecast(gradients, gradients, round(optimizer), exchange, 0, 0), kept, points


def _largest(run: Run) -> int:
    """Size of the largest parameter."""
    config, sizes = run.config, [run.vocabulary * run.config.decoder_embed_dim]
    for side in config.SIDES:
        width = config.moe_expert_ffn_dim or getattr(config, f"{side}_ffn_embed_dim")
        for strata in config.strata_of(side):
            local = Placement(strata.num_experts, run.sharing).num_local
            sizes.append(local * width * getattr(config, f"{side}_embed_dim"))
    return max(sizes)


def _per_token(run: Run) -> tuple[float, float, float, float]:
    """Bytes per token: kept by the forward pass, in addition at the loss, in addition in the largest layer.

    torch's fused attention keeps no scores, except with dropout on a CPU. The fourth number is the bytes of
    the joined maps of queries, keys and values, which are kept, too; they do not depend on the tokens.
    """
    config, b = run.config, run.bytes
    on_cpu = run.flags.cpu
    mask = (b if on_cpu else 1) / b  # of dropout, per number

    def network(rows: float, width: int) -> float:
        """Hidden activations that a feed-forward network keeps."""
        kept = 1 if config.activation_fn == "relu" else 2
        return rows * width * (2 + mask if config.activation_dropout else kept)

    kept, maps, largest = 0.0, 0.0, 0.0
    for side in config.SIDES:
        D, F, H, layers = (
            getattr(config, f"{side}_{name}")
            for name in ("embed_dim", "ffn_embed_dim", "attention_heads", "layers")
        )
        dropped = D * mask if config.dropout else 0
        scores = 2.5 * H * run.length if on_cpu and config.attention_dropout else 0
        attention = 7 * D + dropped + scores
        dense = 2 * D + network(1, F) + dropped
        blocks = [_block(run, side, strata, network, dropped) for strata in config.strata_of(side)]
        blocks += [(dense, 2 * F)] * (layers - len(blocks))
        for each, moment in blocks:
            layer = _attentions(config, side) * attention + each
            if run.flags.checkpoint_activations:  # keeps the input, and recomputes the layer
                layer, moment = D, layer + moment
            kept += layer
            largest = max(largest, moment)
        maps += layers * (3 + 2 * (_attentions(config, side) - 1)) * D**2
        kept += D + dropped  # embeddings and the last norm
    D, V = config.decoder_embed_dim, run.vocabulary
    kept = b * (kept + D) + 4 * V  # log-probabilities are in float32
    maps = 0 if run.flags.checkpoint_activations else maps
    return kept, V * (4 if b == 4 else 4 + b), b * largest, b * maps


def _block(run: Run, side: str, strata, network, dropped: float) -> tuple[float, float]:
    """Numbers per token of an MoE layer: kept, and in addition in its backward pass.

    A GPU computes all experts of a stratum at once, and all tokens in each stratum; a CPU computes expert by
    expert, and only the tokens of the stratum.
    """
    config = run.config
    D, F = getattr(config, f"{side}_embed_dim"), getattr(config, f"{side}_ffn_embed_dim")
    width = config.moe_expert_ffn_dim or F
    # The last rank, whose experts every gate sees.
    place = Placement(strata.num_experts, run.sharing, run.sharing - 1)
    kept = moment = 0.0
    for i, share in enumerate(strata.expected_visits()):
        first, visible = strata.first_experts[i], strata.visible[i]
        tokens, copies = 1.0, choices(config, side, visible)
        if run.flags.cpu:
            tokens = share
            factor = _capacity(config)
            copies *= share if not factor else min(1, factor / copies) * share
        elif _gate(config, side).any_number and not place.is_sharded:
            copies = visible  # rows, also of experts that do not take the token
        own = len(set(place.local) & set(range(first, first + visible)))
        received = copies * own / visible * place.group_size  # by this rank's experts
        kept += tokens * ((1 if strata.stacked else 2) * D + dropped) + network(received, width)
        if place.is_sharded:  # inputs and outputs of the experts, and copies that are sent
            kept += 2 * received * D + copies * D
        kept += (not run.flags.cpu) * D
        at_once = 2 * received / len(place.local) if run.flags.cpu else 3 * received
        moment = max(moment, at_once * (width + D) + 2 * tokens * D)
    for size in (config.moe_cmr * F, config.moe_residual * F, config.moe_shared_experts * width):
        if size:
            kept += network(1, size) + 2 * D
            moment += 2 * size
    return kept + D * (config.smoe_norm == "released"), moment


def _gate(config: DecoderOptions, side: str) -> type[Gate]:
    """The gates of a side."""
    kind = GATES[str(config.moe_gate)]
    return GATES[kind.in_decoder] if kind.in_decoder and side == "decoder" else kind


def choices(config: DecoderOptions, side: str, experts: int) -> float:
    """Experts per token and stratum, if the gate sees this number of experts, all equally likely."""
    options = {name: getattr(config, option) for name, option in MoEConfig.flags().items()}
    options["capacity_factor"] = _capacity(config)
    return _gate(config, side).experts_per_token(SimpleNamespace(**options), experts)


def _capacity(config: DecoderOptions) -> float:
    """The capacity factor, by default the gate's."""
    factor = config.moe_capacity_factor
    return float(GATES[str(config.moe_gate)].default_capacity if factor is None else factor)


# ---- Translating ----


def translation(run: Run, beam: int = 5) -> tuple[float, float]:
    """Bytes, and bytes per source token, of translation with all experts on one device.

    The source's keys and values are kept once, the target's for each hypothesis, up to twice the source's
    length. Scores are in float32.
    """
    config, b = run.config, run.bytes
    D, V = config.decoder_embed_dim, run.vocabulary
    keys = 2 * config.decoder_layers * D
    F = max(getattr(config, f"{side}_ffn_embed_dim") for side in config.SIDES)
    experts = 3 * float(config.moe_top_k) * (config.moe_expert_ffn_dim or F)
    per_token = b * (keys * (1 + 2 * beam) + 8 * D + experts) + 3 * 4 * beam * V / run.length
    return b * sum(replace(run, processes=1).weights()), per_token


def gpu_room(total: float) -> float:
    """Bytes of a GPU's memory that tensors can use."""
    return total * (1 - GPU_SHARE)
