"""One pass of a block, of the bare products and of a peer, made alike.

Shapes: T tokens, D embedding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.floor import BareProducts
from smoe_fairseq.modules import StratifiedMoE

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
