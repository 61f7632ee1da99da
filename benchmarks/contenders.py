"""The block, its bare products (the floor), and the cases that they are timed in.

Shapes: T tokens, D embedding, F feed-forward, E experts, K choices per token, L strata.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smoe_fairseq.modules import Strata, StratifiedMoE
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.routing import Routing

SIZES = {"base": (512, 2048), "big": (1024, 4096)}
STRATA = ("8", "4-4", "2-2-2-2", "16", "4-12", "4-4-4-4")
TOKENS = (8, 40, 512, 4096, 16384)  # 40 is one decoding step: beam 5 of 8 sentences
MODES = ("train", "infer")
# Sweeps at 4096 tokens and the base size: experts in one stratum, strata of two experts each.
EXPERTS = tuple(str(experts) for experts in (8, 16, 32, 64, 128))
DEPTHS = tuple("-".join(["2"] * depth) for depth in range(1, 9))


@dataclass(frozen=True)
class Case:
    size: str
    strata: str
    tokens: int
    mode: str

    def __str__(self) -> str:
        return f"{self.size}/{self.strata}/{self.tokens}/{self.mode}"

    @property
    def embed_dim(self) -> int:
        return SIZES[self.size][0]

    @property
    def ffn_embed_dim(self) -> int:
        return SIZES[self.size][1]

    @property
    def has_peers(self) -> bool:
        """Peers know only one stratum; all of them are timed with 8 experts."""
        return self.strata == "8"


def full() -> list[Case]:
    """Everything at the base size; at the big one, where a pass takes four times as long, a part."""
    base = [
        Case("base", strata, tokens, mode)
        for strata in STRATA
        for tokens in TOKENS
        for mode in MODES
    ]
    sweeps = [Case("base", strata, 4096, mode) for strata in EXPERTS + DEPTHS for mode in MODES]
    big = [
        Case("big", strata, tokens, mode)
        for strata in STRATA
        for tokens in (40, 4096)
        for mode in MODES
    ]
    peers = [Case("big", "8", tokens, mode) for tokens in TOKENS for mode in MODES]
    return list(dict.fromkeys(base + sweeps + big + peers))


def quick() -> list[Case]:
    """About three minutes on two cores."""
    cases = [Case("base", strata, 512, "train") for strata in ("8", "4-4", "2-2-2-2")]
    cases += [Case("base", strata, 40, "infer") for strata in ("8", "4-4", "2-2-2-2")]
    cases += [Case("base", "8", 4096, "train"), Case("base", "2-2-2-2", 4096, "train")]
    return cases + [
        Case("base", "64", 4096, "infer"),
        Case("base", "2-2-2-2-2-2-2-2", 512, "infer"),
    ]


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


BALANCE_WEIGHT = 0.01


def make_block(case: Case, device: torch.device, dtype: torch.dtype) -> StratifiedMoE:
    """Ours, without dropping and without sampling, so that each pass routes alike."""
    block = StratifiedMoE(
        case.embed_dim,
        case.ffn_embed_dim,
        strata=case.strata,
        # An only expert has no second one.
        top_k=min(2, int(case.strata.split("-")[-1])),
        capacity_factor=0,
        second_expert_policy="all",
    )
    return block.to(device, dtype).train(case.mode == "train")


def block_step(block: nn.Module, x_TD: Tensor, train: bool) -> Callable[[], None]:
    """One pass of a module that returns its output and, with gradient, its balance loss or None."""
    x_TD = x_TD.detach().clone().requires_grad_(train)

    def forward() -> list[Tensor]:
        y_TD, aux = block(x_TD)
        return [y_TD] if aux is None else [y_TD, aux]

    return _step(forward, block, [x_TD], train)


def floor_step(floor: BareProducts, x_TD: Tensor, train: bool) -> Callable[[], None]:
    inputs = floor.inputs(x_TD.device, x_TD.dtype)
    rows = [rows_ND.requires_grad_(train) for _, rows_ND in inputs]
    return _step(lambda: floor(inputs), floor, rows, train)


def _step(
    forward: Callable[[], Sequence[Tensor]], module: nn.Module, inputs: list[Tensor], train: bool
) -> Callable[[], None]:
    """Forward and backward, or forward without gradient.

    ``step.forward`` is the forward pass alone, ``step.clear_gradients`` what each step begins with.
    """
    parameters = [*module.parameters(), *inputs]
    gradients = []

    def clear_gradients():
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def infer():
        forward()

    def step():
        clear_gradients()
        outputs = forward()
        if not gradients:
            gradients.extend(_gradient(output) for output in outputs)
        torch.autograd.backward(outputs, gradients)

    call = step if train else infer
    call.forward, call.clear_gradients = forward, clear_gradients
    return call


def _gradient(output: Tensor) -> Tensor:
    """As it would come from the layers behind; the balance loss has its weight."""
    return torch.randn_like(output) if output.dim() else torch.full_like(output, BALANCE_WEIGHT)


class Ours(nn.Module):
    """The block with just what is used of it: the output, and in training the balance loss."""

    def __init__(self, block: StratifiedMoE):
        super().__init__()
        self.block = block

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        y_TD, stats = self.block(x_TD, with_stats=self.training)
        return y_TD, stats and stats.balance_loss
