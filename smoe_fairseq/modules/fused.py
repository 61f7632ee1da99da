"""`StratifiedMoE.forward` by Triton kernels: one autograd function for all strata.

`applies` checks that a block is supported; blocks with other gates or branches use the general forward.
Sharded experts get the rows of all ranks between `dispatch` and the first product.

Shapes: T tokens, D embedding, F feed-forward, K choices per token, N = T K rows of copies.
"""

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoe_fairseq.modules.config import EVALUATION, TRAINING
from smoe_fairseq.modules.parallel import Placement, Trip
from smoe_fairseq.modules.products import (
    TILE,
    TYPES,
    Launcher,
    TorchProducts,
    TritonProducts,
    kernels,
    largest_tiles,
    next_power,
    shape_of_product,
    torch_has_one,
    why_not_triton,
)
from smoe_fairseq.modules.routing import exact
from smoe_fairseq.modules.rows import like
from smoe_fairseq.modules.statistics import RoutingStats
from smoe_fairseq.modules.torch_features import autocast_dtype

logger = logging.getLogger(__name__)
MAX_EXPERTS, MAX_CHOICES, MAX_WIDTH = 128, 8, 2048
# The fastest settings measured on an H200.
TOKENS = 16  # per program
PARTS = 16  # partial sums over an expert's rows
BLOCK_D = 256  # columns that a program processes at a time
PROGRAMS = 1024  # of a kernel over rows, whose number is not known on the host
# Tiles of kernels: names of their constants in capitals.
TILES = {"SCANNED": 512, "BLOCK_N": 16, "BLOCK_F": 256, "FEW_T": 2, "SETTLED": 4096}
SPREAD_D, SUMS, NORMS, PER_WARP = 128, 64, 1024, 512


_shrinks: dict = {}


def shrinkage(block, x: Tensor) -> int | None:
    """The number that divides the tiles so that all kernels of the block fit the device; None: none does.

    They are compiled, once for blocks of the same shapes and types.
    """
    w1, gate = block.experts.w1, block.gates[0]
    types = x.dtype, autocast_dtype(x.device), w1.dtype, gate.weight.dtype
    key = x.device, *types, w1.shape, block.strata, gate.top_k, block.training, block.execution
    if key not in _shrinks:
        what = f"{len(w1)} experts of {w1.shape[2]} and {w1.shape[1]} on {x.device}"
        spills_of = functools.partial(_spills, block, x)
        _shrinks[key] = largest_tiles(spills_of, f"fused kernels for {what}")
        if _shrinks[key]:
            logger.info("%s: fused kernels", what)
    return _shrinks[key]


def _spills(block, x: Tensor, shrink: int) -> int:
    """Numbers that a thread of the block's kernels keeps in memory, at most."""
    found = []

    def load(kernel, grid: tuple, values: dict, **options) -> None:
        compiled = kernel.warmup(**values, grid=grid, **options)
        compiled._init_handles()  # raises OutOfResources
        found.append(compiled.n_spills)

    with torch.cuda.device_of(x):  # for which Triton compiles
        rehearse(block, x, load, shrink)
    return max(found)


