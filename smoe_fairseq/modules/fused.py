"""`StratifiedMoE.forward` by Triton kernels: one autograd function for all strata.

`applies` checks that a block is supported; blocks with other gates, branches or sharded experts use the
general forward.

Shapes: T tokens, D embedding, F feed-forward, K choices per token, N = T K rows of copies.
"""

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoe_fairseq.modules import torch_features
from smoe_fairseq.modules.config import EVALUATION, TRAINING
from smoe_fairseq.modules.grouped import shape_of_product
from smoe_fairseq.modules.products import (
    SHRINKS,
    TILE,
    TYPES,
    Launcher,
    can_group,
    kernels,
    multiply,
    next_power,
    one_kernel,
    outer,
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
SPILLS = 16  # numbers of a thread that a kernel may keep in memory
PROGRAMS = 1024  # of a kernel over rows, whose number is not known on the host
TILES = {
    "activate": (16, 256),
    "spread": 128,
    "sums": (64, 64),
    "norm": (2, 1024, 512),
}


_shrinks: dict = {}


def shrinkage(block, x: Tensor) -> int | None:
    """The number that divides the tiles so that all kernels of the block fit the device; None: none does.

    They are compiled, once for blocks of the same shapes and types.
    """
    w1, gate = block.experts.w1, block.gates[0]
    types = x.dtype, autocast_dtype(x.device), w1.dtype, gate.weight.dtype
    key = x.device, *types, w1.shape, block.strata, gate.top_k, block.training
    key += (block.execution,)
    if key not in _shrinks:
        spills, reason = {}, ""
        for shrink in SHRINKS:
            try:
                spills[shrink] = _spills(block, x, shrink)
            except Exception as error:  # of a compiler, a driver or Triton itself
                reason = str(error)
                if type(error).__name__ == "OutOfResources":
                    continue
                break
            if spills[shrink] <= SPILLS:
                break
        _shrinks[key] = min(spills, key=spills.get) if spills else None
        what = f"{len(w1)} experts of {w1.shape[2]} and {w1.shape[1]} on {x.device}"
        if _shrinks[key] is None:
            logger.warning("%s: no fused kernels, since Triton fails: %s", what, reason)
        else:
            logger.info("%s: fused kernels", what)
    return _shrinks[key]


def _spills(block, x: Tensor, shrink: int) -> int:
    """Numbers that a thread of the block's kernels keeps in memory, at most."""
    found = []

    def load(kernel, grid: tuple, arguments: tuple, constants: tuple, **options) -> None:
        compiled = kernel.warmup(*arguments, *constants, grid=grid, **options)
        compiled._init_handles()  # raises OutOfResources
        found.append(compiled.n_spills)

    with torch.cuda.device_of(x):  # for which Triton compiles
        rehearse(block, x, load, shrink)
    return max(found)


def rehearse(block, x: Tensor, launch: Callable, shrink: int = 1) -> None:
    """Calls ``launch`` as a training pass over a token of ``x`` would launch kernels, without computing."""
    dtype = autocast_dtype(x.device) or block.experts.w1.dtype

    def empty(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or tensor.dtype
        grad = dtype.is_floating_point
        return torch.empty_like(tensor, device="meta", dtype=dtype, requires_grad=grad)

    x_TD = x.detach().reshape(-1, x.shape[-1])[:1]
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        run = _settings(block, x_TD, None, shrink)
    run.launcher, run.product, run.keeps = lambda *_: launch, shape_of_product, True
    run.stratum_of_expert, run.seed = empty(run.stratum_of_expert), empty(run.seed)
    norms = [empty(p) for norm in block.layer_norms for p in (norm.weight, norm.bias)]
    gates, experts = [empty(gate.weight) for gate in block.gates], block.experts
    weights = [empty(w, dtype) for w in (experts.w1, experts.b1, experts.w2, experts.b2)]
    with torch.enable_grad():
        outputs = _Block.apply(run, empty(x_TD), *norms, *gates, *weights)
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


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
        and not block.experts.placement.is_sharded
        and (TRAINING if block.training else EVALUATION) in block.config.fast
        and block.experts.activation_fn is F.relu
        and max(block.experts.activation_dropout, norms.dropout) < 1
        and all(gate.supports("fused") and gate.top_k <= MAX_CHOICES for gate in gates)
        and all(norm.weight.dtype == gates[0].weight.dtype for norm in norms)
        and (kernels().is_interpreted() or (x.is_cuda and shrinkage(block, x) is not None))
    )


def one_launch(block, x: Tensor) -> bool:
    """Whether the products are torch's: where they are one kernel, which was faster on an H200."""
    if block.execution == "fused-triton":
        return False
    dtype = autocast_dtype(x.device) or block.experts.w1.dtype
    waits = x.is_cuda and not one_kernel(x.device, dtype)
    return can_group(block.experts.w1) and not waits


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
    stats = dict.fromkeys(RoutingStats._fields) | {
        "balance_loss": balance_loss,
        "z_loss": z_loss,
        "requested_capacity": run.requested.view(shape),
        "first_choices": first.view(strata, -1),
        "unused": unused,
        "chosen": chosen.view(strata, -1),
        "dropped": dropped.view(strata, -1),
        "dropped_choices": run.dropped.view(*shape, run.K),
    }
    return y, RoutingStats(**stats)


@functools.cache
def _layout(strata) -> tuple[tuple[int, int, int], ...]:
    """For each gate: the first expert that it sees, how many it sees, and how many no later gate sees."""
    return tuple(zip(strata.first_experts, strata.visible, strata.own, strict=True))


def _settings(block, x_TD: Tensor, padding_mask: Tensor | None, shrink: int) -> SimpleNamespace:
    """Arguments of the kernels; names in capitals are those of their constants."""
    gate, norms, experts = block.gates[0], block.layer_norms, block.experts
    training = block.training
    policy = gate.second_expert_policy if training and gate.top_k > 1 else "all"
    dropout = norms.dropout if training and norms.dropout_per == "stratum" else 0.0
    inner_dropout = experts.activation_dropout if training else 0.0
    noisy = policy != "all" or dropout or inner_dropout
    rounds = autocast_dtype(x_TD.device) is None
    is_exact = not rounds or torch.float32 in (x_TD.dtype, gate.weight.dtype)
    block_e = max(next_power(len(block.stratum_of_expert)), 16)
    gate_d = BLOCK_D if block_e == 16 else 2048 // block_e
    return SimpleNamespace(
        launcher=Launcher,
        products=TorchProducts if one_launch(block, x_TD) else TritonProducts,
        product=torch_features.grouped_mm,
        TILE=TILE // shrink,
        strata=_layout(block.strata),
        padding=None if padding_mask is None else padding_mask.reshape(-1),
        stratum_of_expert=block.stratum_of_expert,
        keeps=torch.is_grad_enabled(),
        seed=torch.randint(2**31 - 1, (1,), device=x_TD.device) if noisy else x_TD,
        EPS=norms[0].eps,
        K=gate.top_k,
        COLUMNS=len(block.stratum_of_expert),
        ROUND=rounds,
        # Products of half precision numbers are exact in tf32.
        EXACT=is_exact,
        POLICY=policy,
        NORMALIZE=gate.normalization,
        # The capacity factor as a ratio; 0: no limit.
        LIMIT=_ratio(gate.capacity.current_factor),
        DROPOUT=dropout,
        INNER_DROPOUT=inner_dropout,
        BLOCK_D=min(next_power(x_TD.shape[1]), 2 * BLOCK_D // x_TD.element_size()),
        BLOCK_E=block_e,
        # Of products with the gates' weights, whose tiles grow with the number of experts.
        GATE_D=max(min(next_power(x_TD.shape[1]), gate_d) // shrink, 16),
        SUMS_C=max(min(TILES["sums"][0], 1024 // block_e) // (shrink * (1 + is_exact)), 16),
        SUMS_N=max(min(TILES["sums"][1], 1024 // block_e) // (1 + is_exact), 16),
        BLOCK_K=next_power(gate.top_k),
    )


@functools.cache
def _ratio(factor: float) -> tuple[int, int]:
    return exact(factor, MAX_EXPERTS)


def _counts(run) -> tuple[int, ...]:
    """Sizes of the `RoutingStats` whose shapes do not depend on T, in the order in which they are stored."""
    strata = len(run.strata)
    return strata * run.COLUMNS, strata, strata * run.K, strata * run.K


def _allocate(dtype: torch.dtype, device: torch.device, *sizes: int) -> tuple[Tensor, ...]:
    """Vectors of these sizes in one allocation, each aligned to 16 bytes."""
    padded = [each for size in sizes for each in (size, -size % 4)]
    return torch.empty(sum(padded), dtype=dtype, device=device).split_with_sizes(padded)[::2]


class TorchProducts:
    """Products of the experts' rows by torch, for shapes and devices for which it has one kernel."""

    def __init__(self, run: SimpleNamespace, launch: Callable):
        self.run, self.launch = run, launch

    def multiply(self, x_NI, weight, ends_E, first: int, back=False, activation=None) -> Tensor:
        """``x W_e'``, with ``back`` ``x W_e``, of the experts from the ``first`` on.

        Args:
            activation: bias, seed and stratum; then ``dropout(relu(x W_e' + bias))``.
        """
        weight = weight[first:] if back else weight[first:].transpose(1, 2)
        y_NO, run = self.run.product(x_NI, weight, offs=ends_E), self.run
        if activation is not None:
            bias, seed, i = activation
            self.launch(
                kernels().activate, (min(PROGRAMS, -(-len(x_NI) // TOKENS)),),
                (y_NO, bias, ends_E, seed, i, len(ends_E), first),
                (y_NO.shape[1], run.INNER_DROPOUT, run.BLOCK_E, *TILES["activate"]),
            )  # fmt: skip
        return y_NO

    def outer(self, y_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        """``sum_n y_n x_n'`` over each expert's rows ``(E, O, I)``."""
        return self.run.product(y_NO.t(), x_NI, offs=ends_E)


class TritonProducts(TorchProducts):
    """The same by our own kernels."""

    def multiply(self, x_NI, weight, ends_E, first: int, back=False, activation=None) -> Tensor:
        activation = activation and (*activation, self.run.INNER_DROPOUT)
        return multiply(self.launch, self.run.TILE, x_NI, weight, ends_E, first, back, activation)

    def outer(self, y_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        return outer(self.launch, self.run.TILE, y_NO, x_NI, ends_E)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x_TD: Tensor, *parameters: Tensor):
        ctx.set_materialize_grads(False)
        k, (tokens, width) = kernels(), x_TD.shape
        strata, columns, top_k, device = len(run.strata), run.COLUMNS, run.K, x_TD.device
        norms, gates = parameters[: 2 * strata], parameters[2 * strata : 3 * strata]
        w1, b1, w2, b2 = parameters[3 * strata :]
        blocks, copies = -(-tokens // TOKENS), tokens * top_k
        stack, y_TD = x_TD.new_empty(strata - 1, tokens, width), torch.empty_like(x_TD)
        positions, choices, rows, totals, counts, *ends = _allocate(
            torch.int32, device, (strata + 1) * tokens, strata * copies, strata * copies,
            strata * top_k * columns, top_k * blocks * columns, *(each for _, each, _ in run.strata),
        )  # fmt: skip
        weights, moments, logits, means, sums = _allocate(
            torch.float32, device, strata * copies, strata * tokens * 2, strata * tokens * columns,
            strata * (columns + 1), blocks * (columns + 1),
        )  # fmt: skip
        run.requested, run.dropped, run.numbers = _allocate(
            torch.int64, device, tokens, copies, sum(_counts(run))
        )
        balance_loss, z_loss = weights.new_empty(()), weights.new_empty(())
        launch, kept = run.launcher(x_TD, *parameters), []
        products = run.products(run, launch)
        for i, (first, experts, _) in enumerate(run.strata):
            norm, gate, is_first, ends_E = norms[2 * i : 2 * i + 2], gates[i], i == 0, ends[i]
            source = x_TD if is_first else stack
            launch(
                k.route, (blocks,),
                (source, source if run.padding is None else run.padding, *norm, gate, run.seed,
                 positions, moments, logits, choices, weights, counts, sums, tokens, i, experts),
                (run.EPS, width, top_k, columns, strata, is_first, run.padding is not None, run.ROUND,
                 run.EXACT, run.POLICY, run.NORMALIZE == "before-drop",
                 run.GATE_D, run.BLOCK_E, run.BLOCK_K, TOKENS),
            )  # fmt: skip
            launch(
                k.scan, (experts + 1,), (counts, sums, totals, means, blocks, i), (top_k, columns, 512)
            )  # fmt: skip
            copies_ND = w1.new_empty(copies, width)
            launch(
                k.dispatch, (blocks,),
                (source, *norm, run.stratum_of_expert, moments, choices, counts, totals, means,
                 positions, weights, rows, ends_E, copies_ND, run.requested, run.dropped, run.numbers,
                 balance_loss, z_loss, tokens, i, experts, first),
                (width, top_k, columns, strata, is_first, run.ROUND, *run.LIMIT, run.NORMALIZE,
                 run.BLOCK_D, run.BLOCK_E, run.BLOCK_K, TOKENS),
            )  # fmt: skip
            hidden_NF = products.multiply(
                copies_ND, w1, ends_E, first, activation=(b1, run.seed, i)
            )
            out_ND = products.multiply(hidden_NF, w2, ends_E, first)
            launch(
                k.combine, (blocks,),
                (source, out_ND, b2, run.seed, positions, choices, rows, weights, stack, y_TD,
                 tokens, i, first),
                (width, top_k, strata, is_first, run.DROPOUT, run.BLOCK_D, TOKENS),
            )  # fmt: skip
            if run.keeps:
                kept += [ends_E, copies_ND, hidden_NF, out_ND]
        if run.keeps:
            ctx.run = run
            routing = positions, choices, rows, weights, moments, logits, totals
            ctx.save_for_backward(x_TD, stack, *parameters, *routing, *kept)
        return y_TD, balance_loss, z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_balance, grad_z):
        k, run = kernels(), ctx.run
        strata, columns, top_k = len(run.strata), run.COLUMNS, run.K
        x_TD, stack, *saved = ctx.saved_tensors
        parameters, saved = saved[: 3 * strata + 4], saved[3 * strata + 4 :]
        positions, choices, rows, weights, moments, logits, totals, *kept = saved
        norms, gates = parameters[: 2 * strata], parameters[2 * strata : 3 * strata]
        w1, b1, w2, b2 = parameters[3 * strata :]
        (tokens, width), inner, blocks = x_TD.shape, w1.shape[1], -(-len(x_TD) // TOKENS)
        grad_y = torch.zeros_like(x_TD) if grad_y is None else grad_y.contiguous()
        grad_x = torch.empty_like(x_TD)
        block_c, block_n = run.SUMS_C, run.SUMS_N
        block_t, programs, per_warp = TILES["norm"]
        programs = min(-(-tokens // block_t), programs)
        splits = min(PARTS, -(-tokens // 256))
        across, wide = -(-width // block_c), -(-inner // block_c)
        shares = [columns * inner, columns * width, *(each * width for _, each, _ in run.strata)]
        size = sum(shares)
        norm_parts, parts, grad_logits = _allocate(
            torch.float32,
            x_TD.device,
            programs * strata * 2 * width,
            splits * size,
            tokens * columns,
        )
        launch, later = run.launcher(x_TD, grad_y, *parameters), None
        products = run.products(run, launch)
        for i in reversed(range(strata)):
            first, experts, own = run.strata[i]
            before = sum(each for _, each, _ in run.strata[:i])
            ends_E, copies_ND, hidden_NF, out_ND = kept[4 * i : 4 * i + 4]
            norm, gate, is_first = norms[2 * i : 2 * i + 2], gates[i], i == 0
            source = x_TD if is_first else stack
            grad_out_ND = torch.empty_like(out_ND)
            launch(
                k.spread, (blocks,),
                (grad_y, grad_x, grad_y if grad_balance is None else grad_balance,
                 grad_y if grad_z is None else grad_z, out_ND, b2, run.seed,
                 positions, choices, rows, weights, logits, totals, grad_out_ND, grad_logits,
                 tokens, i, experts, first),
                (width, top_k, columns, strata, run.DROPOUT, run.NORMALIZE,
                 grad_balance is not None, grad_z is not None,
                 min(run.BLOCK_D, TILES["spread"]), run.BLOCK_E, run.BLOCK_K, TOKENS),
            )  # fmt: skip
            grad_hidden_NF = products.multiply(grad_out_ND, w2, ends_E, first, back=True)
            launch(
                k.sums, (splits * (across + experts * (across + wide)),),
                (source, grad_hidden_NF, hidden_NF, grad_out_ND, grad_logits, *norm, positions, moments,
                 ends_E, parts, splits, tokens, i, experts, first, own, before),
                (width, inner, columns, size, is_first, run.ROUND, run.EXACT, run.INNER_DROPOUT,
                 run.BLOCK_E, block_c, block_n),
            )  # fmt: skip
            grad_w2 = products.outer(grad_out_ND, hidden_NF, ends_E)
            grad_w1 = products.outer(grad_hidden_NF, copies_ND, ends_E)
            del grad_out_ND
            grad_copies_ND = products.multiply(grad_hidden_NF, w1, ends_E, first, back=True)
            del grad_hidden_NF
            launch(
                k.settle, (experts, -(-width * inner // 4096)),
                (grad_w1, grad_w2, *(later or (grad_w1, grad_w2)), ends_E, own), (width * inner, 4096),
            )  # fmt: skip
            later = grad_w1, grad_w2
            launch(
                k.collect, (programs,),
                (source, grad_y, grad_x, grad_copies_ND, grad_logits, norm[0], gate, positions, moments,
                 rows, norm_parts, tokens, i, experts),
                (width, top_k, columns, strata, is_first, next_power(width), block_t),
                num_warps=min(max(1, next_power(width) * block_t // per_warp), 32),
            )  # fmt: skip
            del grad_copies_ND
        flat = parts.view(splits, size).sum(0)
        grad_b1, grad_b2, *grad_gates = flat.to(gates[0].dtype).split_with_sizes(shares)
        if b1.dtype != grad_b1.dtype:
            grad_b1, grad_b2 = flat[: sum(shares[:2])].to(b1.dtype).split(shares[:2])
        grad_norms = norm_parts.view(programs, -1).sum(0).to(norms[0].dtype)
        grad_gates = [grad.view_as(gate) for grad, gate in zip(grad_gates, gates, strict=True)]
        grad_w1, grad_w2 = later
        return (
            None, grad_x, *grad_norms.view(-1, width).unbind(), *grad_gates,
            grad_w1, grad_b1.view_as(b1), grad_w2, grad_b2.view_as(b2),
        )  # fmt: skip
