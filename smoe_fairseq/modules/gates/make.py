"""The gates of a block, made of its options."""

from dataclasses import dataclass

from torch import Tensor, nn

from smoe_fairseq.modules.balance import ExpertBias
from smoe_fairseq.modules.capacity import Capacity
from smoe_fairseq.modules.exit_bias import ExitBias
from smoe_fairseq.modules.gates.base import BaseGate
from smoe_fairseq.modules.gates.expert_choice import ExpertChoiceGate
from smoe_fairseq.modules.gates.hashed import HashGate
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.gates.top_p import TopPGate

GATES = ("topk", "hash", "base", "expert-choice", "top-p")
OF_ONE_STRATUM = ("hash", "base", "expert-choice")  # whose choice is not the token's own
WITH_BALANCE_LOSS = ("topk", "top-p")


@dataclass(frozen=True)
class GateOptions:
    """Options of `StratifiedMoE` that its gates are made of, under the names that they have there."""

    gate: str
    top_k: int
    top_p: float
    hash_table: Tensor | None
    capacity_factor: float
    eval_capacity_factor: float
    drop_order: str
    gate_normalization: str
    second_expert_policy: str
    gate_init_scale: float
    null_experts: int
    balance: str
    bias_step: float
    exit_bias: float

    @property
    def learns_balance(self) -> bool:
        """Whether the balance loss is to be trained on."""
        return self.gate in WITH_BALANCE_LOSS and self.balance == "loss"


def make_gate(
    options: GateOptions, embed_dim: int, num_experts: int, own_experts: int
) -> nn.Module:
    """A gate that sees so many experts, the first ``own_experts`` of them of its own stratum."""
    factors = options.capacity_factor, options.eval_capacity_factor
    scale = options.gate_init_scale
    if options.gate == "hash":
        return HashGate(num_experts, options.hash_table)
    if options.gate == "base":
        return BaseGate(embed_dim, num_experts, scale)
    if options.gate == "expert-choice":
        return ExpertChoiceGate(embed_dim, num_experts, *factors, scale)
    capacity = Capacity(*factors, options.drop_order)
    exit_bias = ExitBias(own_experts, num_experts, options.exit_bias)
    if options.gate == "top-p":
        return TopPGate(embed_dim, num_experts, capacity, options.top_p, scale, exit_bias)
    return TopKGate(
        embed_dim,
        num_experts,
        capacity,
        top_k=options.top_k,
        normalization=options.gate_normalization,
        second_expert_policy=options.second_expert_policy,
        init_scale=scale,
        null_experts=options.null_experts,
        bias=ExpertBias(num_experts, options.bias_step) if options.balance == "bias" else None,
        exit_bias=exit_bias,
    )
