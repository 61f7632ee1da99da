"""What is timed: the block, its bare products (the floor), and the cases.

Shapes: T tokens, D embedding, F feed-forward, E experts, K choices per token, L strata.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch
from torch import Tensor, nn

from smoe_fairseq.modules import StratifiedMoE

SIZES = {512: "base", 1024: "big"}
EIGHT_EXPERTS = ("8", "4-4", "2-2-2-2")
STRATA = (*EIGHT_EXPERTS, "16", "4-12", "4-4-4-4")
TOKENS = (8, 40, 512, 4096, 16384)  # 40 is one decoding step: beam 5 of 8 sentences
MODES = ("train", "infer")
# Sweeps at 4096 tokens and the base size: experts in one stratum, strata of two experts each.
EXPERTS = tuple(str(experts) for experts in (8, 16, 32, 64, 128))
DEPTHS = tuple("-".join(["2"] * depth) for depth in range(1, 9))


@dataclass(frozen=True)
class Case:
    strata: str
    tokens: int
    embed_dim: int = 512
    mode: str = "train"

    def __str__(self) -> str:
        return f"{self.size}/{self.strata}/{self.tokens}/{self.mode}"

    @property
    def size(self) -> str:
        return SIZES[self.embed_dim]

    @property
    def ffn_embed_dim(self) -> int:
        return 4 * self.embed_dim


def full() -> list[Case]:
    """Everything at the base size; at the big one, where a pass takes four times as long, a part."""
    cases = product(STRATA, TOKENS, [512], MODES)
    sweeps = product(EXPERTS + DEPTHS, [4096], [512], MODES)
    big = product(STRATA, (40, 4096), [1024], MODES)
    peers = product(["8"], TOKENS, [1024], MODES)
    return [Case(*of) for of in dict.fromkeys(chain(cases, sweeps, big, peers))]


def quick() -> list[Case]:
    """About three minutes on two cores."""
    cases = [Case(strata, 512) for strata in EIGHT_EXPERTS]
    cases += [Case(strata, 40, mode="infer") for strata in EIGHT_EXPERTS]
    cases += [Case("8", 4096), Case("2-2-2-2", 4096)]
    return [*cases, Case("64", 4096, mode="infer"), Case(DEPTHS[-1], 512, mode="infer")]


@torch.no_grad()
def routed_tokens(block: StratifiedMoE, x_TD: Tensor) -> list[list[int]]:
    """How many tokens each expert gets at each stratum ``(L, E)``, both choices counted."""
    counts_LE = []
    experts = block.strata.num_experts

    def count(gate, args, routing):
        # A gate sees the experts of its own stratum and of all later ones.
        expert_N = routing.expert_TK[routing.expert_TK < gate.num_experts]
        expert_N = expert_N + experts - gate.num_experts
        counts_LE.append(torch.bincount(expert_N, minlength=experts).tolist())

    hooks = [gate.register_forward_hook(count) for gate in block.gates]
    block(x_TD)
    for hook in hooks:
        hook.remove()
    return counts_LE


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
    """Our block without dropping or sampling, so that all passes route alike."""
    block = StratifiedMoE(
        case.embed_dim,
        case.ffn_embed_dim,
        strata=case.strata,
        top_k=min(2, int(case.strata.split("-")[-1])),
        capacity_factor=0,
        second_expert_policy="all",
    )
    return block.to(device, dtype).train(case.mode == "train")


def block_step(block: nn.Module, x_TD: Tensor, train: bool) -> Callable[[], None]:
    """One pass of a module that returns its output and its balance loss or None."""
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

    ``step.forward`` is the forward pass alone, ``step.clear_gradients`` its preparation.
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
    """As the later layers would send it; for the balance loss, its weight."""
    return torch.randn_like(output) if output.dim() else torch.full_like(output, BALANCE_WEIGHT)


class Ours(nn.Module):
    """The block's output and, in training, its balance loss, computed by one execution."""

    def __init__(self, block: StratifiedMoE, execution: str | None = None):
        super().__init__()
        self.block, self.execution = block, execution or block.execution

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        self.block.execution = self.execution
        y_TD, stats = self.block(x_TD, with_stats=self.training)
        return y_TD, stats and stats.balance_loss
