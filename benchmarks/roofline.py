"""What a GPU would need, counted without one: python -m benchmarks.roofline [--json FILE]

Every operation of a pass runs on tensors without data, and needs the larger of its FLOPs over the device's
rate, its bytes over its bandwidth and the time of the smallest kernel; the host needs a time for each.
A pass takes what the slower of both needs. The floor is the block's bare grouped products, with one pass
over the hidden rows for ReLU and one for its gradient. Tokens choose among the experts that they see
evenly. It is a forecast: what was measured is in benchmarks/results/gpu.

Shapes: T tokens, D embedding, F feed-forward, E experts, N rows of copies.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smoe_fairseq.modules import Strata, StratifiedMoE


@dataclass(frozen=True)
class Device:
    """Rates of products and of memory, and seconds of the smallest kernel and of the host for each."""

    name: str
    flops: float
    bytes: float
    kernel: float
    host: float


# Products and bandwidth as torch's kernels reached them, and the host's time for an operation, in
# benchmarks/results/gpu/h200.md.
H200 = Device("NVIDIA H200", 620e12, 3.4e12, 3e-6, 26e-6)
# What launches no kernel: views, and memory that nothing writes.
FREE = (
    *("view", "t.", "transpose", "expand", "slice", "select", "split", "unsqueeze", "squeeze"),
    *("detach", "alias", "permute", "unbind", "as_strided", "_unsafe_view", "_reshape_alias"),
    *(
        "empty",
        "new_empty",
        "lift_fresh",
        "chunk",
        "narrow",
        "profiler",
        "bernoulli_",
        "div_.Scalar",
    ),
)  # fmt: skip  (the last two: a CPU's dropout, which on a GPU is one kernel, counted as its product)
GATHERS = ("index_select", "embedding.", "gather")
PER_LAUNCH = 60  # tensors of a foreach operation


@dataclass
class Total:
    kernels: int = 0
    seconds: float = 0.0
    by_name: Counter = field(default_factory=Counter)

    def add(self, name: str, flops: float, nbytes: float, device: Device, kernels: int = 1) -> None:
        seconds = max(flops / device.flops, nbytes / device.bytes, kernels * device.kernel)
        self.kernels += kernels
        self.seconds += seconds
        self.by_name[name] += seconds

    def host(self, device: Device) -> float:
        return self.kernels * device.host

    def slower(self, device: Device) -> float:
        return max(self.seconds, self.host(device))


class Count(TorchDispatchMode):
    """Adds up the operations run under it.

    Args:
        shares: by stratum, the share of the rows of a grouped product that are there.
    """

    def __init__(self, device: Device, shares: list[float]):
        super().__init__()
        self.device, self.shares, self.total = device, shares, Total()
        self.ends: list[torch.Tensor] = []  # of the strata, in their order, block after block

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.")
        if not name.startswith(FREE):
            tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
            results = [t for t in tree_leaves(out) if torch.is_tensor(t)]
            self._add(name.split(".default")[0], tensors, results)
        return out

    def _add(self, name: str, tensors: list, results: list) -> None:
        flops, nbytes, kernels = 0.0, size(tensors) + size(results), 1
        if name.startswith(GATHERS):
            nbytes = 2 * size(results)
        if name.startswith("_foreach"):
            kernels = -(-len(tensors) // PER_LAUNCH)
            nbytes = size(tensors)
        if name.startswith(("mm", "addmm", "bmm", "baddbmm")):
            a, b = [t for t in tensors if t.dim() >= 2][-2:]
            flops = 2 * a.numel() * b.shape[-1]
        if "grouped_mm" in name:
            flops, nbytes = self._grouped(tensors, results[0])
        self.total.add(name, flops, nbytes, self.device, kernels)

    def _grouped(self, tensors: list, out) -> tuple[float, float]:
        """Only rows up to the last end are computed; the output is allocated in full."""
        a, b = tensors[:2]
        share = self.share(tensors[-1])
        per_row = [a, out] if b.dim() == 3 else [a, b]
        others = [b] if b.dim() == 3 else [out]
        return 2 * share * a.numel() * b.shape[-1], share * size(per_row) + size(others)

    def share(self, ends: torch.Tensor) -> float:
        """Of the stratum whose ends these are; a saved tensor is another object with the same storage."""
        keys = [place_of(each) for each in self.ends]
        key = place_of(ends)
        if key not in keys:
            self.ends.append(ends)
            keys.append(key)
        return self.shares[keys.index(key) % len(self.shares)]


def place_of(tensor: torch.Tensor) -> tuple:
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def size(tensors: list) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def shares_of(strata: Strata) -> list[float]:
    """The share of the tokens that stops at each stratum, under even choices."""
    here = [1.0] + [0.0] * (len(strata) - 1)
    for i in range(len(strata)):
        for j in range(i, len(strata) - 1):
            here[j + 1] += here[i] * strata.own[j] / strata.visible[i]
    return here


@dataclass(frozen=True)
class Case:
    strata: str
    tokens: int
    embed_dim: int

    @property
    def ffn_embed_dim(self) -> int:
        return 4 * self.embed_dim

    @property
    def shares(self) -> list[float]:
        return shares_of(Strata.parse(self.strata))


CASES = tuple(
    [Case(strata, 16384, 512) for strata in ("8", "4-4", "2-2-2-2")]
    + [Case(strata, 8192, 1024) for strata in ("16", "4-12")]
)
DECODING = 40  # rows: 8 sentences with beam 5
EXECUTIONS = ("grouped", "fused")
MODELS = {
    "dense": ["--moe-freq", "0"],
    "moe-8": ["--smoe-strata", "8"],
    "4-4": ["--smoe-strata", "4-4"],
}
VOCABULARY, SENTENCES, LENGTH = 8000, 512, 32  # 16,384 source and target tokens


def floor(case: Case, device: Device) -> float:
    """Seconds of the six grouped products, and of a pass over the hidden rows for ReLU and its gradient."""
    d, f, total = case.embed_dim, case.ffn_embed_dim, Total()
    experts = Strata.parse(case.strata).num_experts
    for share in case.shares:
        rows = 2 * share * case.tokens
        for _ in range(6):
            nbytes = 2 * (rows * (d + f) + experts * d * f)
            total.add("product", 2 * rows * d * f, nbytes, device)
        for rows_touched in (2 * rows, 3 * rows):
            total.add("relu", 0.0, 2 * rows_touched * f, device)
    return total.seconds


def counted(device: Device, shares: list[float], call: Callable[[], object]) -> Total:
    with Count(device, shares) as count, ExitStack() as stack:
        attention = partial(Attention.apply, count.total, device)

        def fused(q, k, v, attn_mask=None, dropout_p=0.0):
            return attention(q, k, v, attn_mask)

        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", fused))
        for patch in _launcher(count):
            stack.enter_context(patch)
        call()
    return count.total


class Attention(torch.autograd.Function):
    """Torch's fused attention, which is not there for tensors without data."""

    @staticmethod
    def forward(ctx, total: Total, device: Device, q, k, v, mask):
        ctx.save_for_backward(q, k, v)
        ctx.total, ctx.device = total, device
        ctx.flops, masks = 4 * q.numel() * k.shape[-2], [] if mask is None else [mask]
        total.add("attention", ctx.flops, size([q, k, v, q, *masks]), device)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        nbytes = size([q, k, v, q, grad, q, k, v])
        ctx.total.add("attention backward", 2.5 * ctx.flops, nbytes, ctx.device, kernels=2)
        return None, None, *map(torch.empty_like, (q, k, v)), None


