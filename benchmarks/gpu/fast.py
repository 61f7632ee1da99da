"""Speed and memory of the block, of a training and of decoding.

Shapes: T tokens, D embedding, F feed-forward, E experts, N rows.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.contenders import block_step, make_block
from benchmarks.floor import routed_tokens
from benchmarks.gpu.parts import Context
from benchmarks.gpu.training import Runs, attempt, speed
from benchmarks.synthetic import LONGEST
from benchmarks.timing import in_turns, ratio

STRATA = (1, 2, 4)
VOCABULARY = 8000
# Events of the profiler in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Case:
    strata: str
    tokens: int
    embed_dim: int
    ffn_embed_dim: int
    mode: str


class GroupedProducts(nn.Module):
    """torch's grouped products on as many random rows as are routed; nothing else is done."""

    def __init__(self, case: Case, counts_LE: list[list[int]], device: torch.device, dtype):
        super().__init__()
        d, f, experts = case.embed_dim, case.ffn_embed_dim, len(counts_LE[0])
        self.w1 = nn.Parameter(torch.randn(experts, d, f, device=device, dtype=dtype) / d**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, f, d, device=device, dtype=dtype) / f**0.5)
        self.ends = [torch.tensor(c, device=device).cumsum(0).to(torch.int32) for c in counts_LE]
        self.rows = [
            torch.randn(sum(c), d, device=device, dtype=dtype, requires_grad=True)
            for c in counts_LE
        ]

    def step(self) -> list[Tensor]:
        """Forward and backward."""
        product = torch.nn.functional.grouped_mm
        outputs = []
        for x_ND, ends_E in zip(self.rows, self.ends, strict=True):
            h_NF = product(x_ND, self.w1, offs=ends_E).relu()
            outputs.append(product(h_NF, self.w2, offs=ends_E))
        inputs = [self.w1, self.w2, *self.rows]
        return torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])


