"""The block computes by operations that MPS has, says torch's list of them; no machine with MPS is needed."""

from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from plain_loops import SYSTEMS, make_block
from torch.utils._python_dispatch import TorchDispatchMode

LIST = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
FOR_ALL = {"MPS", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
MORE = [{"execution": "grouped"}, {"drop_order": "random", "capacity_factor": 0.5}]
MORE += [{"activation_fn": each, "activation_dropout": 0.1} for each in ("relu", "gelu")]


@pytest.fixture(scope="module")
def of_cpu_and_cuda_alone() -> set[str]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    listed = yaml.load(LIST.read_text(), loader)
    entries = {each["func"].split("(")[0]: each for each in listed}

    def is_missing(name: str) -> bool:
        delegate = entries[name].get("structured_delegate")
        if delegate:
            return is_missing(delegate)
        kinds = {
            kind.strip() for kinds in entries[name].get("dispatch", {}) for kind in kinds.split(",")
        }
        return bool(kinds) and not any(kind in FOR_ALL or "Implicit" in kind for kind in kinds)

    return set(filter(is_missing, entries))


class Names(TorchDispatchMode):
    """Of all operations."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.add(function.name().removeprefix("aten::").removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [*SYSTEMS, *({"strata": "2-3", **each} for each in MORE)], ids=str
)
def test_operations(options, of_cpu_and_cuda_alone):
    if "_embedding_bag" in of_cpu_and_cuda_alone:
        pytest.skip("this torch cannot sum copies on MPS")
    assert of_cpu_and_cuda_alone and "index_select" not in of_cpu_and_cuda_alone
    block = make_block(sizes=(16, 16), **options).float()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 5:] = True
    with Names() as names:
        ids = torch.zeros_like(mask, dtype=torch.long)
        y, stats = block(torch.randn(2, 7, 16, requires_grad=True), mask, ids=ids)
        (y.sum() + stats.balance_loss).backward()
    assert not names.found & of_cpu_and_cuda_alone
