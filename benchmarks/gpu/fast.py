"""Speed and memory of the block, and of other packages' layers.

Shapes: T tokens, D embedding, F feed-forward, E experts, N rows.
"""

import importlib.util
import itertools
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.gpu.parts import Context
from benchmarks.gpu.training import attempt, attempt_fast
from benchmarks.layers import Case, Ours, block_step, make_block, routed_tokens
from benchmarks.peers import PEERS, Peer, agreement
from benchmarks.timing import cuda_peak, in_turns, ratio
from smoe_fairseq.modules import fused, torch_features
from smoe_fairseq.modules.experts import EXECUTIONS
from smoe_fairseq.modules.products import TritonProducts, tile_of, torch_has_one

STRATA = (1, 2, 4)
# Events of the profiler in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class GroupedProducts:
    """torch's grouped products on as many random rows as are routed; nothing else is done."""

    def __init__(self, d: int, counts_LE: list[list[int]], device: torch.device, dtype):
        f, experts = 4 * d, len(counts_LE[0])
        self.w1 = nn.Parameter(torch.randn(experts, d, f, device=device, dtype=dtype) / d**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, f, d, device=device, dtype=dtype) / f**0.5)
        self.ends = [torch.tensor(c, device=device).cumsum(0).to(torch.int32) for c in counts_LE]
        self.rows = [
            torch.randn(sum(c), d, device=device, dtype=dtype, requires_grad=True)
            for c in counts_LE
        ]

    def step(self) -> list[Tensor]:
        """Forward and backward."""
        product, outputs = torch_features.grouped_mm, []
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
        yield Case(notation, tokens, width)


def block(context: Context) -> Iterator[dict]:
    """bf16, forward and backward, each execution; ``ratio`` is of the fastest over the bare products, by
    torch's kernel where it is one, else by ours; there is none without either.
    """
    device = torch.device(context.device)
    for case in cases(context):
        name = f"{case.strata}, {case.tokens} tokens, D {case.embed_dim}"
        yield attempt_fast(name, lambda c=case: measure(c, device, context.tiny))


def executions(device: torch.device) -> list[str]:
    """Those that are compared on a device; Triton's kernels need a GPU."""
    ways = [way for way in EXECUTIONS if way != "auto"]
    return [way for way in ways if not way.startswith("fused") or device.type == "cuda"]


def fits(block: nn.Module, way: str, x: Tensor) -> bool:
    """Whether a block computes ``x`` in the execution ``way``, and not in the general one in its place."""
    block.execution = way
    return not way.startswith("fused") or fused.applies(block, x)


def measure(case: Case, device: torch.device, tiny: bool) -> dict:
    torch.manual_seed(1)
    made = make_block(case, device, torch.bfloat16)
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=torch.bfloat16)
    counts_LE = routed_tokens(made, x_TD)
    one = torch_has_one(made.experts.w1, torch.bfloat16)
    kind = GroupedProducts if one else OurProducts if tile_of(device, torch.bfloat16) else None
    floor = kind and kind(case.embed_dim, counts_LE, device, torch.bfloat16)
    ways = [way for way in executions(device) if fits(made, way, x_TD)]
    steps = {way: block_step(Ours(made, way), x_TD, True) for way in ways}
    contenders = {**steps, "products": floor.step} if floor else steps
    times = in_turns(contenders, device, 0.1 if tiny else 1.5)
    ms = {name: 1000 * statistics.median(of) for name, of in times.items()}
    best = min(steps, key=ms.get)
    found = {
        "tokens": case.tokens,
        "fastest": best,
        **({"ratio": ratio(times, best, "products")["median"]} if floor else {}),
        "host waits": {way: host_waits(step) for way, step in steps.items()},
        "ms": ms,
    }
    if device.type == "cuda":
        found["peak MiB"] = {name: peak(step, device) for name, step in contenders.items()}
    return {"ok": None, **found}


class OurProducts(GroupedProducts):
    """The same products by our kernels, on weights ``(E, D, F)`` and ``(E, F, D)``."""

    def step(self) -> list[Tensor]:
        ours, gradients = TritonProducts(tile_of(self.w1.device, self.w1.dtype)), []
        for x_ND, ends_E in zip(self.rows, self.ends, strict=True):
            h_NF = ours.multiply(x_ND, self.w1, ends_E, back=True).relu_()
            y_ND = ours.multiply(h_NF, self.w2, ends_E, back=True).fill_(1)
            h_grad_NF = ours.multiply(y_ND, self.w2, ends_E) * (h_NF > 0)
            gradients += [ours.outer(h_NF, y_ND, ends_E), ours.outer(x_ND, h_grad_NF, ends_E)]
            gradients.append(ours.multiply(h_grad_NF, self.w1, ends_E))
        return gradients


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


def peak(step, device: torch.device) -> float:
    """MiB that one step allocates at most; its gradients count, parameters and inputs do not."""
    getattr(step, "clear_gradients", lambda: None)()
    return cuda_peak(step, device) / 2**20


def installed() -> dict[str, type[Peer]]:
    """By the name of the package, whether it works here or not."""
    modules = {"st-moe-pytorch": "st_moe_pytorch"}
    return {n: p for n, p in PEERS.items() if importlib.util.find_spec(modules.get(n, n))}


def peers(context: Context) -> Iterator[dict]:
    """Forward and backward of each installed peer, top-2 of 8 experts, compared with our block.

    In bf16; in a rehearsal on the CPU in fp32, in which all of them run. ``ratio`` is the peer's time
    over ours. A peer that fails is no failure of ours.
    """
    found = installed()
    for name in sorted(PEERS.keys() - found.keys()):
        yield {"case": f"{name}: not installed", "ok": None}
    for tokens, width in [(64, 16)] if context.tiny else [(16384, 512), (16384, 1024)]:
        case = Case("8", tokens, width)
        for name, peer in found.items():
            compared = partial(compare_peer, peer, case, context)
            yield attempt(f"{name}, {tokens} tokens, D {width}", compared) | {"ok": None}


def compare_peer(kind: type[Peer], case: Case, context: Context) -> dict:
    """Compares a peer's outputs with those of our block, and times both in turns."""
    torch.manual_seed(1)
    device = torch.device(context.device)
    block = make_block(case, torch.device("cpu"), torch.float32)
    peer = kind(block)
    dtype = torch.float32 if context.tiny else torch.bfloat16
    block, peer = (module.to(device, dtype) for module in (block, peer))
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=dtype)
    block.eval(), peer.eval()
    same = {"same tokens": agreement(block, peer, x_TD)["same_tokens"]}
    block.train(), peer.train()
    steps = {"ours": block_step(Ours(block), x_TD, True), "peer": block_step(peer, x_TD, True)}
    times = in_turns(steps, device, 0.1 if context.tiny else 1.0)
    ms = {name: 1000 * statistics.median(of) for name, of in times.items()}
    over = ratio(times, "peer", "ours")["median"]
    return {"ms": ms["peer"], "our ms": ms["ours"], "ratio": over, **same}