def _launcher(count: Count) -> list:
    """Patches by which the kernels of modules/kernels.py are counted and not launched."""
    try:
        from smoe_fairseq.modules import fused
    except ImportError:
        return []

    def launch(self, kernel, grid, arguments, constants, **options):
        names = parameters[kernel]
        stratum = dict(zip(names, arguments)).get("stratum")
        share = 1.0 if stratum is None else count.shares[stratum]
        touched = {id(t): size([t]) for t in arguments if torch.is_tensor(t)}
        for t in arguments:
            if torch.is_tensor(t) and t.dim() == 3 and t.shape[0] == len(count.shares) - 1 > 0:
                touched[id(t)] /= t.shape[0]  # the residual of all strata, of which one is touched
        passes = 2 if kernel == "activate" else 1  # in place
        count.total.add(kernel, 0.0, passes * share * sum(touched.values()), count.device)

    files = Path(fused.__file__).parent.glob("kernels/*.py")
    nodes = [node for file in files for node in ast.parse(file.read_text("utf-8")).body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    parameters = {each.name: [a.arg for a in each.args.args] for each in functions}

    class Names:
        def __getattr__(self, name):
            return (lambda: True) if name == "is_interpreted" else name

    return [
        mock.patch.object(fused, "kernels", lambda: Names()),
        mock.patch.object(fused.Launcher, "__call__", launch),
        mock.patch.object(fused.Launcher, "__init__", lambda self, *tensors: None),
    ]


def block(case: Case, execution: str, device: Device, train: bool = True) -> Total:
    """Forward and backward, or one step of decoding, in bf16."""
    with torch.device("meta"):
        made = StratifiedMoE(
            case.embed_dim,
            case.ffn_embed_dim,
            case.strata,
            execution=execution,
            second_expert_policy="all",
        )
        made = made.to(torch.bfloat16).train(train)
        x = torch.empty(case.tokens, case.embed_dim, dtype=torch.bfloat16, requires_grad=train)

    def call() -> None:
        if not train:
            with torch.no_grad():
                made(x, with_stats=False)
            return
        y, stats = made(x)
        loss = stats.balance_loss
        torch.autograd.backward([y, loss], [torch.empty_like(y), torch.empty_like(loss)])

    return counted(device, case.shares, call)


def update(name: str, execution: str, device: Device) -> Total:
    """A whole update of smoe_transformer_base in bf16, with the optimizer's steps in float32."""
    import smoe_fairseq.models  # noqa: F401
    from smoe_fairseq.analysis.cost import build_meta_model, parse_model
    from smoe_fairseq.criterions import SMoELabelSmoothedCrossEntropyCriterion

    words = ["--arch", "smoe_transformer_base", *MODELS[name]]
    model = build_meta_model(parse_model(words), VOCABULARY)
    model = model.to("meta", torch.bfloat16).train()
    for module in model.modules():
        if isinstance(module, StratifiedMoE):
            module.execution = execution
    padding = model.decoder.padding_idx
    task = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: padding))
    criterion = SMoELabelSmoothedCrossEntropyCriterion(task, False, 0.1).train()
    with torch.device("meta"):
        tokens = torch.empty(SENTENCES, LENGTH, dtype=torch.long)
    inputs = {"src_tokens": tokens, "src_lengths": None, "prev_output_tokens": tokens}
    sample = {"net_input": inputs, "target": tokens, "ntokens": SENTENCES * LENGTH}
    parameters = [p for p in model.parameters() if p.requires_grad]
    copies = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    for p in copies:
        p.grad = torch.empty_like(p)

    def call() -> None:
        loss, *_ = criterion(model, sample)
        loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        torch._foreach_copy_([p.grad for p in copies], gradients)
        torch._foreach_norm([p.grad for p in copies], 2)
        torch._foreach_mul_([p.grad for p in copies], 0.5)
        torch._foreach_copy_([p.data for p in parameters], [p.data for p in copies])

    strata = MODELS[name][1] if name != "dense" else "1"
    total = counted(device, shares_of(Strata.parse(strata)), call)
    # The fused kernel of training/foreach.py reads four numbers of each parameter and writes three.
    launches = -(-len(copies) // PER_LAUNCH)
    total.add("adam", 0.0, 28 * sum(p.numel() for p in copies), device, launches)
    return total


def executions() -> list[str]:
    from smoe_fairseq.modules.experts import EXECUTIONS as KNOWN

    return [name for name in EXECUTIONS if name in KNOWN]


def tables(device: Device) -> dict[str, list[dict]]:
    """Rows of three tables: the block in training, a step of decoding, updates."""
    found: dict[str, list[dict]] = {"training": [], "decoding": [], "updates": []}
    for case in CASES:
        row = {"strata": case.strata, "tokens": case.tokens, "D": case.embed_dim}
        lowest = floor(case, device)
        for way in executions():
            total = block(case, way, device)
            row |= {f"{way}, ms": 1000 * total.seconds, f"{way} / floor": total.seconds / lowest}
            row |= {f"{way}, kernels": total.kernels, f"{way}, host ms": 1000 * total.host(device)}
        found["training"].append(row)
    for strata in ("8", "4-4", "2-2-2-2"):
        row = {"strata": strata, "rows": DECODING, "D": 512}
        for way in executions():
            total = block(Case(strata, DECODING, 512), way, device, train=False)
            row |= {f"{way}, kernels": total.kernels, f"{way}, ms": 1000 * total.slower(device)}
        found["decoding"].append(row)
    for way in executions():
        for name in MODELS if way == "grouped" else list(MODELS)[1:]:
            total = update(name, way, device)
            row = {"model": name, "execution": way if name != "dense" else "-"}
            row |= {"kernels": total.kernels, "device ms": 1000 * total.seconds}
            row |= {"host ms": 1000 * total.host(device), "ms": 1000 * total.slower(device)}
            first = found["updates"][0] if found["updates"] else row
            row |= {"device / dense": row["device ms"] / first["device ms"]}
            found["updates"].append(row | {"kernels / dense": row["kernels"] / first["kernels"]})
    return found


def markdown(rows: list[dict]) -> str:
    def cell(value) -> str:
        if isinstance(value, float):
            return f"{value:.2f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(cell, row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the tables here, too")
    parser.add_argument("--top", action="store_true", help="largest operations of each update")
    args = parser.parse_args()
    found = tables(H200)
    print(f"Forecast for {H200.name}, by count\n")
    for name, rows in found.items():
        print(f"{name}:\n\n{markdown(rows)}\n")
    if args.top:
        for name in MODELS:
            total = update(name, "grouped", H200)
            for operation, seconds in total.by_name.most_common(15):
                print(f"{name}: {operation} {1e6 * seconds:.0f} µs")
    if args.json:
        args.json.write_text(json.dumps({"device": vars(H200), **found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
