"""The fused kernels: by Triton's interpreter against a product per expert, and compiled for three GPUs."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip(
    "triton", "3.6", reason="the kernels are written in Triton, 3.6 or later"
)

import interpreted  # noqa: E402
from commands import succeeded  # noqa: E402
from sampling import soak  # noqa: E402

from benchmarks.gpu import resources  # noqa: E402
from smoe_fairseq.modules import StratifiedMoE, fused, kernels, products  # noqa: E402

GROUPS = [interpreted.CASES, interpreted.NOISY, interpreted.OTHERS, [interpreted.ROUNDED]]
GROUPS += [[name] for name in interpreted.LOST] + [interpreted.SHARDED]


@pytest.mark.parametrize("names", GROUPS)
def test_kernels_compute_what_the_block_does(names):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, Path(interpreted.__file__), *names]
    run = succeeded(subprocess.run(command, env=environment, capture_output=True, text=True))
    assert [json.loads(line) for line in run.stdout.splitlines()] == [{name: []} for name in names]


class Kernels:
    """Kernels for which a device has shared memory for at most ``columns`` of `route`'s tiles."""

    def __init__(self, columns: int):
        self.columns, self.seen = columns, []

    def __getattr__(self, name):
        def warmup(grid, num_warps, **named):
            self.seen.append(name)
            return SimpleNamespace(n_spills=0, _init_handles=partial(self.load, name, named))

        names = getattr(kernels, name).arg_names
        return SimpleNamespace(__name__=name, warmup=warmup, arg_names=names)

    def load(self, name, named):
        if name == "route" and named["GATE_D"] > self.columns:
            raise triton.OutOfResources(named["GATE_D"], self.columns, "shared memory")
        if self.columns < 0:
            raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    "columns, shrink, logged",
    [(256, 1, ""), (70, 4, ""), (8, None, "shared memory"), (-1, None, "shared memory")],
)
def test_tiles_are_as_large_as_the_device_allows(columns, shrink, logged, monkeypatch, caplog):
    found = Kernels(columns)
    monkeypatch.setattr(fused, "kernels", lambda: found)
    monkeypatch.setattr(fused, "_shrinks", {})
    block = StratifiedMoE(512, 64, "4-4", execution="fused")
    before = torch.get_rng_state()
    for _ in range(2):
        assert fused.shrinkage(block, torch.empty(3, 512)) == shrink
    assert torch.equal(before, torch.get_rng_state())
    assert logged in caplog.text and len(caplog.records) == bool(logged)
    everything = "route scan dispatch activate combine spread sums settle collect"
    assert shrink is None or set(found.seen) == set(everything.split())


@pytest.mark.parametrize("where", [torch.inference_mode, torch.autograd.graph.save_on_cpu])
def test_the_first_block_may_be_anywhere(where, monkeypatch, caplog):
    """Translation is in inference mode; checkpoints of activations have hooks."""
    monkeypatch.setattr(fused, "kernels", lambda: Kernels(256))
    monkeypatch.setattr(fused, "_shrinks", {})
    block = StratifiedMoE(512, 64, "4-4", execution="fused").eval()
    with where():
        assert fused.shrinkage(block, torch.empty(3, 512)) == 1
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (12, 0)])
def test_auto_takes_the_kernels_on_all_gpus_that_triton_supports(capability, dtype, monkeypatch):
    block, x = StratifiedMoE(64, 64, "4-4").to(dtype), torch.empty(3, 64, dtype=dtype)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(fused, "shrinkage", lambda *_: 1)
    monkeypatch.setattr(products.torch_features, "float32_is_exact", lambda: False)
    assert fused.applies(block, x) == (capability != (7, 0))
    monkeypatch.setattr(products.torch_features, "float32_is_exact", lambda: True)
    assert fused.applies(block, x) == (capability != (7, 0) and dtype != torch.float32)


def test_kernels_are_launched_on_the_tokens_device(monkeypatch):
    """Triton launches on the current one, which need not be that."""
    current, devices = [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(
        fused._Block, "apply", lambda *args: devices.append(list(current)) or args[1]
    )
    with pytest.raises(ValueError), torch.device("meta"):  # nothing is computed
        block = StratifiedMoE(64, 64, "4-4", execution="fused")
        fused.forward(block, torch.empty(8, 64), None)
    assert devices == [[torch.device("meta")]]


@pytest.mark.parametrize(
    "capability, strata, kind", [soak(80, "4-4", "half"), soak(75, "64-64", "autocast")]
)
def test_the_table_is_of_these_kernels(capability, strata, kind):
    if f"Triton {triton.__version__}" not in resources.TABLE.read_text():
        pytest.skip("the table is of another Triton")
    line = resources.measure(capability, strata, kind)
    assert line in resources.TABLE.read_text().splitlines()