def rehearse(block, x: Tensor, start: Callable, shrink: int = 1) -> None:
    """Calls ``start`` for each kernel of a training pass over a token of ``x``, without computing.

    Without autograd, which would depend on where this is: in inference mode, or within hooks for what a
    checkpoint saves.
    """
    dtype = autocast_dtype(x.device) or block.experts.w1.dtype

    def empty(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(tensor, device="meta", dtype=dtype)

    def launcher(named: dict, *tensors: Tensor) -> Launcher:
        made = Launcher(named, *tensors)
        made.start = start
        return made

    x_TD = x.detach().reshape(-1, x.shape[-1])[:1]
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        run = _settings(block, x_TD, None, shrink)
    run.launcher, run.product, run.keeps = launcher, shape_of_product, True
    run.trip = functools.partial(Trip, Placement(block.strata.num_experts))
    named = {name: empty(run.named[name]) for name in ("seed", "stratum_of_expert", "padding")}
    run.named |= named
    norms = [empty(p) for norm in block.layer_norms for p in (norm.weight, norm.bias)]
    gates, experts = [empty(gate.weight) for gate in block.gates], block.experts
    weights = [empty(w, dtype) for w in (experts.w1, experts.b1, experts.w2, experts.b2)]
    ctx = SimpleNamespace(set_materialize_grads=lambda _: None)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    with torch.no_grad():
        outputs = _Block.forward(ctx, run, empty(x_TD), *norms, *gates, *weights)
        _Block.backward(ctx, *(torch.empty_like(output) for output in outputs))


def applies(block, x: Tensor) -> bool:
    """Whether to use `forward` for this block and ``x``.

    With ``execution="auto"`` it is used on NVIDIA's GPUs from compute capability 7.5 on, in half precision
    or TF32: where float32 may not be rounded, Triton's products have no tensor cores.
    """
    execution = block.execution
    if (
        execution not in ("fused", "fused-triton", "auto")
        or torch.compiler.is_compiling()
        or type(x) is not Tensor
    ):
        return False
    dtype = autocast_dtype(x.device) or block.experts.w1.dtype
    if execution == "auto" and why_not_triton(x.device, dtype):
        return False
    norms, gates = block.layer_norms, block.gates
    return (
        kernels() is not None
        and x.numel() > 0
        and x.dtype in TYPES
        and x.shape[-1] <= MAX_WIDTH
        and block.strata.num_experts <= MAX_EXPERTS
        and (TRAINING if block.training else EVALUATION) in block.config.fast
        and block.experts.activation_fn is F.relu
        and max(block.experts.activation_dropout, norms.dropout) < 1
        and all(gate.supports("fused") and gate.top_k <= MAX_CHOICES for gate in gates)
        and all(norm.weight.dtype == gates[0].weight.dtype for norm in norms)
        and (kernels().is_interpreted() or (x.is_cuda and shrinkage(block, x) is not None))
    )


def forward(block, x: Tensor, padding_mask: Tensor | None, with_stats: bool = True):
    """The block's output for ``x (..., D)``, and its statistics or None."""
    x_TD = x.reshape(-1, x.shape[-1]).contiguous()
    run = _settings(block, x_TD, padding_mask, 1 if not x.is_cuda else shrinkage(block, x) or 1)
    norms = block.layer_norms
    parameters = [p for norm in norms for p in (norm.weight, norm.bias)]
    parameters += [gate.weight for gate in block.gates]
    with torch.cuda.device_of(x_TD):  # where Triton launches
        y_TD, balance_loss, z_loss = _Block.apply(run, x_TD, *parameters, *block.experts.weights())
    if norms.dropout_per == "layer":
        y_TD = norms.finish(x_TD, y_TD, None, None)
    y = like(y_TD, x)
    if not with_stats:
        return y, None
    strata, shape = len(run.strata), x.shape[:-1]
    first, unused, chosen, dropped = run.numbers.split_with_sizes(_counts(run))
    return y, RoutingStats(
        balance_loss, run.requested.view(shape), first.view(strata, -1), unused, chosen.view(strata, -1),
        dropped.view(strata, -1), run.dropped.view(*shape, run.named["K"]), z_loss,
    )  # fmt: skip


@functools.cache
def _layout(strata) -> tuple[tuple[int, int, int], ...]:
    """For each gate: the first expert that it sees, how many it sees, and how many no later gate sees."""
    return tuple(zip(strata.first_experts, strata.visible, strata.own, strict=True))


def _settings(block, x_TD: Tensor, padding_mask: Tensor | None, shrink: int) -> SimpleNamespace:
    """What a pass needs; ``named`` are arguments of kernels, with constants in capitals."""
    gate, norms, experts = block.gates[0], block.layer_norms, block.experts
    training, width, columns = block.training, x_TD.shape[1], block.strata.num_experts
    policy = gate.second_expert_policy if training and gate.top_k > 1 else "all"
    dropout = norms.dropout if training and norms.dropout_per == "stratum" else 0.0
    inner_dropout = experts.activation_dropout if training else 0.0
    noisy = policy != "all" or dropout or inner_dropout
    dtype = autocast_dtype(x_TD.device)
    # Products of half precision numbers are exact in tf32.
    is_exact = dtype is not None or torch.float32 in (x_TD.dtype, gate.weight.dtype)
    block_e = max(next_power(columns), 16)
    gate_d = BLOCK_D if block_e == 16 else 2048 // block_e
    block_d = min(next_power(width), 2 * BLOCK_D // x_TD.element_size())
    # The capacity factor; 0: no limit.
    limit, over = exact(gate.capacity.current_factor, MAX_EXPERTS)
    placement = experts.placement
    # torch's products were faster on an H200. They know no rows that are sorted by rank.
    ours = placement.is_sharded or block.execution == "fused-triton"
    ours = ours or not torch_has_one(experts.w1, dtype or experts.w1.dtype)
    named = dict(
        padding=x_TD if padding_mask is None else padding_mask.reshape(-1),
        seed=torch.randint(2**31 - 1, (1,), device=x_TD.device) if noisy else x_TD,
        stratum_of_expert=block.stratum_of_expert, tokens=len(x_TD), blocks=-(-len(x_TD) // TOKENS),
        D=width, F=experts.w1.shape[1], K=gate.top_k, COLUMNS=columns, STRATA=len(block.strata),
        HELD=len(experts.w1), EPS=norms[0].eps, PADDED=padding_mask is not None, ROUND=dtype is None,
        EXACT=is_exact, POLICY=policy, BEFORE=gate.normalization == "before-drop",
        NORMALIZE=gate.normalization, LIMIT=limit, OVER=over, DROPOUT=dropout, INNER_DROPOUT=inner_dropout,
        BIAS=not ours, BLOCK_T=TOKENS, BLOCK_K=next_power(gate.top_k), BLOCK_E=block_e, BLOCK_D=block_d,
        WIDE_D=next_power(width), SPREAD_D=min(block_d, SPREAD_D),
        # Of products with the gates' weights, whose tiles grow with the number of experts.
        GATE_D=max(min(next_power(width), gate_d) // shrink, 16),
        SUMS_C=max(min(SUMS, 1024 // block_e) // (shrink * (1 + is_exact)), 16),
        SUMS_N=max(min(SUMS, 1024 // block_e) // (1 + is_exact), 16), **TILES,
    )  # fmt: skip
    return SimpleNamespace(
        named=named, launcher=Launcher, tile=TILE // shrink if ours else None, product=None,
        ranks=placement.group_size if placement.is_sharded else 1,
        trip=functools.partial(Trip, placement), strata=_layout(block.strata), keeps=torch.is_grad_enabled(),
    )  # fmt: skip


def _counts(run) -> tuple[int, ...]:
    """Sizes of the `RoutingStats` whose shapes do not depend on T, in the order in which they are stored."""
    strata, choices = len(run.strata), len(run.strata) * run.named["K"]
    return strata * run.named["COLUMNS"], strata, choices, choices


def _allocate(dtype: torch.dtype, device: torch.device, *sizes: int) -> tuple[Tensor, ...]:
    """Vectors of these sizes in one allocation, each aligned to 16 bytes."""
    padded = [each for size in sizes for each in (size, -size % 4)]
    return torch.empty(sum(padded), dtype=dtype, device=device).split_with_sizes(padded)[::2]


def _start(run: SimpleNamespace, tensors: tuple, **named) -> tuple[Launcher, TorchProducts]:
    """The launcher of a pass, and the products of the experts' rows."""
    launch = run.launcher({**run.named, **named}, *tensors)
    if run.tile:
        return launch, TritonProducts(run.tile, launch, run.ranks)
    return launch, TorchProducts(run.product)


def _of_stratum(run: SimpleNamespace, i: int, x_TD: Tensor, parameters: tuple) -> dict[str, Any]:
    """Arguments of the kernels of stratum ``i``; parameters as of `_Block.forward`."""
    norm_weight, norm_bias = parameters[2 * i : 2 * i + 2]
    gate_weight = parameters[2 * len(run.strata) + i]
    first, experts, _ = run.strata[i]
    return dict(
        x=x_TD, norm_weight=norm_weight, norm_bias=norm_bias, gate_weight=gate_weight, stratum=i,
        first=first, E=experts, FIRST=i == 0,
    )  # fmt: skip


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x_TD: Tensor, *parameters: Tensor):
        ctx.set_materialize_grads(False)
        k, (tokens, width), columns = kernels(), x_TD.shape, run.named["COLUMNS"]
        strata, top_k, blocks = len(run.strata), run.named["K"], run.named["blocks"]
        (w1, b1, w2, b2), copies = parameters[3 * strata :], tokens * top_k
        stack, y_TD = x_TD.new_empty(strata - 1, tokens, width), torch.empty_like(x_TD)
        positions, choices, rows, totals, counts, *ends = _allocate(
            torch.int32, x_TD.device, (strata + 1) * tokens, strata * copies, strata * copies,
            strata * top_k * columns, top_k * blocks * columns, *(each for _, each, _ in run.strata),
        )  # fmt: skip
        weights, moments, logits, means, sums = _allocate(
            torch.float32, x_TD.device, strata * copies, strata * tokens * 2,
            strata * tokens * columns, strata * (columns + 1), blocks * (columns + 1),
        )  # fmt: skip
        run.requested, run.dropped, run.numbers, kept_C = _allocate(
            torch.int64, x_TD.device, tokens, copies, sum(_counts(run)), columns
        )
        balance_loss, z_loss = weights.new_empty(()), weights.new_empty(())
        launch, products = _start(
            run, (x_TD, *parameters), positions=positions, choices=choices, rows=rows, totals=totals,
            counts=counts, weights=weights, moments=moments, logits=logits, means=means, sums=sums,
            requested=run.requested, dropped=run.dropped, numbers=run.numbers, kept=kept_C,
            balance=balance_loss, z_loss=z_loss, stack=stack, y=y_TD,
        )  # fmt: skip
        saved, trips = [], []
        for i, (first, experts, own) in enumerate(run.strata):
            launch.named |= _of_stratum(run, i, stack if i else x_TD, parameters)
            launch(k.route, blocks)
            launch(k.scan, experts + 1)
            copies_ND = w1.new_empty(copies, width)
            launch(k.dispatch, blocks, ends=ends[i], copies=copies_ND)
            trip = run.trip(kept_C, range(first, first + own), ends[i])
            x_ND, e = trip.make(copies_ND), trip.first
            if run.tile:
                hidden_NF = products.multiply(x_ND, w1, trip.ends, e, bias=b1, end="relu")
                out_ND = products.multiply(hidden_NF, w2, trip.ends, e, bias=b2, end="bias")
            else:
                hidden_NF = products.multiply(x_ND, w1, trip.ends, e)
                programs = min(PROGRAMS, -(-copies // TOKENS))
                launch(k.activate, programs, h=hidden_NF, bias=b1, ends=trip.ends)
                out_ND = products.multiply(hidden_NF, w2, trip.ends, e)
            out_ND = trip.make(out_ND, back=True)
            launch(k.combine, blocks, outputs=out_ND, bias=b2)
            if run.keeps:
                saved += [x_ND, hidden_NF, out_ND]
                trips.append(trip)
        if run.keeps:
            ctx.run, ctx.trips = run, trips
            routing = positions, choices, rows, weights, moments, logits, totals
            ctx.save_for_backward(x_TD, stack, *parameters, *routing, *saved)
        return y_TD, balance_loss, z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_balance, grad_z):
        k, run = kernels(), ctx.run
        strata, columns, blocks = len(run.strata), run.named["COLUMNS"], run.named["blocks"]
        x_TD, stack, *saved = ctx.saved_tensors
        parameters, saved = saved[: 3 * strata + 4], saved[3 * strata + 4 :]
        positions, choices, rows, weights, moments, logits, totals, *saved = saved
        w1, _, w2, b2 = parameters[3 * strata :]
        (tokens, width), (held, inner, _) = x_TD.shape, w1.shape
        grad_y = torch.zeros_like(x_TD) if grad_y is None else grad_y.contiguous()
        grad_x = torch.empty_like(x_TD)
        programs, warps, splits, across, across_f = _backward_sizes(run, tokens, width, inner)
        shares = [held * inner, held * width, *(each * width for _, each, _ in run.strata)]
        norm_parts, parts, grad_logits = _allocate(
            torch.float32, x_TD.device, programs * strata * 2 * width, splits * sum(shares), tokens * columns
        )  # fmt: skip
        launch, products = _start(
            run, (x_TD, grad_y, *parameters), positions=positions, choices=choices, rows=rows,
            weights=weights, moments=moments, logits=logits, totals=totals, grad_y=grad_y, grad_x=grad_x,
            grad_balance=grad_y if grad_balance is None else grad_balance, BALANCE=grad_balance is not None,
            grad_z=grad_y if grad_z is None else grad_z, Z=grad_z is not None, bias=b2,
            grad_logits=grad_logits, norm_parts=norm_parts, parts=parts, splits=splits, SIZE=sum(shares),
            WEIGHTS=width * inner,
        )  # fmt: skip
        later = None
        for i in reversed(range(strata)):
            x_ND, hidden_NF, out_ND = saved[3 * i : 3 * i + 3]
            trip, ends = ctx.trips[i], ctx.trips[i].ends
            launch.named |= _of_stratum(run, i, stack if i else x_TD, parameters)
            held = len(ends) // run.ranks
            launch.named |= {"ends": ends, "held": held, "ranks": run.ranks, "own": trip.own}
            grad_out_ND = torch.empty_like(out_ND)
            launch(k.spread, blocks, outputs=out_ND, grad_outputs=grad_out_ND)
            grad_out_ND = trip.make(grad_out_ND)
            grad_hidden_NF = products.multiply(grad_out_ND, w2, ends, trip.first, back=True)
            units = across + held * (across + across_f)
            launch(
                k.sums, splits * units, grad_hidden=grad_hidden_NF, hidden=hidden_NF, first=trip.first,
                grad_outputs=grad_out_ND, gate=sum(each for _, each, _ in run.strata[:i]),
            )  # fmt: skip
            grad_w2 = products.unsettled_outer(grad_out_ND, hidden_NF, ends)
            grad_w1 = products.unsettled_outer(grad_hidden_NF, x_ND, ends)
            del grad_out_ND
            grad_copies_ND = products.multiply(grad_hidden_NF, w1, ends, trip.first, back=True)
            del grad_hidden_NF
            later_w1, later_w2 = later or (grad_w1, grad_w2)
            launch(
                k.settle, held, -(-width * inner // TILES["SETTLED"]),
                grad_w1=grad_w1, grad_w2=grad_w2, later_w1=later_w1, later_w2=later_w2,
            )  # fmt: skip
            later = grad_w1, grad_w2
            grad_copies_ND = trip.make(grad_copies_ND, back=True)
            launch(k.collect, programs, num_warps=warps, grad_copies=grad_copies_ND)
            del grad_copies_ND
        return (
            None,
            grad_x,
            *_joined(parts.view(splits, -1), norm_parts, shares, parameters, *later),
        )


def _backward_sizes(run: SimpleNamespace, tokens: int, width: int, inner: int) -> tuple[int, ...]:
    """Programs of `collect` and their warps; parts of a sum; blocks of D and of F columns of `sums`."""
    few, block_c = TILES["FEW_T"], run.named["SUMS_C"]
    programs, splits = min(-(-tokens // few), NORMS), min(PARTS, -(-tokens // 256))
    warps = min(max(1, run.named["WIDE_D"] * few // PER_WARP), 32)
    return programs, warps, splits, -(-width // block_c), -(-inner // block_c)


def _joined(
    parts: Tensor, norm_parts: Tensor, shares: list[int], parameters: tuple, w1: Tensor, w2: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of all parameters of `_Block.forward`, of which w1 and w2 are given.

    Args:
        parts: of the gradients of b1, b2 and each gate's weights; their sizes are ``shares``.
        norm_parts: of those of each norm's weight and bias.
    """
    *norms_and_gates, _, b1, _, b2 = parameters
    strata = len(norms_and_gates) // 3
    norms, gates = norms_and_gates[: 2 * strata], norms_and_gates[2 * strata :]
    flat = parts.sum(0)
    grad_b1, grad_b2, *grad_gates = flat.to(gates[0].dtype).split_with_sizes(shares)
    if b1.dtype != grad_b1.dtype:
        grad_b1, grad_b2 = flat[: sum(shares[:2])].to(b1.dtype).split(shares[:2])
    width = norms[0].shape[0]
    grad_norms = norm_parts.view(-1, 2 * strata * width).sum(0).to(norms[0].dtype)
    grad_gates = [grad.view_as(gate) for grad, gate in zip(grad_gates, gates, strict=True)]
    biases = grad_b1.view_as(b1), grad_b2.view_as(b2)
    return *grad_norms.view(-1, width).unbind(), *grad_gates, w1, biases[0], w2, biases[1]
