"""The block on a device, against the plain loops of tests/reference.py in float64 on the CPU.

Shapes: T tokens, D embedding, F feed-forward.
"""

import copy
import itertools
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.fast import executions, fits
from benchmarks.gpu.parts import Context
from benchmarks.gpu.training import attempt
from benchmarks.timing import ROOT
from smoe_fairseq.modules import StratifiedMoE, torch_features

sys.path.insert(0, str(ROOT / "tests"))
import plain_loops  # noqa: E402

T, D, F = 32, 16, 24
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
# In bf16 a token near a tie may go to another expert, and with it the tokens that it displaces.
SHARE = {torch.float32: 1.0, torch.bfloat16: 0.9}


def block(context: Context) -> Iterator[dict]:
    """Each case in fp32 and bf16, in each execution that computes it."""
    device, others = torch.device(context.device), 0
    for made in itertools.product(plain_loops.SYSTEMS, TOLERANCE, executions(device)):
        options, dtype, execution = made
        name = " ".join(f"{option} {value}" for option, value in options.items())
        case = f"{name}, {str(dtype).removeprefix('torch.')}, {execution}"
        found = attempt(case, lambda made=made: compare(*made, device))
        if "ok" in found:
            yield found
        else:
            others += 1
    if others:
        yield {"case": f"{others} cases that fused kernels do not compute: left out", "ok": None}


def compare(options: dict, dtype: torch.dtype, execution: str, device: torch.device) -> dict:
    """``tokens``: the share whose output agrees; ``gradients``: cosine of all gradients with theirs; nothing
    for an execution that does not compute such a block.
    """
    made = plain_loops.make_block(sizes=(D, F), **{"capacity_factor": 0.0, **options})
    made = made.to(device, dtype)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(7)).to(dtype)
    mask = torch.zeros(T, dtype=torch.bool)
    mask[[0, 7, 30]] = True
    ids = torch.arange(T) * 5 % len(plain_loops.TABLE)
    inputs = x.to(device).requires_grad_()
    if not fits(made, execution, inputs):
        return {}
    y, stats = made(inputs, mask.to(device), ids=ids.to(device))
    got = gradients(y, stats.balance_loss, made, inputs)

    plain, plain_x = copy.deepcopy(made).cpu().double(), x.double().requires_grad_()
    plain_y, loss, *_ = plain_loops.expected(plain, plain_x, mask, ids)
    want = gradients(plain_y, loss, plain, plain_x)
    error_T = (y.detach().cpu().double() - plain_y).abs().amax(1)
    tokens = (error_T <= TOLERANCE[dtype] * plain_y.abs().amax(1)).double().mean().item()
    cosine = torch.nn.functional.cosine_similarity(got, want, 0).item()
    least = SHARE[dtype]
    right = tokens >= least and cosine >= (0.9999 if least == 1 else least)
    return {"ok": right, "tokens": tokens, "gradients": cosine}


def gradients(y, loss, made: StratifiedMoE, x: torch.Tensor) -> torch.Tensor:
    """All in one vector, 0 for weights that no token uses."""
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    objective = (y * direction).sum() + 0.3 * loss
    leaves = [x, *made.parameters()]
    found = torch.autograd.grad(objective, leaves, allow_unused=True)
    found = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)]
    return torch.cat([gradient.detach().cpu().double().flatten() for gradient in found])


def compiled(context: Context) -> Iterator[dict]:
    """Inductor on a GPU; on a CPU without it, what Inductor is given."""
    if torch_features.grouped_mm is None:
        yield {"case": "needs torch 2.10", "ok": None}
        return
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
