"""`StratifiedMoE.forward` for inference on a CPU: the same results, bit for bit, with a quarter of the calls.

A decoding step has few tokens, so the overhead of calls matters as much as the experts' products. This
version drops, counts and learns nothing, and sorts copies in numpy, whose calls are faster than torch's.
`applies` checks that a block is supported; other blocks use the general forward.

Shapes: T tokens of the block or of one stratum, D embedding, K choices per token, N = T K copies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.config import INFERENCE
from smoe_fairseq.modules.experts import PerExpert
from smoe_fairseq.modules.gates.linear import Gate
from smoe_fairseq.modules.rows import IndexedTokens
from smoe_fairseq.modules.torch_features import autocast_dtype

try:
    import numpy as np
except ModuleNotFoundError:  # the block needs torch alone
    np = None


def applies(block, x: Tensor) -> bool:
    """Whether `forward` supports this block and ``x``."""
    return (
        np is not None
        and not torch.is_grad_enabled()
        and not block.training
        and x.device.type == "cpu"
        and x.dtype == torch.float32 == block.experts.w1.dtype
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and autocast_dtype(x.device) is None
        and not block.experts.placement.is_sharded
        and block.execution != "grouped"
        and INFERENCE in block.config.fast
        and all(gate.supports("inference") for gate in block.gates)
    )


def forward(block, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """The block's output for ``x (..., D)``."""
    experts, strata, norms = block.experts, block.strata, block.layer_norms
    run = (block.execution if callable(block.execution) else PerExpert)(experts)
    weights = experts.w1, experts.b1, experts.w2, experts.b2
    stratum_E = block.stratum_of_expert.numpy()
    x_TD = x.reshape(-1, x.shape[-1])
    position_T = np.zeros(len(x_TD), dtype=np.int64)
    if padding_mask is not None:
        position_T[padding_mask.reshape(-1).numpy()] = len(strata)
    padding_T = torch.from_numpy(position_T > 0)
    y_TD = norms.start(x_TD)
    for i, (gate, first) in enumerate(zip(block.gates, strata.first_experts)):
        index_T = (position_T == i).nonzero()[0]
        tokens = IndexedTokens(torch.from_numpy(index_T), len(x_TD))
        if not len(index_T):
            continue
        h_TD, y_TD = norms.enter(i, y_TD, tokens)
        expert_TK, weight_TK = best_experts(gate, h_TD)
        expert_TK = expert_TK + first
        position_T[index_T] = i + 1 if strata.fixed_depth else stratum_E[expert_TK[:, 0]] + 1
        rows = sort_by_expert(expert_TK, weight_TK, len(stratum_E))
        out_TD = run.infer(h_TD, *rows, weights)
        y_TD = norms.leave(y_TD, out_TD, tokens)
    return norms.finish(x_TD, y_TD, tokens, padding_T).view_as(x)


def best_experts(gate: Gate, h_TD: Tensor) -> "tuple[np.ndarray, np.ndarray]":
    """Experts, as the gate numbers them, and weights ``(T, K)``, equal to the gate's without dropping."""
    logits_TE = F.linear(h_TD, gate.weight)
    score_TE = logits_TE.sigmoid() if gate.scores == "sigmoid" else logits_TE.softmax(dim=-1)
    score_TE, row_T = score_TE.numpy(), np.arange(len(h_TD))
    left_TE, chosen = score_TE.copy(), []
    for _ in range(gate.top_k):
        chosen.append(left_TE.argmax(1))
        left_TE[row_T, chosen[-1]] = -np.inf
    expert_TK = np.stack(chosen, 1)
    weight_TK = score_TE[row_T[:, None], expert_TK]
    if gate.normalization != "none":
        sum_T1 = weight_TK.sum(1, keepdims=True)
        weight_TK /= np.maximum(sum_T1, np.finfo(np.float32).tiny)
    return expert_TK, weight_TK


def sort_by_expert(
    expert_TK: "np.ndarray", weight_TK: "np.ndarray", experts: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Sorts copies by expert: tokens ``(N,)``, weights ``(N, 1)``, and the number of copies per expert.

    An expert's first choices come before its second choices, as in a `DispatchPlan`.
    """
    expert_N = expert_TK.T.reshape(-1)
    order_N = expert_N.argsort(kind="stable")
    token_N = torch.from_numpy(order_N % len(expert_TK))
    weight_N1 = torch.from_numpy(weight_TK.T.reshape(-1, 1)[order_N])
    return token_N, weight_N1, np.bincount(expert_N, minlength=experts).tolist()
