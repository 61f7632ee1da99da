"""Networks in parallel to the experts, and output masking.

Shapes: T tokens, D embedding, F feed-forward.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.activation import Activation, activation, hidden_width
from smoe_fairseq.modules.routing import Routing


class FeedForward(nn.Module):
    """``fc2 activation(fc1 x)``.

    Args:
        gate: registered before the linear maps, since optimizers number parameters in this order.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: Activation = "relu",
        activation_dropout: float = 0.0,
        gate: nn.Module | None = None,
    ):
        super().__init__()
        if gate is not None:
            self.gate = gate
        self.fc1 = nn.Linear(embed_dim, hidden_width(activation_fn, ffn_embed_dim))
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self.activation_fn = activation(activation_fn)
        self.activation_dropout = activation_dropout

    def network(self, x_TD: Tensor) -> Tensor:
        h_TF = self.activation_fn(self.fc1(x_TD))
        return self.fc2(F.dropout(h_TF, self.activation_dropout, self.training))


# A branch is a network parallel to the experts. ``compute(x, routing)`` does not need the experts' outputs,
# which may still be on their way from other ranks; ``combine`` merges its output with them. Those of other
# packages are decorated by ``@register_branch("name")`` and made with the arguments of `FeedForward`.


class SharedExperts(FeedForward):
    """``MoE(x) + sum_n FFN_n(x)``: experts that all tokens use (DeepSeekMoE, Dai et al. 2024).

    N shared experts of width F are computed as one network of width N F.
    """

    def compute(self, x_TD: Tensor, routing: Routing) -> Tensor:
        return self.network(x_TD)

    def combine(self, moe_TD: Tensor, output_TD: Tensor) -> Tensor:
        return moe_TD + output_TD.to(moe_TD.dtype)


class ResidualNetwork(FeedForward):
    """``c_0 MoE(x) + c_1 FFN(x)`` with ``c = softmax(V x + b)`` (PR-MoE, Rajbhandari et al. 2022)."""

    def __init__(self, embed_dim: int, *others, **options):
        super().__init__(embed_dim, *others, **options)
        self.mix = nn.Linear(embed_dim, 2)

    def compute(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        logits_T2 = self.mix(x_TD)
        logits_T2 = logits_T2.to(torch.promote_types(logits_T2.dtype, torch.float32))
        return logits_T2.softmax(dim=-1), self.network(x_TD)

    def combine(self, moe_TD: Tensor, output: tuple[Tensor, Tensor]) -> Tensor:
        share_T2, ffn_TD = output
        moe_T1, ffn_T1 = share_T2.to(moe_TD.dtype).split(1, dim=1)
        return moe_T1 * moe_TD + ffn_T1 * ffn_TD.to(moe_TD.dtype)


class SimpleExperts(nn.Module):
    """Experts that cost almost nothing: V constant and some copy experts (MoE++, Jin et al., ICLR 2025).

    A constant expert returns ``a_1 x + a_2 v`` with ``a = softmax(W_c x)``; it learns W_c (2 x D) and v. A
    copy expert returns ``x``. Every rank computes all of them for all of its tokens.
    """

    def __init__(self, embed_dim: int, constant_experts: int):
        super().__init__()
        self.mix = self.constant = None
        if constant_experts:
            self.mix = nn.Parameter(torch.empty(2 * constant_experts, embed_dim))
            self.constant = nn.Parameter(torch.empty(constant_experts, embed_dim))
            for parameter in (self.mix, self.constant):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))  # as nn.Linear

    def compute(self, x_TD: Tensor, routing: Routing) -> Tensor:
        weight_TS = routing.simple_TS  # constant experts, then copy experts
        constants = 0 if self.constant is None else len(self.constant)
        constant_TV, copy_TC = weight_TS.tensor_split([constants], dim=1)
        output_TD = copy_TC.sum(1, keepdim=True).to(x_TD.dtype) * x_TD
        if constants:
            logits_TV2 = F.linear(x_TD, self.mix).view(x_TD.shape[0], constants, 2)
            x_TV, v_TV = logits_TV2.to(weight_TS.dtype).softmax(dim=-1).unbind(-1)
            x_T1 = (constant_TV * x_TV).sum(1, keepdim=True)
            output_TD = output_TD + x_T1.to(x_TD.dtype) * x_TD
            output_TD = output_TD + (constant_TV * v_TV).to(self.constant.dtype) @ self.constant
        return output_TD

    combine = SharedExperts.combine


