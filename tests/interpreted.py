"""The fused kernels by Triton's interpreter, which a process has to ask for before it imports Triton.

TRITON_INTERPRET=1 python tests/interpreted.py CASE ...     # prints what is wrong, as JSON, case by case
"""

import json
import os
import sys

import numpy as np
import torch
from ranks import free_port
from test_expert_parallel_hangs import pass_through_block
from torch.multiprocessing import start_processes

from smoe_fairseq.modules import StratifiedMoE, fused

OWN = "fused-triton"  # products by our own kernels
GROUPED = {"execution": "grouped", "width": 39, "inner": 150}  # sizes that torch's product refuses
FULL = {"capacity_factor": 0.7}
CASES = {
    "one expert of five": ("5", {"top_k": 1, "capacity_factor": 0.0}),
    "two experts": ("5", {"capacity_factor": 0.0}),
    "capacity": ("2-3", FULL),
    "weights before the drop": ("2-3", {**FULL, "gate_normalization": "before-drop"}),
    "raw weights": ("2-3", {**FULL, "gate_normalization": "none"}),
    "three of many": ("2-0-3-12", {"top_k": 3, "capacity_factor": 1.1}),
    "empty strata and experts": ("1-2-2", {"capacity_factor": 0.0}),
    "second choices of nearly nothing": ("4", {"capacity_factor": 1.0}),
    "evaluation": ("2-3", {"capacity_factor": 0.5, "dropout": 0.3}),
    "our products": ("2-3", {"execution": OWN, "activation_dropout": 0.2}),
    "our products of any width": ("2-3", {"execution": OWN, "width": 39, "inner": 150}),
    "dropout of the layer": ("2-3", {"dropout": 0.3, "dropout_per": "layer"}),
    "thresholds": ("2-3", {**GROUPED, "gate": "threshold", "capacity_factor": 0.0}),
    "expert choice": ("5", {**GROUPED, "gate": "expert-choice", "capacity_factor": 2.0}),
    "top-p": ("2-3", {**GROUPED, "gate": "top-p"}),
    "gated experts": ("2-3", {**GROUPED, "activation_fn": "swiglu"}),
    "shared experts": ("5", {**GROUPED, "shared_experts": 1, "capacity_factor": 0.7}),
}
NOISY = {
    "drawn experts": ("2-3", {"second_expert_policy": "sampling"}),
    "random second experts": ("2-3", {"second_expert_policy": "random"}),
    "dropout": ("2-3", {"dropout": 0.3, "activation_dropout": 0.2, "second_expert_policy": "all"}),
}


def make_block(strata: str, width: int = 40, inner: int = 72, **options) -> StratifiedMoE:
    torch.manual_seed(1)
    options = {"second_expert_policy": "all", "execution": "fused", **options}
    block = StratifiedMoE(width, inner, strata, **options)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return block


def batch(width: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(3, 13, dtype=torch.bool)
    mask[0, 5:], mask[2, 0] = True, True
    return torch.randn(3, 13, width, generator=torch.Generator().manual_seed(2)), mask


def objective(block, x, mask, seed: int = 4):
    torch.manual_seed(seed)
    y, stats = block(x, mask)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    return y, stats, (y * direction).sum() + 3 * stats.balance_loss + 0.1 * stats.z_loss


def passed(block, execution: str) -> dict:
    """All that a pass returns and all gradients, by name."""
    block.execution = execution
    x, mask = batch(block.experts.w1.shape[2])
    assert fused.applies(block, x) == execution.startswith("fused")
    y, stats, loss = objective(block, x.requires_grad_(), mask)
    inputs = {"x": x, **dict(block.named_parameters())}
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    found = {f"gradient of {name}": g for name, g in zip(inputs, gradients, strict=True)}
    return {"y": y, **found, **{k: v for k, v in stats._asdict().items() if v is not None}}


def compare(name: str) -> list[str]:
    """What differs between the kernels and a product per expert."""
    strata, options = CASES[name]
    block = make_block(strata, **options)
    if name == "empty strata and experts":
        with torch.no_grad():  # all tokens go to the first expert, and so past the other strata
            block.layer_norms[0].weight.zero_()
            block.layer_norms[0].bias.fill_(1)
            block.gates[0].weight.copy_(torch.tensor([[9.0], [-9], [-9], [-9], [0]]))
    if name == "second choices of nearly nothing":
        with torch.no_grad():  # 2e-9, which is the whole weight where the first expert is full
            block.layer_norms[0].weight.fill_(0.1)
            block.layer_norms[0].bias.fill_(1)
            gate_ED = block.gates[0].weight.zero_()
            gate_ED[0] = 20 / gate_ED.shape[1]
            gate_ED[1:3, :2] = torch.tensor([[10.0, -10], [-10, 10]])
    block.train(name != "evaluation")
    how = options.get("execution", "fused")
    # Dropout depends on the kernels' random numbers, which are the same with both products.
    other = "fused" if "activation_dropout" in options else "per-expert"
    want = passed(block, other)
    fused.Launcher.compiled.clear()
    got = passed(block, how)
    assert fused.Launcher.compiled  # has what was launched
    wrong = [f"{key} is only in one" for key in want.keys() ^ got.keys()]
    for key in want.keys() & got.keys():
        try:
            torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=2e-4)
        except AssertionError as error:
            wrong.append(f"{key}: {error}")
    return wrong


