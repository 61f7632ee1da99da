"""The forecast for a GPU: what is counted, and that it needs no data."""

import pytest
import torch

from benchmarks.roofline import (
    H200,
    Case,
    Count,
    block,
    floor,
    shares_of,
    update,
)
from smoe_fairseq.modules import Strata

KERNELS = 45  # per stratum at most, forward and backward


@pytest.mark.parametrize(
    "strata, shares", [("8", [1]), ("4-4", [1, 0.5]), ("2-2-2-2", [1, 0.25, 1 / 3, 0.5])]
)
def test_shares_of_even_choices(strata, shares):
    assert shares_of(Strata.parse(strata)) == pytest.approx(shares)


def test_products_and_bytes_are_counted():
    a, b = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    with Count(H200, [1.0]) as count:
        (a @ b).view(-1).relu()
    assert count.total.kernels == 2 and set(count.total.by_name) == {"mm", "relu"}
    assert count.total.seconds == pytest.approx(2 * H200.kernel)


@pytest.mark.parametrize("strata", ["8", "2-2-2-2"])
def test_the_block_takes_more_than_its_floor_and_fused_kernels_are_few(strata):
    case = Case(strata, 16384, 512)
    grouped, fused = (block(case, way, H200) for way in ("grouped", "fused"))
    assert floor(case, H200) < fused.seconds < 1.3 * floor(case, H200) < grouped.seconds
    assert fused.kernels <= KERNELS * len(case.shares) < grouped.kernels


def test_a_whole_update_of_experts_takes_more_than_a_dense_one():
    dense, sparse = (update(name, "grouped", H200) for name in ("dense", "moe-8"))
    assert 500 < dense.kernels < sparse.kernels
    assert dense.seconds < sparse.seconds < 1
