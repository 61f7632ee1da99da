"""`StratifiedMoE.forward` by Triton kernels: one autograd function for all strata.

`applies` says for which blocks. What it leaves out (other gates, branches, ranks) goes the general way.

Shapes: T tokens, D embedding, F feed-forward, C experts of the block, K choices per token, N = T K rows of
copies, L strata, B blocks of tokens.
"""

import functools
import importlib.util
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoe_fairseq.modules import torch_features
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.grouped import can_group
from smoe_fairseq.modules.parallel import LocalDispatcher
from smoe_fairseq.modules.statistics import RoutingStats
from smoe_fairseq.modules.torch_features import autocast_dtype

TYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_EXPERTS, MOST_CHOICES, WIDEST = 128, 8, 2048
TOKENS = 16  # per program
PARTS = 16  # of each sum over an expert's rows
BLOCK_D = 256  # columns that a program has at a time
PROGRAMS = 1024  # of a kernel over rows, whose number the host does not know
DIRECT = False
TILES = {"activate": (16, 256), "sums": (64, 32), "norm": (8, 256)}


@functools.cache
def kernels():
    """The kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from smoe_fairseq.modules import kernels

    return kernels


def applies(block, x: Tensor) -> bool:
    """Whether `forward` computes what the block would for ``x``."""
    config, w1 = block.config, block.experts.w1
    training = block.training
    return (
        block.execution == "fused"
        and not torch.compiler.is_compiling()
        and kernels() is not None
        and (x.is_cuda or kernels().is_interpreted())
        and x.numel() > 0
        and x.dtype in TYPES
        and x.shape[-1] <= WIDEST
        and block.strata.num_experts <= MOST_EXPERTS
        and can_group(w1)
        and type(block.dispatcher) is LocalDispatcher
        and config.norms == "paper"
        and not block.strata.fixed_depth
        and block.experts.activation_fn is F.relu
        and max(block.experts.activation_dropout, block.layer_norms.dropout) < 1
        and not (block.branches or block.eom or config.capacity_budget)
        and not (training and block.gating_dropout)
        and config.balance_over == "batch"
        and all(map(_is_plain, block.gates))
        and all(norm.weight.dtype == block.gates[0].weight.dtype for norm in block.layer_norms)
    )


def _is_plain(gate) -> bool:
    """Whether the gate chooses by softmax alone, and nobody looks on."""
    return (
        type(gate) is TopKGate
        and gate.scores == "softmax"
        and gate.top_k <= MOST_CHOICES
        and not (gate.free_experts or gate.bias or gate.exit_bias.acts)
        and gate.residual_weight is None
        and (gate.capacity.order == "sentence" or not gate.capacity.factor_in_force)
        and not (gate._forward_hooks or gate._forward_pre_hooks)
    )


def forward(block, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, RoutingStats]:
    """The block's output and statistics for ``x (..., D)``."""
    x_TD = x.reshape(-1, x.shape[-1]).contiguous()
    run = _settings(block, x_TD, padding_mask)
    norms, gates = block.layer_norms, block.gates
    parameters = [p for norm in norms for p in (norm.weight, norm.bias)]
    parameters += [gate.weight for gate in gates]
    y_TD, balance_loss, z_loss = _Block.apply(run, x_TD, *parameters, *block.experts.weights())
    if block.layer_norms.dropout_per == "layer":
        y_TD = norms.finish(x_TD, y_TD, None, None)
    strata, choices = len(gates), run.K
    sizes = [strata * run.COLUMNS, strata, strata * choices, strata * choices]
    first, unused, chosen, dropped = run.numbers.split(sizes)
    nothing = dict.fromkeys(RoutingStats._fields)
    stats = {
        "balance_loss": balance_loss,
        "z_loss": z_loss,
        "requested_capacity": run.requested.view(x.shape[:-1]),
        "first_choices": first.view(strata, -1),
        "unused": unused,
        "chosen": chosen.view(strata, -1),
        "dropped": dropped.view(strata, -1),
        "dropped_choices": run.dropped.view(*x.shape[:-1], choices),
    }
    return y_TD.view_as(x), RoutingStats(**{**nothing, **stats})


def _settings(block, x_TD: Tensor, padding_mask: Tensor | None) -> SimpleNamespace:
    """What the kernels need to know of the block, by the names of their parameters."""
    gate, norms, experts = block.gates[0], block.layer_norms, block.experts
    training, strata = block.training, block.strata
    policy = gate.second_expert_policy if training and gate.top_k > 1 else "all"
    dropout = norms.dropout if training and norms.dropout_per == "stratum" else 0.0
    inner_dropout = experts.activation_dropout if training else 0.0
    noisy = policy != "all" or dropout or inner_dropout
    seed = torch.randint(2**31 - 1, (1,), device=x_TD.device) if noisy else x_TD
    columns, width = strata.num_experts, x_TD.shape[1]
    return SimpleNamespace(
        strata=list(zip(strata.first_experts, strata.visible, strata.own)),
        padding=None if padding_mask is None else padding_mask.reshape(-1),
        stratum_of_expert=block.stratum_of_expert,
        keeps=torch.is_grad_enabled(),
        seed=seed,
        eps=norms[0].eps,
        K=gate.top_k,
        COLUMNS=columns,
        ROUND=autocast_dtype(x_TD.device) is None,
        POLICY=policy,
        NORMALIZE=gate.normalization,
        LIMIT=gate.capacity.factor_in_force,
        DROPOUT=dropout,
        INNER_DROPOUT=inner_dropout,
        BLOCK_D=min(_power(width), BLOCK_D),
        BLOCK_E=max(_power(columns), 16),
        BLOCK_K=_power(gate.top_k),
    )


