"""The fused kernels: by Triton's interpreter against a product per expert, and compiled for three GPUs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip(
    "triton", "3.6", reason="the kernels are written in Triton, 3.6 or later"
)

import interpreted  # noqa: E402

from smoe_fairseq.modules import StratifiedMoE, fused  # noqa: E402

SHARED = {80: 163, 90: 227, 100: 227}  # KiB that a program can have, by compute capability
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}


GROUPS = [interpreted.CASES, interpreted.NOISY, interpreted.OTHERS, [interpreted.ROUNDED]]
GROUPS += [[name] for name in interpreted.LOST]


@pytest.mark.parametrize("names", GROUPS)
def test_kernels_compute_what_the_block_does(names):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, Path(interpreted.__file__), *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [json.loads(line) for line in run.stdout.splitlines()] == [{name: []} for name in names]


def test_without_a_compiler_the_block_goes_another_way(monkeypatch, caplog):
    class Failing:
        scan = property(lambda self: (_ for _ in ()).throw(RuntimeError("no C compiler")))

    monkeypatch.setattr(fused, "kernels", Failing)
    assert not fused.triton_works.__wrapped__(torch.device("cpu"))
    assert "no C compiler" in caplog.text


class Recorder:
    """In the place of a kernel, notes what it is launched with."""

    def __init__(self, kernel, launches: list):
        self.__name__, self.kernel, self.launches = kernel.__name__, kernel, launches

    def __getitem__(self, grid):
        return partial(self.launch, grid)

    def launch(self, grid, *args, **options):
        self.launches.append((self.kernel, args, options))


def launches(width: int, inner: int, dtype: torch.dtype, **options) -> list:
    """Kernels and arguments of a forward and backward pass over 4-4, without computing anything."""
    spec = importlib.util.find_spec("smoe_fairseq.modules.kernels")
    module, found = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(module)
    for name, value in list(vars(module).items()):
        if isinstance(value, triton.JITFunction) and not name.startswith("_"):
            setattr(module, name, Recorder(value, found))
    with torch.device("meta"):
        block = StratifiedMoE(width, inner, "4-4", execution="fused", **options).to(dtype)
        x = torch.empty(8, 64, width, dtype=dtype, requires_grad=True)
        mask = torch.empty(8, 64, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "kernels", lambda: module)
        y, stats = fused.forward(block, x, mask)
        outputs = [y, stats.balance_loss, stats.z_loss]
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return found


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


def compiled(kernel, args, options, capability: int):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attrs = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif torch.is_tensor(value):
            signature[name] = f"*{TYPES[value.dtype]}"
            attrs[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(
    ("capability", "width", "inner", "dtype"),
    [(80, 1024, 4096, "fp16"), (90, 1024, 4096, "bf16"), (100, 512, 2048, "bf16")],
)
def test_kernels_compile_without_spills(capability, width, inner, dtype, tmp_path, monkeypatch):
    monkeypatch.setitem(
        TYPES, torch.bfloat16, dtype
    )  # torch traces its grouped product in bf16 alone
    done = {}
    for kernel, args, options in launches(width, inner, torch.bfloat16, dropout=0.1):
        if kernel.__name__ not in done:
            done[kernel.__name__] = compiled(kernel, args, options, capability)
    assert len(done) == 9
    for name, kernel in done.items():
        file = tmp_path / f"{name}.cubin"
        file.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True).stdout
        # Triton 3.9 keeps two numbers of `route` there on capability 8.0, in fp16 of 1,024 columns.
        assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 8, usage
        assert kernel.metadata.shared <= 1024 * SHARED[capability]
