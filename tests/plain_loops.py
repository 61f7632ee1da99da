"""The block beside the plain loops of reference.py, in float64 and in each execution.

Shapes: T tokens, D embedding, F feed-forward, L strata, E experts, N rows, I inputs, O outputs.
"""

import itertools
from contextlib import contextmanager
from unittest import mock

import torch
from reference import reference

from smoe_fairseq.modules import StratifiedMoE, products, torch_features
from smoe_fairseq.modules.activation import GATED

T, D, F = 18, 8, 6
SENTENCES = 3, 6  # of the T tokens
PADDING = {"none": [], "some": [0, 7, 16, 17], "all": list(range(T))}
IDS = torch.arange(T) * 5 % 7
TABLE = torch.tensor([3, 0, 7, 3, 1, 6, 2])
EXECUTIONS = ("per-expert", "grouped")
FREE = {"copy_experts": 1, "constant_experts": 2, "null_experts": 2}
# Options of blocks: each gate, and each kind of strata, norms, experts and networks beside them.
SYSTEMS = [
    {"strata": "8", "top_k": 1},
    {"strata": "2-2-2-2"},
    {"strata": "4-4", "capacity_factor": 1.0},
    {"strata": "2-2-4", "top_k": 3},
    {"strata": "4-4", "capacity_factor": 1.0, "gate_normalization": "before-drop"},
    {"strata": "2-2-2-2", "capacity_factor": 0.5, "drop_order": "score"},
    {"strata": "4-4", "stacked": True},
    {"strata": "2-2-2-2", "norms": "released"},
    {"strata": "8", "norms": "released"},
    {"strata": "5", "chain": 2},
    {"strata": "8", "null_experts": 4, "gate_normalization": "none"},
    {"strata": "4-4", "top_k": 3, **FREE},
    {"strata": "4-4", "scores": "sigmoid"},
    {"strata": "8", "residual": True, "top_k": 1},
    {"strata": "8", "shared_experts": 2, "expert_ffn_dim": 32},
    {"strata": "8", "cmr": True},
    {"strata": "4-4", "balance": "bias"},
    {"strata": "4-4", "capacity_budget": 1.2},
    {"strata": "4-4", "gate": "top-p", "top_p": 0.6},
    {"strata": "4-4", "gate": "relu"},
    {"strata": "4-4", "gate": "threshold"},
    {"strata": "1", "gate": "depths", "capacity_factor": 0.5},
    {"strata": "8", "gate": "hash"},
    {"strata": "8", "gate": "base"},
    {"strata": "8", "gate": "expert-choice", "capacity_factor": 2.0},
]


PRODUCT = torch_features.grouped_mm


def product_in_loops(x, w, offs):
    """The grouped product ``(N, O)`` or ``(E, I, O)`` in float64: NaN where a kernel may leave anything."""
    if x.dtype != torch.float64:
        return PRODUCT(x, w, offs=offs)
    starts = [0, *offs.tolist()]
    if w.dim() == 3:
        y = x.new_full((len(x), w.shape[2]), torch.nan)
    else:
        y = x.new_full((len(offs), len(x), w.shape[1]), torch.nan)
    for e, (start, end) in enumerate(itertools.pairwise(starts)):
        if w.dim() == 3:
            y[start:end] = x[start:end] @ w[e]
        elif start < end:
            y[e] = x[:, start:end] @ w[start:end]
    return y


@contextmanager
def executing(execution):
    """In this context "grouped" computes float64, too, which torch's product on a CPU does not know."""
    if execution != "grouped" or PRODUCT is None:
        yield
        return
    types = mock.patch.object(products, "TYPES", (*products.TYPES, torch.float64))
    with types, mock.patch.object(torch_features, "grouped_mm", product_in_loops):
        yield


def make_block(strata, sizes=(D, F), **options):
    """A block of gates that differ clearly, and of layer norms that do something."""
    torch.manual_seed(sum(map(ord, strata)))
    if options.get("gate", "topk") in ("topk", "hash-topk"):
        options = {"second_expert_policy": "all", **options}
    if options.get("gate", "").startswith("hash"):
        options = {"hash_table": TABLE, **options}
    block = StratifiedMoE(*sizes, strata, **options).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    for i, gate in enumerate(block.gates):
        if options.get("balance") == "bias":
            gate.bias.steps += torch.arange(gate.num_experts) ** 2 % 11 + i
    return block


def make_input(padding="none", shape=(T,)):
    torch.manual_seed(7)
    x = torch.randn(T, D, dtype=torch.float64)
    mask = torch.zeros(T, dtype=torch.bool)
    mask[PADDING[padding]] = True
    return x.view(*shape, D).requires_grad_(), mask.view(shape)