OTHERS = [
    *({"activation_fn": "gelu"}, {"gate": "threshold"}, {"scores": "sigmoid"}, {"null_experts": 2}),
    *({"balance": "bias"}, {"drop_order": "score", "capacity_factor": 0.5}, {"norms": "released"}),
    *({"stacked": True}, {"capacity_budget": 1.2}, {"eom": 0.2}),
]
OTHERS = {str(options): options for options in OTHERS}


def others(name: str) -> list[str]:
    """Whether what the kernels do not know is left to the other executions."""
    block = make_block("2-3", **OTHERS[name])
    x = torch.randn(3, 13, block.layer_norms[0].weight.shape[0])
    if fused.applies(block, x):
        return ["applies"]
    y, _ = block(x)
    return [] if y.isfinite().all() else ["is not finite"]


ROUNDED = "no room by rounding"


def rounded(name: str) -> list[str]:
    """Whether an expert takes 55 of 100 tokens: in floating point, 1.1 * 100 / 2 is a little more."""
    block = make_block("2", capacity_factor=1.1)
    torch.nn.init.zeros_(block.gates[0].weight)
    dropped = block(torch.randn(100, 40))[1].dropped.tolist()
    return [] if dropped == [[45, 45]] else [f"drops {dropped}"]


LOST = ["a token of NaN", "choices of nothing", "rows of another count"]


def lost(name: str) -> list[str]:
    """Whether kernels stay within their tensors for choices that no gate makes, and spoil no other token."""
    found, start = set(), fused.Launcher.start
    block, (x, mask) = make_block("2-3", capacity_factor=0.0, execution=OWN), batch()
    want = block(x, mask)[0]

    def within(launcher, kernel, grid, named, **options):
        ends = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes) for t in named.values() if torch.is_tensor(t)
        )
        starts, ends = np.array(ends, dtype=np.uint64).T
        ends = np.maximum.accumulate(ends)

        def check(at, mask, size):
            at = np.asarray(at, np.uint64)[np.asarray(mask, bool)]
            last = np.searchsorted(starts, at, "right") - 1
            if (last < 0).any() or (at + np.uint64(size) > ends[last]).any():
                found.add(f"{kernel.__name__} leaves its tensors")
                raise IndexError(kernel.__name__)

        bounds.check = check
        start(launcher, kernel, grid, named, **options)
        if kernel.__name__ == "route" and name == LOST[1]:
            choices = named["choices"].view(2, -1)[:, 28:34]  # of three tokens
            choices.copy_(torch.tensor([5, 15, -7, 1 << 30, -(1 << 31), 9]))
        if kernel.__name__ == "scan" and name == LOST[2]:
            named["counts"].fill_(50)  # of 60

    fused.Launcher.start = within
    fused._allocate = lambda dtype, device, *sizes: [torch.empty(n, dtype=dtype) for n in sizes]
    if name == LOST[0]:
        x[0, 3] = torch.nan
    try:
        y, stats, loss = objective(block, x.requires_grad_(), mask)
        loss.backward()
    except Exception:
        return sorted(found) or ["fails"]
    others = torch.ones(mask.shape, dtype=torch.bool)
    others[0, 3], others[1, 1:4] = False, False
    wrong = [] if name == LOST[2] or torch.allclose(y[others], want[others]) else ["others differ"]
    if name == LOST[0]:
        wrong += [] if stats.balance_loss.isnan() and y[0, 3].isnan().all() else ["NaN is lost"]
        wrong += [] if stats.requested_capacity[0, 3] in (1, 2) else ["goes nowhere"]
    return wrong


