"""The block on a device, against the plain loops of tests/reference.py in float64 on the CPU.

Shapes: T tokens, D embedding, F feed-forward.
"""

import itertools
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.fast import executions
from benchmarks.gpu.parts import Context
from benchmarks.gpu.training import attempt
from benchmarks.timing import ROOT
from smoe_fairseq.modules import StratifiedMoE

T, D, F = 32, 16, 24
IDS = torch.arange(T) * 5 % 7
TABLE = torch.tensor([3, 0, 7, 3, 1, 6, 2])
MIXED = {"top_k": 3, "copies": 1, "constant_experts": 2, "null_experts": 1}
# Strata and options of the block; those that the plain loops do not know are read from its weights.
CASES = {
    "top-1": ("8", {"top_k": 1}),
    "top-2 2-2-2-2": ("2-2-2-2", {}),
    "top-2 4-4 with capacity": ("4-4", {"capacity_factor": 1.0}),
    "top-3 2-2-4": ("2-2-4", {"top_k": 3}),
    "weights before the drop": ("4-4", {"capacity_factor": 1.0, "normalization": "before-drop"}),
    "capacity by score": ("2-2-2-2", {"capacity_factor": 0.5, "drop_order": "score"}),
    "stacked": ("4-4", {"stacked": True}),
    "released norms": ("2-2-2-2", {"norms": "released"}),
    "released norm of one stratum": ("8", {"norms": "released"}),
    "chain": ("5", {"chain": 2}),
    "null experts": ("8", {"null_experts": 4, "normalization": "none"}),
    "copy, constant and null experts": ("4-4", MIXED),
    "sigmoid scores": ("4-4", {"scores": "sigmoid"}),
    "residual": ("8", {"residual": True, "top_k": 1}),
    "shared expert": ("8", {"shared_experts": 1}),
    "top-p": ("4-4", {"gate": "top-p", "top_p": 0.6}),
    "relu": ("4-4", {"gate": "relu"}),
    "threshold": ("4-4", {"gate": "threshold"}),
    "depths": ("1", {"gate": "depths", "top_k": 1, "capacity_factor": 0.5}),
    "hash": ("8", {"gate": "hash"}),
    "base": ("8", {"gate": "base"}),
    "expert-choice": ("8", {"gate": "expert-choice", "capacity_factor": 2.0}),
}
BUILT_ONLY = ("null_experts", "constant_experts", "residual", "shared_experts")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
# In bf16 a token near a tie may go to another expert, and with it the tokens that it displaces.
SHARE = {torch.float32: 1.0, torch.bfloat16: 0.9}


def block(context: Context) -> Iterator[dict]:
    """Each case in fp32 and bf16, in each execution."""
    device = torch.device(context.device)
    for made in itertools.product(CASES, TOLERANCE, executions(device)):
        name, dtype, execution = made
        case = f"{name}, {str(dtype).removeprefix('torch.')}, {execution}"
        yield attempt(case, lambda made=made: compare(*made, device))


def compare(name: str, dtype: torch.dtype, execution: str, device: torch.device) -> dict:
    """``tokens``: the share whose output agrees; ``gradients``: cosine of all gradients with theirs."""
    sys.path.insert(0, str(ROOT / "tests"))
    from reference import reference

    strata, options = CASES[name][0], {"gate": "topk", **CASES[name][1]}
    made = make(name).to(device, dtype)
    made.execution = execution
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(7)).to(dtype)
    mask = torch.zeros(T, dtype=torch.bool)
    mask[[0, 7, 30]] = True
    inputs = x.to(device).requires_grad_()
    y, stats = made(inputs, mask.to(device), ids=IDS.to(device))
    got = gradients(y, stats.balance_loss, {"x": inputs, **dict(made.named_parameters())})

    weights = {
        key: value.detach().cpu().double() if value.is_floating_point() else value.cpu()
        for key, value in {**dict(made.named_parameters()), **dict(made.named_buffers())}.items()
    }
    learned = {key: weights[key].requires_grad_() for key, _ in made.named_parameters()}
    plain_x = x.double().requires_grad_()
    known = {key: value for key, value in options.items() if key not in BUILT_ONLY}
    if options["gate"] in ("threshold", "depths"):
        for i, gate in enumerate(made.gates):
            weights[f"gates.{i}.thresholds"] = gate.threshold.value().cpu().double()
    if options["gate"] in ("expert-choice", "depths"):
        known["factor"] = known.pop("capacity_factor")
    plain_y, loss, *_ = reference(
        weights, strata, plain_x, mask, ids=IDS.tolist(), sentences=[0] * T, **known
    )
    want = gradients(plain_y, loss, {"x": plain_x, **learned})

    error_T = (y.detach().cpu().double() - plain_y).abs().amax(1)
    tokens = (error_T <= TOLERANCE[dtype] * plain_y.abs().amax(1)).double().mean().item()
    cosine = torch.nn.functional.cosine_similarity(flat(got), flat(want), 0).item()
    least = SHARE[dtype]
    right = tokens >= least and cosine >= (0.9999 if least == 1 else least)
    return {"ok": right, "tokens": tokens, "gradients": cosine}


def make(name: str) -> StratifiedMoE:
    """The block of a case, in float32 on the CPU, with gates that differ clearly."""
    strata, options = CASES[name]
    options = {"capacity_factor": 0.0, **options}
    if "normalization" in options:
        options["gate_normalization"] = options.pop("normalization")
    if "copies" in options:
        options["copy_experts"] = options.pop("copies")
    if options.get("gate", "topk") == "topk":
        options["second_expert_policy"] = "all"
    if options.get("gate") == "hash":
        options |= {"hash_table": TABLE, "top_k": 1}
    torch.manual_seed(1)
    made = StratifiedMoE(D, F, strata, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def gradients(y, loss, inputs: dict) -> dict:
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    objective = (y * direction).sum() + 0.3 * loss
    found = torch.autograd.grad(objective, list(inputs.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(inputs.items(), found, strict=True)
    }


def flat(gradients: dict) -> torch.Tensor:
    return torch.cat([g.detach().cpu().double().flatten() for g in gradients.values()])


def compiled(context: Context) -> Iterator[dict]:
    """Inductor on a GPU; on a CPU without it, what Inductor is given."""
    device = torch.device(context.device)
    for strata in ("8", "4-4", "2-2-2-2"):
        torch.manual_seed(1)
        made = StratifiedMoE(64, 128, strata, capacity_factor=0, second_expert_policy="all")
        made = made.to(device, torch.bfloat16)
        x = torch.randn(256, 64, device=device, dtype=torch.bfloat16)
        backend = "aot_eager" if context.tiny else "inductor"
        fast = torch.compile(made, fullgraph=True, backend=backend)
        want, got = made(x)[0].float(), fast(x)[0].float()
        near = ((want - got).abs().amax(1) <= 6e-2 * want.abs().amax(1)).float().mean().item()
        yield {"case": f"{strata}, {backend}", "ok": near >= 0.9, "tokens": near}
