"""Sharded experts never leave a process waiting: not for want of tokens, and not when another is gone."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import train_with
from test_expert_parallel import averages, flags

from smoe_fairseq.modules import StratifiedMoE

# Twice: nothing is left over of the pass before.
WAYS = {torch.float64: ["per-expert"] * 2, torch.float32: ["grouped"]}


def pass_through_block(cases, ways=WAYS):
    """On every rank: forward and backward of a sharded block, beside one with all experts."""
    dist.init_process_group("gloo")
    for case in cases:
        for dtype, executions in ways.items():
            pass_in(dtype, executions, *case)
        dist.barrier()


def pass_in(dtype, executions, strata, tokens, padding, cmr=False):
    """Rank r has ``tokens[r]`` tokens, all of them padding where ``padding[r]``."""
    close = dict.fromkeys(("rtol", "atol"), 1e-12 if dtype == torch.float64 else 1e-4)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options = dict(capacity_factor=0, second_expert_policy="all", strata=strata, cmr=cmr)
    torch.manual_seed(1)
    sharded = StratifiedMoE(16, 24, **options, expert_parallel=True).to(dtype)
    torch.manual_seed(1)
    whole = StratifiedMoE(16, 24, **options, execution="per-expert").to(dtype)

    inputs = [torch.randn(t, 16, dtype=dtype, requires_grad=True) for t in tokens]
    masks = [torch.full((t,), pads) for t, pads in zip(tokens, padding, strict=True)]
    outputs = [whole(x, mask)[0] for x, mask in zip(inputs, masks, strict=True)]
    sum(y.square().sum() for y in outputs).backward()
    x = inputs[rank].detach().requires_grad_()
    for sharded.execution in executions:
        x.grad = None
        sharded.zero_grad()
        y, stats = sharded(x, masks[rank])
        y.square().sum().backward()
    torch.testing.assert_close(y, outputs[rank], **close)
    torch.testing.assert_close(x.grad, inputs[rank].grad, **close)
    local = sharded.experts.placement.local
    for ours, all_experts in zip(
        sharded.experts.parameters(), whole.experts.parameters(), strict=True
    ):
        ours = ours.grad.clone()
        if sharded.experts.placement.num_replicas > 1:  # here by hand, in training by legacy_ddp
            everyones = [torch.empty_like(ours) for _ in range(world_size)]
            dist.all_gather(everyones, ours)
            ours = sum(everyones[rank % whole.strata.num_experts :: whole.strata.num_experts])
        wanted = all_experts.grad[local.start : local.stop]
        torch.testing.assert_close(ours * world_size, wanted, **close)


def types_that_travel() -> None:
    dist.init_process_group("gloo")
    block, types = StratifiedMoE(16, 24, "4-4", expert_parallel=True), []
    exchange = dist.all_to_all_single

    def recorded(output, given, *others, **options):
        types.append(given.dtype)
        return exchange(output, given, *others, **options)

    dist.all_to_all_single = recorded
    with torch.autocast("cpu", torch.bfloat16):
        block(torch.randn(10, 16))[0].sum().backward()
    assert set(types) == {torch.long, torch.bfloat16}, types
    dist.barrier()


def test_tokens_travel_in_the_type_that_is_computed_in(ranks, tmp_path):
    ranks.train(tmp_path, 2, function=types_that_travel)


SHARES = [
    [
        ("2-2-2-2", [40, 40], [False, False]),
        ("2-2-2-2", [40, 40], [True, False]),  # all padding
        ("2-2-2-2", [40, 0], [False, False]),  # no tokens at all
        ("2-2-2-2", [40, 1], [False, False]),  # one token, so strata without any
        ("8", [40, 40], [False] * 2, True),  # beside a shared network
        ("8", [40, 0], [False] * 2, True),
    ],
    [("3", [40, 5, 9], [False] * 3)],
    [
        ("4-4", [40, 40, 7, 3], [False, True, False, True]),
        ("8", [0, 0, 0, 5], [False] * 4),
        ("2", [40, 30, 20, 10], [False] * 4),  # replicas
    ],
]


@pytest.mark.parametrize("cases", SHARES, ids=["2 ranks", "3 ranks", "4 ranks"])
def test_any_share_of_the_tokens(ranks, tmp_path, cases):
    number = len(cases[0][1])
    ranks.train(tmp_path, number, cases, function=pass_through_block)


def order_of_events():
    """Of one pass with a shared network, forward and backward: exchanges of rows, and that network."""
    dist.init_process_group("gloo")
    events, original = [], dist.all_to_all_single

    def all_to_all_single(output, *others, **options):
        work = original(output, *others, **options)
        if not output.is_floating_point():  # how many rows go where
            return work
        events.append("depart")
        wait = work.wait
        return SimpleNamespace(wait=lambda: (events.append("arrive"), wait()))

    dist.all_to_all_single = all_to_all_single
    block = StratifiedMoE(16, 24, "8", cmr=True, expert_parallel=True)
    block.cmr.fc1.register_forward_hook(lambda *_: events.append("shared"))
    block.cmr.fc1.weight.register_hook(lambda _: events.append("shared"))
    y, _ = block(torch.randn(10, 16, requires_grad=True))
    y.sum().backward()
    one_way = ["depart", "arrive", "depart", "shared", "arrive"]
    assert events == [*one_way, "depart", "shared", "arrive", "depart", "arrive"], events


def test_a_shared_network_is_computed_while_outputs_travel(ranks, tmp_path):
    """And its backward pass while their gradients do."""
    ranks.train(tmp_path, 2, function=order_of_events)


def pass_as_often_as(passes: list[int]):
    """On each of four ranks, with two experts: as many forward and backward passes as its group makes."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    block = StratifiedMoE(16, 24, "2", second_expert_policy="all", expert_parallel=True)
    for _ in range(passes[dist.get_rank() // 2]):
        y, _ = block(torch.randn(10, 16, requires_grad=True))
        y.sum().backward()
    print("passed", flush=True)
    dist.barrier()


def test_groups_do_not_wait_for_one_another(ranks, tmp_path):
    """Exchanges are among the processes that hold one set of experts."""
    ranks.train(tmp_path, 4, [1, 4], function=pass_as_often_as)


@pytest.mark.soak
def test_epochs_and_validation_of_uneven_length(ranks, small_corpus, tmp_path):
    """10 batches of training for 4 ranks, one of validation: the others get dummy batches."""
    arguments = flags(small_corpus, tmp_path, "--expert-parallel", "--max-update", 6)
    arguments = [a for a in arguments if a != "--disable-validation"]
    arguments += ["--batch-size-valid", 50, "--batch-size", 5, "--save-interval", 9]
    run = ranks.train(tmp_path, 4, *arguments)
    assert re.search(r'"epoch": 2, "valid_loss"', run.output(0))
    assert averages(tmp_path)["bsz"] <= 20


def train_until(moment: str, arguments):
    """``fairseq-train`` in which rank 1 fails, in the way that ``moment`` names, after two updates."""

    def fail(updates: int) -> None:
        if updates == 2 and dist.get_rank() == 1:
            if moment == "exception":
                raise ValueError("this batch cannot be read")
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    train_with(fail, arguments)


def test_a_process_that_fails_ends_all(ranks, small_corpus, tmp_path):
    """One that is killed under torchrun: test_recipes_processes.py."""
    arguments = list(map(str, flags(small_corpus, tmp_path, "--expert-parallel")))
    run = ranks.start(tmp_path, 2, "out of memory", arguments, function=train_until)
    run.refused("another rank has ended")
    assert "out of memory with --expert-parallel: try --" in run.output(1)