class bounds:
    """Triton's interpreter with loads and stores that are checked, and an argmax as compiled code has it."""

    check = staticmethod(lambda at, mask, size: None)

    def install() -> None:
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def size(pointers):
            return pointers.get_element_ty().primitive_bitwidth // 8 or 1

        def checked_load(self, at, mask, *others):
            bounds.check(at.data, mask.data, size(at))
            return load(self, at, mask, *others)

        def checked_store(self, at, value, mask, *others):
            bounds.check(at.data, mask.data, size(at))
            return store(self, at, value, mask, *others)

        def argmax(scores, axis=None, **options):
            best = np.where(np.isnan(scores), -np.inf, scores).argmax(axis, **options)
            lost = np.isnan(scores).any(axis, **options)
            return np.where(lost, scores.shape[axis or 0] - 1, best)

        builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
        np.nanargmax = argmax


def slope(name: str) -> list[str]:
    """Whether gradients agree with differences, and a pass with itself, where it depends on drawn numbers."""
    block = make_block(NOISY[name][0], **NOISY[name][1])
    x, mask = batch()
    y, _, loss = objective(block, x.requires_grad_(), mask)
    values = [x, *block.parameters()]
    gradients = torch.autograd.grad(loss, values)
    again, *_ = objective(block, x, mask)
    other, *_ = objective(block, x, mask, seed=5)
    wrong = [] if torch.equal(y, again) else ["the same seed gives another output"]
    wrong += [] if not torch.equal(y, other) else ["another seed gives the same output"]
    for value, gradient in zip(values, gradients, strict=True):
        step = torch.randn(value.shape, generator=torch.Generator().manual_seed(6)) * 2e-4
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                value += sign * step
                losses.append(objective(block, x, mask)[2].double().item())
                value -= sign * step
        found, expected = losses[0] - losses[1], 2 * (gradient * step).sum().item()
        if abs(found - expected) > 0.03 * abs(expected) + 2e-3:
            wrong.append(f"{tuple(value.shape)}: difference {found}, gradient {expected}")
    return wrong


# Strata and tokens of each rank, over which the experts are sharded.
SHARDED = {
    "two ranks": ("2-2-2-2", [13, 20]),
    "four ranks": ("2-0-3-3", [13, 20, 1, 7]),
    "a rank without tokens": ("4-4", [13, 0]),  # by the general forward
    "replicas": ("2", [13, 7, 5, 20]),
}


def sharded(name: str) -> list[str]:
    """Whether sharded experts compute what replicated ones do, in as many launches of kernels."""
    strata, tokens = SHARDED[name]
    start_processes(on_rank, (free_port(), strata, tokens), len(tokens), start_method="fork")
    return []


def on_rank(rank: int, port: int, strata: str, tokens: list[int]) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(tokens))}
    calls, start = [], fused.Launcher.start
    fused.Launcher.start = lambda *args, **named: calls.append(1) or start(*args, **named)
    cases = [(strata, tokens, [False] * len(tokens))]
    pass_through_block(cases, ways={torch.float32: ["fused"]})
    assert len(calls) == (14 * len(strata.split("-")) if tokens[rank] else 0)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    if set(words) & set(LOST):
        bounds.install()
    for name in words:
        check = compare if name in CASES else slope if name in NOISY else others
        check = rounded if name == ROUNDED else lost if name in LOST else check
        check = sharded if name in SHARDED else check
        print(json.dumps({name: check(name)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
