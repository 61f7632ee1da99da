"""Whether a peer computes what our block computes, checked before both are timed.

Shapes: T tokens, D embedding, E experts, K choices per token.
"""

import torch
from torch import Tensor

from benchmarks.peers import Peer
from smoe_fairseq.modules import StratifiedMoE

# Of the largest change that our block makes to its input; the same sums are taken in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


class Disagreement(Exception):
    """The outputs differ where the routing is the same, or no routing is the same."""


@torch.no_grad()
def agreement(block: StratifiedMoE, peer: Peer, x_TD: Tensor) -> dict[str, float]:
    """Compares outputs at the tokens that both send to the same two experts.

    Returns:
        the share of these tokens, the largest difference there over the largest change that our block
        makes to its input, and how many of our routed copies the peer routes too.
    """
    y_TD, _ = block(x_TD)
    ours_TE = chosen(block, x_TD)
    with peer.sampling_off():
        peer_y_TD, _ = peer(x_TD)
    peers_TE = peer.weights_TE > 0
    peer.hook.remove()
    same_T = (ours_TE == peers_TE).all(1)
    if not same_T.any():
        raise Disagreement("no token is routed alike")
    difference = (y_TD - peer_y_TD)[same_T].abs().max() / (y_TD - x_TD).abs().max()
    if not difference <= TOLERANCE[x_TD.dtype]:
        raise Disagreement(f"outputs differ by {difference:.2g} where the routing is the same")
    return {
        "same_tokens": same_T.double().mean().item(),
        "difference": difference.item(),
        "copies": (peers_TE.sum() / ours_TE.sum()).item(),
    }


def chosen(block: StratifiedMoE, x_TD: Tensor) -> Tensor:
    """Our experts of each token, as a mask ``(T, E)``."""
    expert_TK = block.gates[0](block.layer_norms[0](x_TD)).expert_TK
    ours_TE = torch.zeros(len(x_TD), block.strata.num_experts, dtype=torch.bool, device=x_TD.device)
    return ours_TE.scatter(1, expert_TK, True)
