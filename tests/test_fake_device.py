"""The block's forward pass on a CUDA device that is not there: shapes and devices, without a driver.

Autograd asks the driver for a context, so there is no backward pass. The test needs a build of torch
that knows CUDA. It finds tensors made on the wrong device, operations that CUDA has not, and values
that the host waits for, which a fake tensor does not have.
"""

import pytest
import torch
from test_device_work import fakes_cuda
from torch._subclasses.fake_tensor import FakeTensorMode

from smoe_fairseq.modules import StratifiedMoE

pytestmark = pytest.mark.skipif(
    not fakes_cuda(), reason="this torch is built without CUDA, or draws nothing without a driver"
)

T, D, F, VOCABULARY = 24, 64, 128, 50
SYSTEMS = {
    "smoe-4-4": {"strata": "4-4"},
    "smoe-2-2-2-2": {"strata": "2-2-2-2"},
    "switch": {"strata": "8", "top_k": 1},
    "random": {"strata": "8", "second_expert_policy": "random"},
    "all": {"strata": "8", "second_expert_policy": "all"},
    "null": {"strata": "4-4", "top_k": 3, "null_experts": 3},
    "top-p": {"strata": "4-4", "gate": "top-p"},
    "threshold": {"strata": "4-4", "gate": "threshold"},
    "depths": {"strata": "1", "gate": "depths", "top_k": 1, "capacity_factor": 0.5},
    "hash": {"strata": "8", "gate": "hash"},
    "base": {"strata": "8", "gate": "base"},
    "expert-choice": {"strata": "8", "gate": "expert-choice", "capacity_factor": 2.0},
    "residual": {"strata": "8", "top_k": 1, "residual": True},
    "shared": {"strata": "8", "shared_experts": 2, "expert_ffn_dim": 32},
    "eom": {"strata": "8", "eom": 0.2},
    "cmr": {"strata": "8", "cmr": True},
    "bias": {"strata": "4-4", "balance": "bias", "second_expert_policy": "all"},
    "sigmoid": {"strata": "4-4", "scores": "sigmoid"},
    "released": {"strata": "4-4", "norms": "released"},
    "stacked": {"strata": "4-4", "stacked": True},
    "chain": {"strata": "8", "chain": 3},
    "budget": {"strata": "4-4", "capacity_budget": 1.2},
}
# The assignment of `base` is computed on the host, which reads the number of copies of the others.
READS_ON_HOST = {"base", "top-p", "threshold", "depths"}


@pytest.fixture
def bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in READS_ON_HOST])
def test_grouped_on_a_device_that_is_not_there(system, training, padding, bfloat16):
    if system == "expert-choice" and not training:
        pytest.skip("the host reads the number of copies")
    options = dict(SYSTEMS[system])
    with FakeTensorMode(), torch.device("cuda"):
        if system == "hash":  # values that are not there are not checked when the block is made
            options["hash_table"] = torch.zeros(VOCABULARY, dtype=torch.long, device="meta")
        block = StratifiedMoE(D, F, execution="grouped", **options).train(training)
        if system == "hash":
            block.gates[0].table = torch.zeros(VOCABULARY, dtype=torch.long)
        x = torch.randn(3, T // 3, D)
        mask = torch.zeros(3, T // 3, dtype=torch.bool) if padding else None
        ids = torch.zeros(3, T // 3, dtype=torch.long)
        y, stats = block(x, mask, ids=ids)
        assert y.shape == x.shape and y.dtype == torch.bfloat16 and y.device.type == "cuda"
        assert stats.balance_loss.device.type == "cuda"
