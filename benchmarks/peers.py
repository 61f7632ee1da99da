"""Other packages' MoE layers, each with the weights of one of our blocks.

All are top-2 layers that multiply as many rows as our block, which drops nothing: those that pad get a
capacity of 2 T / E rows per expert (some rows are then zeros, a few copies dropped), the other has no
limit. Each gets a layer norm and a residual, which our block contains.

Shapes: T tokens, D embedding, E experts, C rows per expert.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layers import Case
from smoe_fairseq.modules import StratifiedMoE


class Peer(nn.Module):
    """``x + layer(LN(x))`` and the balance loss.

    After a pass ``weights_TE`` contains the weights with which the layer mixed its experts.
    """

    has_capacity_tensors = True  # keeps tensors of shape (T, E, C)

    def __init__(self, block: StratifiedMoE):
        super().__init__()
        self.num_experts, self.ffn_embed_dim, self.embed_dim = block.experts.w1.shape
        self.layer_norm = nn.LayerNorm(self.embed_dim)
        self.layer_norm.load_state_dict(block.layer_norms[0].state_dict())
        self.weights_TE = None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        y_TD, aux = self.mix(self.layer_norm(x_TD).unsqueeze(0))
        return x_TD + y_TD.view_as(x_TD), aux if self.training else None

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer alone: its output and its balance loss."""
        raise NotImplementedError

    def record(self, gate: nn.Module, weights_TE: Callable[[tuple], Tensor]) -> None:
        """Find ``weights_TE`` in the output of ``gate``; `agreement` removes the hook before timing."""

        def hook(module, args, output):
            self.weights_TE = weights_TE(output).detach().view(-1, self.num_experts)

        self.hook = gate.register_forward_hook(hook)

    def sampling_off(self) -> AbstractContextManager:
        """A context in which the second expert is the second best, to compare the routing."""
        return nullcontext()


class Fairscale(Peer):
    """Draws the second expert by score, in evaluation too."""

    def __init__(self, block: StratifiedMoE):
        from fairscale.nn.moe import MOELayer, Top2Gate

        super().__init__(block)
        join_group()
        gate = Top2Gate(self.embed_dim, self.num_experts)
        self.layer = MOELayer(gate, nn.ModuleList(networks(block)))
        copy(block.gates[0].weight, gate.wg.weight)
        self.record(gate, lambda output: output[1].sum(-1))

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, Tensor]:
        # The first dimension has to be a multiple of the number of experts.
        y = self.layer(x_1TD.view(self.num_experts, -1, self.embed_dim))
        return y, self.layer.l_aux

    @contextmanager
    def sampling_off(self) -> Iterator[None]:
        from fairscale.nn.moe import top2gate

        device = self.layer_norm.weight.device
        nothing = {device: lambda shape: torch.zeros(shape, device=device)}
        with patch.dict(top2gate.gumbel_map, nothing):
            yield


class NllbMoe(Peer):
    """Hugging Face's. Its loss is computed elsewhere in the model and is left out here."""

    has_capacity_tensors = False

    def __init__(self, block: StratifiedMoE):
        from transformers import NllbMoeConfig
        from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

        super().__init__(block)
        config = NllbMoeConfig(
            d_model=self.embed_dim,
            num_experts=self.num_experts,
            expert_capacity=1,  # `mix` sets it
            activation_dropout=0.0,
            moe_token_dropout=0.0,
            second_expert_policy="all",
        )
        self.layer = NllbMoeSparseMLP(config, self.ffn_embed_dim)
        for network, expert in zip(networks(block), self.layer.experts.values()):
            expert.fc1.load_state_dict(network[0].state_dict())
            expert.fc2.load_state_dict(network[2].state_dict())
        copy(block.gates[0].weight, self.layer.router.classifier.weight)
        self.record(self.layer.router, lambda output: output[1])

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, None]:
        self.layer.router.expert_capacity = x_1TD.shape[1]
        return self.layer(x_1TD, None)[0], None


class STMoE(Peer):
    """lucidrains' st-moe-pytorch, told to route every token to its second expert."""

    def __init__(self, block: StratifiedMoE):
        from st_moe_pytorch import MoE

        super().__init__(block)
        self.layer = MoE(
            self.embed_dim,
            self.num_experts,
            threshold_train=0.0,
            threshold_eval=0.0,
            capacity_factor_train=2.0,
            capacity_factor_eval=2.0,
            experts=nn.ModuleList(networks(block)),
        )
        copy(block.gates[0].weight, self.layer.gate.to_gates.weight)
        self.record(self.layer.gate, lambda output: output[1].sum(-1))

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x_1TD)
        return out.outputs, out.total_aux_loss


