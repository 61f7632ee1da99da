"""An optimizer's steps for all parameters at once, against fairseq's own, bit for bit."""

import copy
import inspect
from types import SimpleNamespace

import fairseq.trainer  # noqa: F401  which imports all that is changed
import pytest
import torch
from fairseq import utils
from fairseq.optim.adam import Adam
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin

import smoe_fairseq.training.foreach as foreach
from smoe_fairseq import compat

compat.register()
SHAPES = ((3, 5), (7,), (2, 3, 4), (1,), (40,))


def parameters(dtype=torch.float32, seed=0) -> list[torch.nn.Parameter]:
    """With gradients; the second has none."""
    numbers = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(s, generator=numbers).to(dtype)) for s in SHAPES]
    for i, p in enumerate(made):
        p.grad = None if i == 1 else torch.randn(p.shape, generator=numbers).to(dtype)
    return made


def same(one, other) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("chunk", [10, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam(dtype, decay, chunk, monkeypatch):
    monkeypatch.setattr(foreach, "CHUNK", chunk)
    ours, theirs = parameters(dtype), parameters(dtype)
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": decay}
    one, other = Adam(ours, **options), Adam(theirs, **options)
    for step in range(4):
        if step == 2:  # this one begins later, so its bias is corrected by its own count
            for each in (ours, theirs):
                each[1].grad = torch.ones_like(each[1])
        one.step()
        inspect.unwrap(Adam.step)(other)
        assert same(ours, theirs)
    assert [s["step"] for s in one.state.values()] == [4, 4, 4, 4, 2]
    for a, b in zip(one.state_dict()["state"].items(), other.state_dict()["state"].items()):
        assert a[0] == b[0] and all(
            torch.equal(a[1][k], b[1][k]) for k in ("exp_avg", "exp_avg_sq")
        )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fused_kernel_is_the_same_step(decay):
    """As on a GPU; a large epsilon, which fairseq adds before it corrects the bias."""
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 0.1, "weight_decay": decay}
    other = Adam(theirs, **options)
    present = [p for p in ours if p.grad is not None]
    averages, squares = ([torch.zeros_like(p) for p in present] for _ in range(2))
    for step in (1, 2, 3):
        with torch.no_grad():
            values, gradients = [p.data for p in present], [p.grad for p in present]
            foreach._fused_step(options, values, gradients, averages, squares, step)
        inspect.unwrap(Adam.step)(other)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clipping(dtype, clip):
    ours, theirs = parameters(dtype), parameters(dtype)
    for each in (ours, theirs):
        each[3].expert = True  # is clipped and does not count
    theirs_norm = utils.clip_grad_norm_
    while hasattr(theirs_norm, "__wrapped__"):
        theirs_norm = theirs_norm.__wrapped__
    norms = utils.clip_grad_norm_(ours, clip), theirs_norm(theirs, clip)
    assert torch.equal(*norms)
    assert same(*([p.grad for p in each if p.grad is not None] for each in (ours, theirs)))
    assert utils.clip_grad_norm_([], clip) == 0


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3), torch.tensor([0.3])])
def test_multiplying(factor):
    ours, theirs = parameters(), parameters()
    FairseqOptimizer.multiply_grads(SimpleNamespace(params=ours), factor)
    FairseqOptimizer.multiply_grads.__wrapped__(SimpleNamespace(params=theirs), factor)
    assert same(*([p.grad for p in each if p.grad is not None] for each in (ours, theirs)))


def half_precision(flat: bool):
    """fairseq's wrapper without the optimizer that it wraps."""
    made = object.__new__(_FP16OptimizerMixin)
    made.fp16_params, made.scaler, made._needs_sync = parameters(torch.bfloat16), None, True
    full = [torch.nn.Parameter(p.detach().float()) for p in made.fp16_params]
    if flat:
        full = [torch.nn.Parameter(torch.cat([p.detach().flatten() for p in full]))]
    for p in full:
        p.grad = torch.full_like(p, 9.0)
    made.fp32_params = {made.fp16_params[0].device.index: full[0]} if flat else full
    return made


@pytest.mark.parametrize("flat", [False, True])
def test_copies_of_half_precision(flat):
    ours = half_precision(flat)
    theirs = copy.deepcopy(ours)
    for p, q in zip(ours.fp16_params, theirs.fp16_params, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    full = [list(m.fp32_params.values() if flat else m.fp32_params) for m in (ours, theirs)]
    for p, q in zip(*full, strict=True):
        q.grad = p.grad.clone()
    name = "_sync_fp16_grads_to_fp32"
    getattr(ours, name)()
    getattr(_FP16OptimizerMixin, name).__wrapped__(theirs)
    assert same(*([p.grad for p in each] for each in full)) and not ours._needs_sync
    with torch.no_grad():
        for p in (*full[0], *full[1]):
            p += 1
    ours._sync_fp32_params_to_fp16()
    _FP16OptimizerMixin._sync_fp32_params_to_fp16.__wrapped__(theirs)
    assert same(ours.fp16_params, theirs.fp16_params)
    for values in foreach.full_precision(ours).values():
        values.fill_(7)
    ours._sync_fp32_params_to_fp16()
    assert all((p == 7).all() for p in (*ours.fp16_params, *full[0]))
    ours.zero_grad()
    assert all(p.grad is None for p in ours.fp16_params)
    ours._sync_fp16_grads_to_fp32()
    assert all(not p.grad.any() for p in full[0])