@contextmanager
def watched(gates):
    """In this context passes append what each gate got and decided: (inputs, routing)."""
    seen = []

    def hook(gate, inputs, routing):
        seen.append((inputs, routing))

    handles = [gate.register_forward_hook(hook) for gate in gates]
    yield seen
    for handle in handles:
        handle.remove()


def objective(y, loss):
    """A scalar that every output takes part in, each time with the same weights."""
    torch.manual_seed(3)
    return (y * torch.randn_like(y)).sum() + 0.3 * loss


def gradients(y, loss, x, params):
    """Of the `objective`."""
    return derivatives(objective(y, loss), x, params)


def derivatives(value, x, params):
    """By name, 0 where the value does not depend on x or a parameter."""
    named, value = {"x": x, **params}, value + 0 * x.sum()  # which it may not depend on
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return dict(zip(named, torch.autograd.grad(value, named.values(), **options), strict=True))


def known_options(block, shape, gate_logits=None):
    """The options of the plain loops for a block and the shape of its tokens."""
    config, sentences = block.config, torch.Size(shape[:-1]).numel()
    same = "gate top_k stacked chain drop_order norms scores top_p exit_bias".split()
    options = {name: getattr(config, name) for name in same}
    options |= {"normalization": config.gate_normalization, "copies": config.copy_experts}
    options |= {"gated": config.activation_fn if config.activation_fn in GATED else None}
    factors = config.capacity_factor, config.eval_capacity_factor
    options |= {"training": block.training, "capacity_factor": factors[not block.training]}
    options["factor"] = factors[0] if block.training else factors[1] or factors[0]
    options["sentences"] = torch.arange(sentences).repeat_interleave(shape[-1]).tolist()
    if config.balance == "bias":
        steps = [gate.bias.steps.tolist() for gate in block.gates]
        options["bias"] = [[config.bias_step * (n - sum(s) / len(s)) for n in s] for s in steps]
    if config.gate_residual != "none":
        columns = block.gates[0].num_experts + block.gates[0].free_experts
        zeros = torch.zeros(torch.Size(shape).numel(), columns, dtype=torch.float64)
        is_given = gate_logits is not None and config.gate_residual == "layers"
        options["earlier"] = list(gate_logits.view_as(zeros) if is_given else zeros)
    return options


def known_weights(block):
    """Parameters, buffers and thresholds by name, for the plain loops."""
    weights = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    if block.config.gate in ("threshold", "depths"):
        values = {f"gates.{i}.thresholds": g.threshold.value() for i, g in enumerate(block.gates)}
        weights |= {name: value.tolist() for name, value in values.items()}
    return weights


def expected(block, x, mask, ids=None, gate_logits=None):
    """What the plain loops say, with y in the shape of x."""
    options = known_options(block, x.shape[:-1], gate_logits)
    options["ids"] = None if ids is None else ids.flatten().tolist()
    flat, padding = x.reshape(-1, x.shape[-1]), mask.flatten()
    y, *others = reference(known_weights(block), str(block.strata), flat, padding, **options)
    return y.view_as(x), *others


def assert_agrees(block, x, mask, ids=None, gate_logits=None):
    """Outputs, gradients, losses and statistics of all executions; returns the last statistics."""
    params = dict(block.named_parameters())
    y, loss, requested, dropped, firsts, copies = expected(block, x, mask, ids, gate_logits)
    want_gradients = gradients(y, loss, x, params)
    of_token = torch.zeros(T, block.choices, dtype=torch.long)
    of_stratum = torch.zeros(len(block.gates), block.choices, dtype=torch.long)
    for i, t, k in dropped:
        of_token[t, k] += 1
        of_stratum[i, k] += 1
    experts = block.strata.num_experts
    counts = [torch.tensor(first, dtype=torch.long).bincount(minlength=experts) for first in firsts]
    for block.execution in EXECUTIONS:
        with executing(block.execution):
            got_y, stats = block(x, mask, ids=ids, gate_logits=gate_logits)
            got_gradients = gradients(got_y, stats.balance_loss, x, params)
        assert torch.allclose(got_y, y, rtol=1e-10, atol=1e-10)
        assert torch.equal(got_y[mask], x[mask])
        assert torch.allclose(stats.balance_loss, loss, rtol=1e-10)
        assert torch.equal(stats.requested_capacity.flatten(), requested)
        assert torch.equal(stats.dropped_choices.view_as(of_token), of_token)
        assert torch.equal(stats.dropped, of_stratum)
        assert torch.equal(stats.first_choices, torch.stack(counts))
        assert stats.chosen.sum(1).tolist() == copies
        for name, got in got_gradients.items():
            assert torch.allclose(got, want_gradients[name], atol=1e-9), (block.execution, name)
    return stats