def cases(context: Context) -> Iterator[Case]:
    """The most telling first: 16,384 tokens with 8 experts."""
    if context.tiny:
        sizes = [(64, 16, 8)]
    else:
        sizes = [(16384, 512, 8), (16384, 1024, 8), (65536, 1024, 8), (16384, 1024, 64)]
        sizes += [(4096, 512, 8), (65536, 1024, 128)]
    for (tokens, width, experts), strata in itertools.product(sizes, STRATA):
        notation = "-".join([str(experts // strata)] * strata)
        yield Case(notation, tokens, width, 4 * width, "train")


def block(context: Context) -> Iterator[dict]:
    """bf16, forward and backward; ``ratio`` is of the block over its bare grouped products."""
    device = torch.device(context.device)
    for case in cases(context):
        name = f"{case.strata}, {case.tokens} tokens, D {case.embed_dim}"
        yield attempt(name, lambda c=case: measure(c, device, context.tiny))


def measure(case: Case, device: torch.device, tiny: bool) -> dict:
    torch.manual_seed(1)
    made = make_block(case, device, torch.bfloat16)
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=torch.bfloat16)
    floor = GroupedProducts(case, routed_tokens(made, x_TD), device, torch.bfloat16)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = made

        def forward(self, x_TD):
            y_TD, stats = self.block(x_TD)
            return y_TD, stats.balance_loss

    step = block_step(WithLoss(), x_TD, True)
    times = in_turns({"block": step, "floor": floor.step}, device, 0.1 if tiny else 2.0)
    over = ratio(times, "block", "floor")
    found = {
        "tokens": case.tokens,
        "ms": 1000 * sorted(times["block"])[len(times["block"]) // 2],
        "ratio": over["median"],
        "host waits": host_waits(step),
    }
    if device.type == "cuda":
        found["peak MiB"] = peak(step)
        found["peak MiB of the products"] = peak(floor.step)
    return {"ok": None, **found}


class PaddedProducts(nn.Module):
    """One batched product over experts padded to the largest; ``GroupedProducts`` without grouped_mm."""

    def __init__(self, counts_E: list[int], width: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        experts, inner = len(counts_E), 4 * width
        self.w1 = nn.Parameter(torch.randn(experts, width, inner, device=device, dtype=dtype) / 30)
        self.w2 = nn.Parameter(torch.randn(experts, inner, width, device=device, dtype=dtype) / 30)
        shape = experts, max(counts_E), width
        self.x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    def step(self) -> list[Tensor]:
        y = torch.bmm(torch.bmm(self.x, self.w1).relu(), self.w2)
        return torch.autograd.grad(y, [self.w1, self.w2, self.x], torch.ones_like(y))


class SingleProducts(PaddedProducts):
    """A product per expert on its own rows, whose number the host knows already."""

    def __init__(self, counts_E: list[int], width: int, device: torch.device, dtype: torch.dtype):
        super().__init__(counts_E, width, device, dtype)
        self.counts_E = counts_E

    def step(self) -> list[Tensor]:
        outputs = []
        for x, count, w1, w2 in zip(self.x, self.counts_E, self.w1, self.w2, strict=True):
            outputs.append((x[:count] @ w1).relu() @ w2)
        ones = [torch.ones_like(y) for y in outputs]
        return torch.autograd.grad(outputs, [self.w1, self.w2, self.x], ones)


def products(context: Context) -> Iterator[dict]:
    """Three ways to the products of 8 experts, top-2: which one a device should take, by type and size.

    The largest expert has 1.0 or 1.5 times the mean number of rows.
    """
    device = torch.device(context.device)
    sizes = [(64, 16)] if context.tiny else [(4096, 512), (16384, 512), (65536, 512), (8192, 1024)]
    for (tokens, width), skew in itertools.product(sizes, (1.0, 1.5)):
        mean = 2 * tokens // 8
        most = int(mean * skew)
        counts_E = [most, 2 * mean - most] + [mean] * 6
        for dtype in (torch.bfloat16, torch.float16):
            name = f"{str(dtype).removeprefix('torch.')}, {tokens} tokens, D {width}, skew {skew}"
            made = (counts_E, width, device, dtype)
            yield attempt(name, lambda made=made: three_ways(*made, context.tiny))


def three_ways(counts_E, width, device, dtype, tiny) -> dict:
    ways = {
        "padded": PaddedProducts(counts_E, width, device, dtype).step,
        "per expert": SingleProducts(counts_E, width, device, dtype).step,
    }
    case = Case("8", 0, width, 4 * width, "train")
    grouped = GroupedProducts(case, [counts_E], device, dtype)
    try:
        grouped.step()
        ways["grouped"] = grouped.step
    except RuntimeError:
        pass  # no grouped product in this type here
    times = in_turns(ways, device, 0.1 if tiny else 0.4)
    medians = {name: 1000 * sorted(of)[len(of) // 2] for name, of in times.items()}
    return {"ok": None, **{f"{name} ms": ms for name, ms in medians.items()}}


def host_waits(step) -> int:
    """How often the host waits for the device in one step; the profiler's own wait is left out."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = torch.cuda.is_available()
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("one step"):
            step()
    events = profile.events()
    span = next(event for event in events if event.name == "one step").time_range
    names = WAITS if cuda else ("aten::_local_scalar_dense",)
    return sum(e.name in names and e.time_range.start < span.end for e in events)


def peak(step) -> float:
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**20


# Dense bf16 TFLOP/s as the vendor states them, by words of the device's name; the first that fits.
PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
}


def peak_flops(device: str) -> float | None:
    """Of a device by its name; None if it is not in the table."""
    words = set(re.split(r"[ -]", device))
    return next((1e12 * n for key, n in PEAKS.items() if words >= set(key.split())), None)


def share_of_peak(tokens_per_second: float, flops_per_token: float, device: str) -> float | str:
    """Of an update, whose backward pass is counted as two forward passes; "-" for unknown devices."""
    peak = peak_flops(device)
    return 3 * tokens_per_second * flops_per_token / peak if peak else "-"


MODELS = {
    "dense": ["--moe-freq", 0],
    "moe-8": ["--smoe-strata", "8"],
    "4-4": ["--smoe-strata", "4-4"],
    "2-2-2-2": ["--smoe-strata", "2-2-2-2"],
}


def update(context: Context) -> Iterator[dict]:
    runs = Runs(context) if context.tiny else Runs(context, 20000, VOCABULARY)
    for name, flags in MODELS.items():
        yield attempt(name, lambda f=flags, n=name: trained(runs, n, f, context.tiny))
    for name in () if context.tiny else ("dense", "moe-8", "4-4"):
        flags = MODELS[name]
        yield attempt(
            f"{name}, fp16", lambda f=flags, n=name: trained(runs, n, f, False, ["--fp16"])
        )


def trained(runs: Runs, name: str, flags: list, tiny: bool, precision=("--bf16",)) -> dict:
    if tiny:
        text = runs.train(name, *flags, "--max-update", 3)
        return {"ok": None, "tokens/s": speed(text), "share of peak": "-"}
    model = ["--arch", "smoe_transformer_base", *flags]
    words = [*precision, "--max-tokens", 16384, "--max-update", 20, "--no-save"]
    rate = speed(runs.train(name, *model, *words, tiny=False))
    share = share_of_peak(rate, flops_per_token(model), torch.cuda.get_device_name())
    return {"ok": None, "tokens/s": rate, "share of peak": share}


def flops_per_token(model: list) -> float:
    """Products of a forward pass for the sentences that are trained on; looking up embeddings is none."""
    from smoe_fairseq.analysis.cost import build_meta_model, count, parse_model

    flops = count(build_meta_model(parse_model(list(map(str, model))), VOCABULARY), LONGEST).flops
    return sum(number for part, number in flops.items() if part != "embedding")


def decode(context: Context) -> Iterator[dict]:
    """Beam 5, every sentence to the same length, because the model is hardly trained."""
    runs = Runs(context)
    sizes = [] if context.tiny else ["--arch", "smoe_transformer_base"]
    for name, flags in MODELS.items():

        def decoded(name=name, flags=flags):
            runs.train(name, *sizes, *flags, "--max-update", 1, tiny=context.tiny)
            text = runs.generate(name, "--min-len", 20, "--batch-size", 64)
            return {"ok": None, "tokens/s": float(re.search(r"([\d.]+) tokens/s\)", text)[1])}

        yield attempt(name, decoded)
