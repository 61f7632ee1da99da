"""The block as a layer of any PyTorch model: without fairseq, under its parameters' own names."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from commands import run_python, without
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smoe_fairseq.modules import OptionError, StratifiedMoE
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.experts import Experts
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.modules.routing import Capacity, most_copies
from smoe_fairseq.modules.statistics import average_null

OTHERS = ("numpy", "fairseq", "fairseq_cli", "omegaconf", "hydra", "scipy", "yaml")


def test_the_block_trains_by_torch_alone():
    result = run_python(
        without(*OTHERS)
        + """
import torch
from smoe_fairseq.modules import StratifiedMoE
torch.manual_seed(1)
block = StratifiedMoE(8, 16, "2-2", activation_fn="gelu", cmr=False, expert_parallel=True)
optimizer = torch.optim.SGD(block.parameters(), 0.1)
x, target = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
losses = []
for _ in range(20):
    y, stats = block(x)
    loss = (y - target).square().mean()
    (loss + 0.01 * stats.balance_loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
print("trained", "fairseq" in sys.modules)
"""
    )
    assert result.stdout == "trained False\n"


def test_names_of_another_side_take_the_place_of_the_parameters():
    with pytest.raises(OptionError) as error:
        StratifiedMoE(8, 16, "7-1")
    names = {"top_k": "--moe-top-k", "strata": "--smoe-strata"}
    assert str(error.value).startswith("top_k 2: a gate of strata 7-1 sees 1 expert")
    assert error.value.named(names).startswith("--moe-top-k 2: a gate of --smoe-strata 7-1 sees 1")


def test_a_copy_of_sharded_experts_is_marked_as_they_are():
    """As an average of the weights has one: fairseq's ``legacy_ddp`` asks for the mark."""
    experts = copy.deepcopy(Experts(Placement(4, world_size=2), 8, 16))
    sum(weight.sum() for weight in experts.weights()).backward()
    for parameter in experts.parameters():
        assert parameter.expert and torch.all(parameter.grad == 1 / 2)


class NoFloat64OnMPS(TorchDispatchMode):
    """MPS has no float64; a fake tensor, which torch lets have any device, would not say so."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if torch.is_tensor(each) and each.device.type == "mps":
                assert each.dtype != torch.float64, f"{func} makes float64 on MPS"
        return made


@pytest.mark.parametrize("part", ["capacity", "expert choice", "null experts"])
def test_routing_makes_no_float64_on_mps(part):
    with FakeTensorMode(), NoFloat64OnMPS():
        count_E = torch.empty(4, dtype=torch.long, device="mps")
        if part == "capacity":
            experts_TK = torch.empty(6, 2, dtype=torch.long, device="mps")
            scores_TE = torch.empty(6, 4, device="mps")
            active_T = torch.empty(6, dtype=torch.bool, device="mps")
            found = Capacity(MoEConfig())(experts_TK, scores_TE, active_T).kept_E
        elif part == "expert choice":
            found = most_copies(2.0, count_E, num_experts=4)
        else:
            found = average_null(count_E, null_experts=2)
    assert found.device.type == "mps"


@pytest.mark.parametrize("experts", [2, 3, 7])
@pytest.mark.parametrize("factor", ["0.3", "1.1", "2.0", "2.2", "1e-9", "1e300"])
def test_an_expert_takes_the_ceiling(factor, experts):
    """Of the exact product: 1.1 * 20 / 2 is 11, and in floating point a little more."""
    tokens = torch.arange(0, 5000, 7)
    found = most_copies(float(factor), tokens, experts).tolist()
    share = Fraction(factor) / experts
    for most, count in zip(found, tokens.tolist(), strict=True):
        assert min(most, count) == min(math.ceil(share * count), count)