class CMROutput(NamedTuple):
    """Output of `ConditionalRouting.compute`; the budget loss needs the last two, which skip padding."""

    gate_T1: Tensor
    shared_TD: Tensor
    gate_sum: Tensor  # scalar, with gradient: sum of the gates before gate dropout
    tokens: Tensor  # scalar: number of tokens in this sum


class ConditionalRouting(FeedForward):
    """``(1 - g) FFN(x) + g MoE(x)`` with ``g = sigmoid(w x)`` per token (NLLB team 2022, section 6.2).

    Args:
        gate_drop: in training, the probability that a token's gate is 0, so that it uses only the
            shared network.
    """

    def __init__(self, embed_dim: int, *others, gate_drop: float = 0.0):
        super().__init__(embed_dim, *others, gate=nn.Linear(embed_dim, 1, bias=False))
        self.gate_drop = gate_drop

    def compute(self, x_TD: Tensor, routing: Routing) -> CMROutput:
        logits_T1 = self.gate(x_TD)
        gate_T1 = logits_T1.to(torch.promote_types(logits_T1.dtype, torch.float32)).sigmoid()
        active_T1 = routing.active_T.unsqueeze(1).to(gate_T1.dtype)
        gate_sum, tokens = (gate_T1 * active_T1).sum(), active_T1.sum()
        if self.training and self.gate_drop > 0:
            drawn_T1 = torch.rand_like(gate_T1, dtype=torch.float32)
            gate_T1 = gate_T1 * (drawn_T1 >= self.gate_drop)
        return CMROutput(gate_T1, self.network(x_TD), gate_sum, tokens)

    def combine(self, moe_TD: Tensor, output: CMROutput) -> Tensor:
        gate_T1, shared_TD = output.gate_T1.to(moe_TD.dtype), output.shared_TD.to(moe_TD.dtype)
        return (1 - gate_T1) * shared_TD + gate_T1 * moe_TD


# Regularisers that drop expert outputs in training (NLLB team 2022, section 6.2).


def mask_outputs(x: Tensor, p: float, training: bool) -> Tensor:
    """Each element of ``x`` becomes 0 with probability ``p`` in training; evaluation scales by ``1 - p``.

    Applied to the weights of copies ``(T, K)``, it is expert output masking (EOM).
    """
    if p == 0:
        return x
    if training:
        exact = torch.promote_types(x.dtype, torch.float32)  # bf16 has few numbers
        return x * (torch.rand_like(x, dtype=exact) >= p)
    return x * (1 - p)


class OutputMasking(nn.Module):
    """Final output masking (FOM): `mask_outputs` of a token's weighted sum."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def compute(self, x_TD: Tensor, routing: Routing) -> None:
        return None

    def combine(self, moe_TD: Tensor, output: None) -> Tensor:
        one_T1 = moe_TD.new_ones(moe_TD.shape[0], 1)
        return moe_TD * mask_outputs(one_T1, self.p, self.training)


def drop_gating(padding_mask: Tensor, p: float, training: bool) -> Tensor:
    """The padding mask, or with probability ``p`` in training a mask of all tokens.

    This is the variant of gating dropout that skips gate and experts (Liu et al. 2022): no token is routed
    and all keep their residual. The collective calls are still made, so ranks need not agree.
    """
    if not training or p == 0:
        return padding_mask
    return padding_mask | (torch.rand((), device=padding_mask.device) < p)
