"""The block's forward pass on a CUDA device that is not there: shapes and devices, without a driver.

Autograd asks the driver for a context, so there is no backward pass. The test needs a build of torch
that knows CUDA. It finds tensors made on the wrong device, operations that CUDA has not, and values
that the host waits for, which a fake tensor does not have.
"""

import pytest
import torch
from plain_loops import SYSTEMS
from test_device_work import fakes_cuda
from torch._subclasses.fake_tensor import FakeTensorMode

from smoe_fairseq.modules import StratifiedMoE

pytestmark = pytest.mark.skipif(
    not fakes_cuda(), reason="this torch is built without CUDA, or draws nothing without a driver"
)

T, D, F, VOCABULARY = 24, 64, 128, 50
DRAWING = [
    {"strata": "8", **each} for each in ({}, {"second_expert_policy": "random"}, {"eom": 0.2})
]
# The assignment of `base` is computed on the host, which reads the number of copies of the others.
READS_ON_HOST = {"base", "top-p", "relu", "threshold", "depths"}


@pytest.fixture
def bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [*SYSTEMS, *DRAWING], ids=str)
def test_grouped_on_a_device_that_is_not_there(options, training, padding, bfloat16):
    gate = options.get("gate")
    if gate in READS_ON_HOST or gate == "expert-choice" and not training:
        pytest.skip("the host reads the number of copies")
    if options.get("balance") == "bias":
        options = {**options, "second_expert_policy": "all"}
    with FakeTensorMode(), torch.device("cuda"):
        if gate == "hash":  # values that are not there are not checked when the block is made
            table = torch.zeros(VOCABULARY, dtype=torch.long, device="meta")
            options = {**options, "hash_table": table}
        block = StratifiedMoE(D, F, execution="grouped", **options).train(training)
        if gate == "hash":
            block.gates[0].table = torch.zeros(VOCABULARY, dtype=torch.long)
        x = torch.randn(3, T // 3, D)
        mask = torch.zeros(3, T // 3, dtype=torch.bool) if padding else None
        ids = torch.zeros(3, T // 3, dtype=torch.long)
        y, stats = block(x, mask, ids=ids)
        assert y.shape == x.shape and y.dtype == torch.bfloat16 and y.device.type == "cuda"
        assert stats.balance_loss.device.type == "cuda"