class Launcher:
    """Launches kernels: the first time as Triton does, then by what that has compiled.

    Triton looks at every argument of every launch, which costs the host more than the kernel does the device.

    Args:
        tensors: of each type that there is in a pass.
    """

    compiled: ClassVar[dict] = {}

    def __init__(self, *tensors: Tensor):
        self.types = tuple(t.dtype for t in tensors), tensors[0].device
        self.direct = DIRECT and not any(t.data_ptr() % 16 for t in tensors)

    def __call__(self, kernel, grid: tuple, arguments: tuple, constants: tuple, **options) -> None:
        if not self.direct:
            kernel[grid](*arguments, *constants, **options)
            return
        key = kernel.__name__, constants, self.types
        found = self.compiled.get(key)
        if found is None:
            self.compiled[key] = kernel[grid](*arguments, *constants, **options)
        else:
            found[(*grid, 1, 1)](*arguments, *constants)


def _power(n: int) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << (n - 1).bit_length()


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x_TD: Tensor, *parameters: Tensor):
        ctx.set_materialize_grads(False)
        k, product, (tokens, width) = kernels(), torch_features.grouped_mm, x_TD.shape
        strata, columns, top_k = len(run.strata), run.COLUMNS, run.K
        norms, gates = parameters[: 2 * strata], parameters[2 * strata : 3 * strata]
        w1, b1, w2, b2 = parameters[3 * strata :]
        blocks, inner, device = -(-tokens // TOKENS), w1.shape[1], x_TD.device
        make = functools.partial(torch.empty, device=device)
        floats = functools.partial(make, dtype=torch.float32)
        integers, longs = (functools.partial(make, dtype=of) for of in (torch.int32, torch.int64))
        stack, y_TD = x_TD.new_empty(strata - 1, tokens, width), torch.empty_like(x_TD)
        positions = integers(strata + 1, tokens)
        choices, rows = integers(2, strata, tokens, top_k)
        weights, moments = floats(strata, tokens, top_k), floats(strata, tokens, 2)
        logits = floats(strata, tokens, columns)
        counts, sums = integers(top_k * blocks, columns), floats(blocks, columns + 1)
        totals, means = integers(strata, top_k, columns), floats(strata, columns + 1)
        # Products of half precision numbers are exact in tf32.
        exact = not run.ROUND or torch.float32 in (x_TD.dtype, gates[0].dtype)
        run.requested, run.dropped = longs(tokens), longs(tokens, top_k)
        run.numbers = longs(strata * (columns + 1 + 2 * top_k))
        balance_loss, z_loss = floats(()), floats(())
        launch, kept = Launcher(x_TD, *parameters), []
        for i, (first, experts, _) in enumerate(run.strata):
            norm, gate, is_first = norms[2 * i : 2 * i + 2], gates[i], i == 0
            source = x_TD if is_first else stack
            launch(
                k.route, (blocks,),
                (source, source if run.padding is None else run.padding, *norm, gate, run.seed,
                 positions, moments, logits, choices, weights, counts, sums, tokens, i, experts),
                (run.eps, width, top_k, columns, strata, is_first, run.padding is not None, run.ROUND, exact,
                 run.POLICY, run.NORMALIZE == "before-drop",
                 run.BLOCK_D, run.BLOCK_E, run.BLOCK_K, TOKENS),
            )  # fmt: skip
            launch(
                k.scan, (experts + 1,), (counts, sums, totals, means, blocks, i), (top_k, columns, 512)
            )  # fmt: skip
            ends_E, copies_ND = integers(experts), make(tokens * top_k, width, dtype=w1.dtype)
            launch(
                k.dispatch, (blocks,),
                (source, *norm, run.stratum_of_expert, moments, choices, counts, totals, means,
                 positions, weights, rows, ends_E, copies_ND, run.requested, run.dropped, run.numbers,
                 balance_loss, z_loss, tokens, i, experts, first),
                (width, top_k, columns, strata, is_first, run.ROUND, run.LIMIT, run.NORMALIZE,
                 run.BLOCK_D, run.BLOCK_E, run.BLOCK_K, TOKENS),
            )  # fmt: skip
            hidden_NF = product(copies_ND, w1[first:].transpose(1, 2), offs=ends_E)
            launch(
                k.activate, (min(PROGRAMS, -(-len(hidden_NF) // TOKENS)),),
                (hidden_NF, b1, ends_E, run.seed, i, experts, first),
                (inner, run.INNER_DROPOUT, run.BLOCK_E, *TILES["activate"]),
            )  # fmt: skip
            out_ND = product(hidden_NF, w2[first:].transpose(1, 2), offs=ends_E)
            launch(
                k.combine, (blocks,),
                (source, out_ND, b2, run.seed, positions, choices, rows, weights, stack, y_TD,
                 tokens, i, first),
                (width, top_k, strata, is_first, run.DROPOUT, run.BLOCK_D, TOKENS),
            )  # fmt: skip
            if run.keeps:
                kept += [ends_E, copies_ND, hidden_NF, out_ND]
        ctx.run = run
        routing = positions, choices, rows, weights, moments, logits, totals
        ctx.save_for_backward(x_TD, stack, *parameters, *routing, *kept)
        return y_TD, balance_loss, z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_balance, grad_z):
        k, product, run = kernels(), torch_features.grouped_mm, ctx.run
        strata, columns, top_k = len(run.strata), run.COLUMNS, run.K
        x_TD, stack, *saved = ctx.saved_tensors
        parameters, saved = saved[: 3 * strata + 4], saved[3 * strata + 4 :]
        positions, choices, rows, weights, moments, logits, totals, *kept = saved
        norms, gates = parameters[: 2 * strata], parameters[2 * strata : 3 * strata]
        w1, b1, w2, b2 = parameters[3 * strata :]
        (tokens, width), inner, device = x_TD.shape, w1.shape[1], x_TD.device
        blocks = -(-tokens // TOKENS)
        grad_y = torch.zeros_like(x_TD) if grad_y is None else grad_y.contiguous()
        grad_x = torch.empty_like(x_TD)
        floats = functools.partial(torch.empty, device=device, dtype=torch.float32)
        grad_logits = floats(tokens, columns)
        biases = columns * (inner + width)
        starts = [sum(experts for _, experts, _ in run.strata[:i]) for i in range(strata + 1)]
        size = biases + starts[-1] * width
        splits, programs = min(PARTS, -(-tokens // 256)), min(2 * blocks, TILES["norm"][1])
        parts = floats(splits, size)
        exact = not run.ROUND or torch.float32 in (x_TD.dtype, gates[0].dtype)
        norm_parts = floats(programs, strata * 2 * width)
        launch, later = Launcher(x_TD, grad_y, *parameters), None
        for i in reversed(range(strata)):
            first, experts, own = run.strata[i]
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
                 run.BLOCK_D, run.BLOCK_E, run.BLOCK_K, TOKENS),
            )  # fmt: skip
            grad_hidden_NF = product(grad_out_ND, w2[first:], offs=ends_E)
            block_c, block_n = TILES["sums"]
            across, wide = -(-width // block_c), -(-inner // block_c)
            launch(
                k.sums, (splits * (across + experts * (across + wide)),),
                (source, grad_hidden_NF, hidden_NF, grad_out_ND, grad_logits, *norm, positions, moments,
                 ends_E, parts, splits, tokens, i, experts, first, own, starts[i]),
                (width, inner, columns, size, is_first, run.ROUND, exact, run.INNER_DROPOUT,
                 run.BLOCK_E, block_c, block_n),
            )  # fmt: skip
            grad_w2 = product(grad_out_ND.t(), hidden_NF, offs=ends_E)
            grad_w1 = product(grad_hidden_NF.t(), copies_ND, offs=ends_E)
            grad_copies_ND = product(grad_hidden_NF, w1[first:], offs=ends_E)
            launch(
                k.settle, (experts, -(-width * inner // 4096)),
                (grad_w1, grad_w2, *(later or (grad_w1, grad_w2)), ends_E, own), (width * inner, 4096),
            )  # fmt: skip
            later = grad_w1, grad_w2
            launch(
                k.collect, (programs,),
                (source, grad_y, grad_x, grad_copies_ND, grad_logits, norm[0], gate, positions, moments,
                 rows, norm_parts, tokens, i, experts),
                (width, top_k, columns, strata, is_first, _power(width), TILES["norm"][0]),
                num_warps=min(max(1, _power(width) * TILES["norm"][0] // 512), 32),
            )  # fmt: skip
        flat = parts.sum(0)
        shares = [
            columns * inner,
            columns * width,
            *(experts * width for _, experts, _ in run.strata),
        ]
        grad_b1, grad_b2, *grad_gates = flat.to(b1.dtype).split(shares)
        grad_norms = norm_parts.sum(0).to(norms[0].dtype).view(2 * strata, width).unbind()
        grad_gates = [
            grad.to(gate.dtype).view_as(gate) for grad, gate in zip(grad_gates, gates, strict=True)
        ]
        grad_biases = grad_b1.view_as(b1), grad_b2.view_as(b2)
        return (
            None, grad_x, *grad_norms, *grad_gates,
            later[0], grad_biases[0], later[1], grad_biases[1],
        )  # fmt: skip
