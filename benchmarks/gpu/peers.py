"""Peers that need a GPU, beside those of benchmarks/peers.py. Each is measured where it is installed.

Shapes: T tokens, D embedding, E experts, K choices per token.
"""

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.agreement import agreement
from benchmarks.contenders import Ours, block_step, make_block
from benchmarks.gpu.fast import Case
from benchmarks.gpu.parts import Context
from benchmarks.peers import PEERS, Peer, copy
from benchmarks.timing import in_turns, ratio


class ScatterMoE(Peer):
    """shawntan/scattermoe, with our gate; its experts have no bias."""

    def __init__(self, block):
        from scattermoe.mlp import MLP

        super().__init__(block)
        self.gate = nn.Linear(self.embed_dim, self.num_experts, bias=False)
        copy(block.gates[0].weight, self.gate.weight)
        sizes = {"input_size": self.embed_dim, "hidden_size": self.ffn_embed_dim}
        self.layer = MLP(**sizes, num_experts=self.num_experts, top_k=2, activation=nn.ReLU())

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, None]:
        x_TD = x_1TD.flatten(0, 1)
        weight_TK, expert_TK = self.gate(x_TD).softmax(-1).topk(2)
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return self.layer(x_TD, weight_TK, expert_TK), None


class MegaBlocks(Peer):
    """databricks/megablocks: its dropless layer, with its own gate."""

    def __init__(self, block):
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        super().__init__(block)
        arguments = Arguments(
            hidden_size=self.embed_dim,
            ffn_hidden_size=self.ffn_embed_dim,
            moe_num_experts=self.num_experts,
            moe_top_k=2,
            activation_fn=torch.relu,
            bias=False,
            return_bias=False,
            mlp_impl="grouped",
            fp16=False,
            bf16=True,
        )
        self.layer = dMoE(arguments)

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, None]:
        from megablocks.layers.moe import clear_load_balancing_loss

        y = self.layer(x_1TD)
        clear_load_balancing_loss()  # it would keep every step's
        return y, None


class SonicMoE(Peer):
    """Dao-AILab/sonic-moe, with its own gate."""

    def __init__(self, block):
        from sonicmoe import MoE
        from sonicmoe.enums import ActivationType

        super().__init__(block)
        self.layer = MoE(
            num_experts=self.num_experts,
            num_experts_per_tok=2,
            hidden_size=self.embed_dim,
            intermediate_size=self.ffn_embed_dim,
            activation_function=ActivationType.RELU,
            add_bias=False,
            std=0.02,
        )

    def mix(self, x_1TD: Tensor) -> tuple[Tensor, Tensor]:
        from sonicmoe import KernelBackendMoE

        return self.layer(x_1TD.flatten(0, 1), kernel_backend_moe=KernelBackendMoE.sonicmoe)


# Compared in time only: no biases, or a gate of their own.
GPU_PEERS = {"scattermoe": ScatterMoE, "megablocks": MegaBlocks, "sonicmoe": SonicMoE}


def installed() -> dict[str, type[Peer]]:
    """By the name of the package; one may be there and still not be usable."""
    modules = {"st-moe-pytorch": "st_moe_pytorch"}
    every = GPU_PEERS | PEERS
    return {n: p for n, p in every.items() if importlib.util.find_spec(modules.get(n, n))}


def peers(context: Context) -> Iterator[dict]:
    """Forward and backward of each installed peer, top-2 of 8 experts, beside our block.

    In bf16; a rehearsal on the CPU is in fp32, in which all of them run there.
    ``ratio`` is of the peer's time over ours. A peer that fails is no failure of ours.
    """
    found = installed()
    for name in sorted((GPU_PEERS | PEERS).keys() - found.keys()):
        yield {"case": f"{name}: not installed", "ok": None}
    for tokens, width in [(64, 16)] if context.tiny else [(16384, 512), (16384, 1024)]:
        case = Case("8", tokens, width, 4 * width, "train")
        for name, peer in found.items():
            result = {"case": f"{name}, {tokens} tokens, D {width}", "ok": None}
            try:
                result |= beside(peer, name in PEERS, case, context)
            except Exception as error:  # whatever another package raises
                result["error"] = f"{type(error).__name__}: {error}"[:300]
            yield result


def beside(kind: type[Peer], agrees: bool, case: Case, context: Context) -> dict:
    """Times a peer and our block in turns; its outputs are compared first where it has our weights."""
    torch.manual_seed(1)
    device = torch.device(context.device)
    block = make_block(case, torch.device("cpu"), torch.float32)
    peer = kind(block)
    dtype = torch.float32 if context.tiny else torch.bfloat16
    block, peer = (module.to(device, dtype) for module in (block, peer))
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=dtype)
    same = {}
    if agrees:
        block.eval(), peer.eval()
        same["same tokens"] = agreement(block, peer, x_TD)["same_tokens"]
        block.train(), peer.train()
    steps = {"ours": block_step(Ours(block), x_TD, True), "peer": block_step(peer, x_TD, True)}
    times = in_turns(steps, device, 0.1 if context.tiny else 1.0)
    medians = {name: 1000 * sorted(of)[len(of) // 2] for name, of in times.items()}
    ratios = {"ratio": ratio(times, "peer", "ours")["median"]}
    return {"ms": medians["peer"], "our ms": medians["ours"], **ratios, **same}
