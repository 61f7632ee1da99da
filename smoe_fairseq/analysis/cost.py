"""Parameters, forward FLOPs per token and requested capacity of a model, read off its modules."""

from collections.abc import Mapping
from dataclasses import dataclass

from fairseq.modules import MultiheadAttention
from torch import nn

from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules import StratifiedMoE

CONTEXT = 512  # positions, as the released scripts of the paper limit sentences

READING = """\
FLOPs per token: one forward pass, for one source token through the encoder and one target token
through the decoder (of a language model, for one token), counted as Kaplan et al. (2020) do, 2 per
weight and token:
  attention   2 x query, key, value and output projections of every attention block
  ffn         2 x the feed-forward networks of dense layers and those that all tokens use beside experts
  experts     2 x top-k x requested capacity x the weights of one expert, per MoE layer; for top-k what
              other gates and null experts leave of it under uniform routing
  embedding   2 x vocabulary x dimension, one input matrix as if it were multiplied
  output      2 x vocabulary x dimension, the output projection
  context     2 x context x dimension per attention block
Biases, layer norms and gates are left out. The context is 512 positions (--context). The paper's
absolute numbers are 4 to 5 M more, for a reason that no reading explains (docs/cost.md)."""


@dataclass(frozen=True)
class Cost:
    """Counts of one model; FLOPs are per token, see `READING`."""

    parameters: int  # shared ones once
    active_parameters: float  # without the experts that a token does not use, on average
    requested_capacity: float | None  # mean over the MoE layers, in strata; None: a dense model
    flops: dict[str, float]  # by part

    @property
    def flops_per_token(self) -> float:
        return sum(self.flops.values())


def count(
    model: nn.Module,
    context: int = CONTEXT,
    requested_capacity: Mapping[str, float] | None = None,
    experts_per_token: float | None = None,
) -> Cost:
    """Counts a model, on the meta device or another.

    Args:
        model: one of ours.
        context: positions that attention sees.
        requested_capacity: strata that a token stops at, per MoE layer as `moe_blocks` names them;
            by default what uniform routing gives.
        experts_per_token: as the log of training has it, for gates that learn how many experts a token
            has; by default what uniform routing gives. Others are counted without their dropped copies.
    """
    blocks = moe_blocks(model)
    if requested_capacity is None:
        requested_capacity = {
            name: block.strata.expected_requested_capacity() for name, block in blocks.items()
        }
    linear = {"attention": 0, "ffn": 0, "output": 0}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (part := _part(name)):
            linear[part] += module.weight.numel()
    attentions = (m for m in model.modules() if isinstance(m, MultiheadAttention))

    parameters = sum(parameter.numel() for parameter in model.parameters())
    idle, expert_weights = 0.0, 0.0
    for name, block in blocks.items():
        copies = copies_per_stop(block, experts_per_token)
        used = copies * requested_capacity[name]
        num_experts = block.strata.num_experts
        experts = block.experts
        expert_weights += used * (experts.w1[0].numel() + experts.w2[0].numel())
        size = sum(p.numel() for p in experts.parameters()) / num_experts
        if block.strata.chain > 1:  # where a pass may choose what another has chosen
            untouched = (1 - copies / num_experts) ** block.strata.chain
            used = num_experts * (1 - untouched)
        idle += max(num_experts - used, 0) * size
    return Cost(
        parameters=parameters,
        active_parameters=parameters - idle,
        requested_capacity=sum(requested_capacity.values()) / len(blocks) if blocks else None,
        flops={
            "attention": 2 * linear["attention"],
            "ffn": 2 * linear["ffn"],
            "experts": 2 * expert_weights,
            "embedding": 2 * model.decoder.embed_tokens.weight.numel(),
            "output": 2 * linear["output"],
            "context": sum(2 * context * attention.embed_dim for attention in attentions),
        },
    )


def copies_per_stop(block: StratifiedMoE, measured: float | None = None) -> float:
    """Experts that compute a token at a stratum where it stops.

    What was ``measured`` where a gate learns their number, else the average under uniform routing.
    """
    if measured is not None and any(gate.learns_number for gate in block.gates):
        return measured
    visits = block.strata.expected_visits()
    copies = (n * gate.expected_choices for n, gate in zip(visits, block.gates, strict=True))
    return sum(copies) / sum(visits)


def _part(name: str) -> str | None:
    if "attn." in name:
        return "attention"
    if name.endswith((".fc1", ".fc2")):
        return "ffn"
    return "output" if name.endswith("output_projection") else None  # the rest: gates
