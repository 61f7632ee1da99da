"""The floor: the bare matrix products of the experts on the tokens that a block routes to them.

Shapes: T tokens, D embedding, F feed-forward, E experts, K choices per token, L strata.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules import Strata, StratifiedMoE
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.routing import Routing


@torch.no_grad()
def routed_tokens(block: StratifiedMoE, x_TD: Tensor) -> list[list[int]]:
    """How many tokens each expert gets at each stratum ``(L, E)``, both choices counted."""
    counts_LE = []

    def count(gate, args, routing):
        counts_LE.append(experts_of_gate(gate, routing, block.strata))

    hooks = [gate.register_forward_hook(count) for gate in block.gates]
    try:
        block(x_TD)
    finally:
        for hook in hooks:
            hook.remove()
    return counts_LE


def experts_of_gate(gate: TopKGate, routing: Routing, strata: Strata) -> list[int]:
    """How many tokens one gate sends to each expert of its block ``(E,)``."""
    first = (
        strata.num_experts - gate.num_experts
    )  # it sees those of its own and of all later strata
    expert_N = routing.expert_TK[routing.expert_TK < gate.num_experts] + first
    return torch.bincount(expert_N, minlength=strata.num_experts).tolist()


class BareProducts(nn.Module):
    """``nn.Linear``, ReLU, ``nn.Linear`` per expert, on random rows, as many as are routed to it.

    Nothing is gathered, weighted or summed, and experts without tokens are not touched.
    """

    def __init__(self, embed_dim: int, ffn_embed_dim: int, counts_LE: list[list[int]]):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(embed_dim, ffn_embed_dim), nn.ReLU(), nn.Linear(ffn_embed_dim, embed_dim)
            )
            for _ in counts_LE[0]
        )
        self.embed_dim = embed_dim
        self.counts_LE = counts_LE

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """``(expert, rows)`` for each stratum and expert with tokens."""
        return [
            (e, torch.randn(n, self.embed_dim, device=device, dtype=dtype))
            for counts_E in self.counts_LE
            for e, n in enumerate(counts_E)
            if n > 0
        ]

    def forward(self, inputs: list[tuple[int, Tensor]]) -> list[Tensor]:
        return [self.experts[e](x_ND) for e, x_ND in inputs]