class DeepSpeed(Peer):
    has_capacity_tensors = False

    def __init__(self, block: StratifiedMoE):
        import deepspeed
        from deepspeed.moe.layer import MoE

        super().__init__(block)
        join_group()
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        experts = networks(block)
        self.layer = MoE(
            self.embed_dim,
            experts[0],
            num_experts=self.num_experts,
            k=2,
            capacity_factor=1.0,  # doubled inside for k = 2
            eval_capacity_factor=1.0,
            min_capacity=1,
            top2_2nd_expert_sampling=False,
        )
        self.layer.set_deepspeed_parallelism()
        moe = self.layer.deepspeed_moe
        for network, expert in zip(experts, moe.experts.deepspeed_experts):
            expert.load_state_dict(network.state_dict())
        copy(block.gates[0].weight, moe.gate.wg.weight)
        self.record(moe.gate, self.weights_of_routes)

    def weights_of_routes(self, output: tuple) -> Tensor:
        """From its lists of routes; expert -1 is a dropped one."""
        expert_KT, weight_KT = output[3].long(), output[5]
        weights_TE = weight_KT.new_zeros(expert_KT.shape[1], self.num_experts)
        kept_KT = weight_KT * (expert_KT >= 0)
        return weights_TE.scatter_add(1, expert_KT.clamp(min=0).t(), kept_KT.t())

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, Tensor]:
        y, aux, _ = self.layer(x_1TD)
        return y, aux


PEERS = {
    "fairscale": Fairscale,
    "transformers": NllbMoe,
    "st-moe-pytorch": STMoE,
    "deepspeed": DeepSpeed,
}


def networks(block: StratifiedMoE) -> list[nn.Sequential]:
    """Our experts as networks of their own, with copies of the weights."""
    num_experts, ffn_embed_dim, embed_dim = block.experts.w1.shape
    result = []
    for e in range(num_experts):
        fc1, fc2 = nn.Linear(embed_dim, ffn_embed_dim), nn.Linear(ffn_embed_dim, embed_dim)
        copy(block.experts.w1[e], fc1.weight)
        copy(block.experts.b1[e], fc1.bias)
        copy(block.experts.w2[e], fc2.weight)
        copy(block.experts.b2[e], fc2.bias)
        result.append(nn.Sequential(fc1, nn.ReLU(), fc2))
    return result


@torch.no_grad()
def copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def join_group() -> None:
    """A process group of this process alone, which two of the peers need."""
    if dist.is_initialized():
        return
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(variable, value)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


# Relative to the largest change that our block makes to its input: sums are in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


# How many (T, E, C) tensors of 4 bytes such a peer holds at once.
CAPACITY_TENSORS = {"train": 10, "infer": 5}


class LeftOut(Exception):
    """A peer does not fit into memory, or computes something else than our block."""


def check_room(peer: type[Peer], case: Case, device: torch.device) -> None:
    """For a peer with tensors of shape (T, E, C), E C being 2 T.

    Raises:
        LeftOut: they would not fit.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        meminfo = Path("/proc/meminfo")
        text = meminfo.read_text() if meminfo.exists() else ""
        found = re.search(r"MemAvailable:\s*(\d+)", text)
        free = 1024 * int(found[1]) if found else math.inf
    needed = CAPACITY_TENSORS[case.mode] * case.tokens * 2 * case.tokens * 4
    if peer.has_capacity_tensors and needed > 0.8 * free:
        raise LeftOut(f"its tensors need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


@torch.no_grad()
def agreement(block: StratifiedMoE, peer: Peer, x_TD: Tensor) -> dict[str, float]:
    """Compare outputs at the tokens that both send to the same two experts.

    Returns:
        the share of these tokens, the largest difference there (relative to the largest change that
        our block makes to its input), and the peer's number of routed copies relative to ours.

    Raises:
        LeftOut: the outputs differ, or no token is routed alike.
    """
    y_TD, _ = block(x_TD)
    ours_TE = chosen(block, x_TD)
    with peer.sampling_off():
        peer_y_TD, _ = peer(x_TD)
    peers_TE = peer.weights_TE > 0
    peer.hook.remove()
    same_T = (ours_TE == peers_TE).all(1)
    if not same_T.any():
        raise LeftOut("no token is routed alike")
    difference = (y_TD - peer_y_TD)[same_T].abs().max() / (y_TD - x_TD).abs().max()
    if not difference <= TOLERANCE[x_TD.dtype]:
        raise LeftOut(f"outputs differ by {difference:.2g} where the routing is the same")
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
