"""What the fused kernels need of each generation of GPUs, by compiling them without a GPU.

python -m benchmarks.gpu.resources            # writes benchmarks/results/gpu/resources.md
"""

import argparse
import re
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from smoe_fairseq.files import write_whole
from smoe_fairseq.modules import StratifiedMoE, fused, products

TABLE = Path(__file__).parent.parent / "results/gpu/resources.md"
# KiB of shared memory of a program, by compute capability (CUDA C++ Programming Guide, table of features).
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Strata, and the type of the computation.
BLOCKS = [("4-4", "half"), ("4-4", "fp32"), ("8-24", "autocast"), ("64-64", "autocast")]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
COLUMNS = "| capability | block | tiles | shared memory, KiB | registers | spills, bytes |"


def launches(strata: str, half: torch.dtype, kind: str, shrink: int) -> dict:
    """Each kernel of a training pass, with its arguments; products by our own kernels and by torch."""
    found = {}

    def note(kernel, grid, values, **settings):
        name = kernel.__name__
        kind = ("INPUTS", "OUTPUTS", "BACK", "END") if name == "multiply" else ("BIAS",)
        found[name, *map(values.get, kind)] = kernel, values.values(), settings

    dtype = half if kind == "half" else torch.float32
    autocast = mock.patch.object(
        fused, "autocast_dtype", lambda _: half if kind == "autocast" else None
    )
    with torch.device("meta"), autocast:
        for execution in ("fused", "fused-triton"):
            block = StratifiedMoE(1024, 4096, strata, dropout=0.1, execution=execution).to(dtype)
            fused.rehearse(block, torch.empty(1, 1024, dtype=dtype), note, shrink)
    return found


def compiled(kernel, args, options: dict, capability: int) -> SimpleNamespace:
    """``shared`` memory in bytes, ``registers`` of a thread and ``spills`` in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget

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
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs=attrs
    )
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    numbers = [int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")]
    return SimpleNamespace(shared=done.metadata.shared, registers=numbers[0], spills=numbers[1])


def measure(capability: int, strata: str, kind: str) -> str:
    """A row of the table: the largest tiles that fit."""
    half = torch.float16 if capability < 80 else torch.bfloat16
    tried = []
    for shrink in products.SHRINKS:
        found = []
        for (name, *_), launch in launches(strata, half, kind, shrink).items():
            found.append((compiled(*launch, capability), name))
            if found[-1][0].shared > 1024 * SHARED[capability]:
                break
        else:
            tried.append((max(usage.spills for usage, _ in found), shrink, found))
            if tried[-1][0] <= 4 * products.SPILLS:
                break
    _, shrink, found = min(tried, key=lambda each: each[:2])
    cells = []
    for key, unit in (("shared", 1024), ("registers", 1), ("spills", 1)):
        most, name = max((getattr(usage, key), name) for usage, name in found)
        cells.append(f"{-(-most // unit)} (`{name}`)" if most else "0")
    kind = {"half": TYPES[half], "autocast": f"{TYPES[half]} under autocast"}.get(kind, kind)
    tiles = f"1/{shrink}" if shrink > 1 else "full"
    return f"| {capability / 10} | `{strata}`, {kind} | {tiles} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", nargs="*", type=int, default=list(SHARED))
    rows = []
    for capability in parser.parse_args().capabilities:
        for strata, kind in BLOCKS:
            rows.append(measure(capability, strata, kind))
            print(rows[-1], flush=True)
    write_table(rows)


def write_table(rows: list[str]) -> None:
    limits = ", ".join(f"{limit} on {capability / 10}" for capability, limit in SHARED.items())
    text = [
        "# What the fused kernels need",
        "",
        f"Compiled by Triton {version('triton')} without a GPU, D 1024 and F 4096, by",
        "`python -m benchmarks.gpu.resources`. Each cell names the kernel that needs most; *tiles* are",
        "the largest that fit. A program can have this much shared memory, in KiB: " + limits + ".",
        "",
        COLUMNS,
        "|" + "---|" * COLUMNS.count(" |"),
        *rows,
    ]
    write_whole(TABLE, "\n".join(text) + "\n")


if __name__ == "__main__":
    main()
