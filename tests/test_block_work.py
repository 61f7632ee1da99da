"""What makes the block fast, counted instead of timed: products, copies, memory, waits for the device."""

from collections import Counter

import pytest
import torch
from sampling import soak
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import saved_bytes
from smoe_fairseq.modules import StratifiedMoE, products, torch_features

T, D, F, K = 96, 16, 64, 2
STRATA = ["8", "4-4", "2-2-2-2"]
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
needs_grouped_mm = pytest.mark.skipif(
    not torch_features.grouped_mm, reason="needs a torch with grouped products on a CPU"
)


def make_block(strata="4-4", **options):
    torch.manual_seed(3)
    options = {"capacity_factor": 0, "second_expert_policy": "all"} | options
    return StratifiedMoE(D, F, strata, **options).train()


def address(value) -> int | None:
    """Of a tensor's memory, which views share."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


class Operations(TorchDispatchMode):
    """Records each operation and the sizes of the tensors that it makes."""

    def __init__(self):
        super().__init__()
        self.made = []  # (name, elements of the new tensor, 0 where there is none)
        self.called = Counter()  # by name
        self.kept = {}  # memory of the results by its address, so that none is given twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        known = {None, *map(address, args), *map(address, (kwargs or {}).values())}
        new = [t for t in results if address(t) not in known and address(t) not in self.kept]
        name = function.overloadpacket.__name__
        self.called[name] += 1
        self.made += [(name, t.numel()) for t in new] or [(name, 0)]
        self.kept |= {address(t): t.untyped_storage() for t in new}
        return result

    def calls(self, names) -> int:
        return sum(name in names for name, _ in self.made)

    def as_large_as(self, elements: int) -> Counter:
        return Counter(name for name, size in self.made if size >= elements)


def run_block(block, x):
    """(operations of the forward pass, of the backward pass, copies routed at each stratum)"""
    with Operations() as forward:
        y, stats = block(x)
    with Operations() as backward:
        y.backward(torch.ones_like(y))
    return forward, backward, (stats.chosen - stats.dropped).sum(1).tolist()


@needs_grouped_mm
@pytest.mark.parametrize("strata", STRATA)
def test_grouped_products_per_stratum(strata):
    """Two in the forward pass of a stratum, and four backwards."""
    block = make_block(strata, execution="grouped")
    forward, backward, _ = run_block(block, torch.randn(T, D, requires_grad=True))
    assert forward.calls({"_grouped_mm"}) == 2 * len(block.strata)
    assert backward.calls({"_grouped_mm"}) == 4 * len(block.strata)


@pytest.mark.parametrize("strata", STRATA)
def test_products_on_cpu(strata):
    """Two for each touched expert and one for the gate; backwards twice as many, and two for biases."""
    block, touched = make_block(strata), []
    for gate in block.gates:
        gate.register_forward_hook(lambda _, inputs, routing: touched.extend(routing.kept_E > 0))
    forward, backward, _ = run_block(block, torch.randn(T, D, requires_grad=True))
    touched, gates = int(sum(touched)), len(block.strata)
    assert forward.calls(PRODUCTS) == 2 * touched + gates
    # The gates get no gradient of their inputs' products beyond the usual two.
    in_place = backward.calls({"addmm_"})
    assert backward.calls(PRODUCTS) + in_place == 6 * touched + 2 * gates
    assert touched < gates * 8 or strata == "8"


@pytest.mark.parametrize("strata", STRATA)
def test_weights_get_one_gradient_each_and_no_copies_of_it(strata):
    """Per weight one tensor of its size, however many strata use it."""
    block = make_block(strata)
    _, backward, _ = run_block(block, torch.randn(T, D, requires_grad=True))
    large = backward.as_large_as(block.experts.w1.numel())
    assert sum(large.values()) == 2, large


@pytest.mark.parametrize("strata", STRATA)
def test_token_sized_tensors(strata, execution):
    """A stratum makes few tensors as large as its routed copies, and none of size T x E x C."""
    block = make_block(strata, execution=execution)
    if execution == "grouped" and not products.can_group(block.experts.w1, torch.float32):
        pytest.skip("this torch has no grouped product")
    forward, backward, routed = run_block(block, torch.randn(T, D, requires_grad=True))
    largest = max(size for operations in (forward, backward) for _, size in operations.made)
    assert largest <= max((T * K + 1) * F, block.experts.w1.numel())
    if strata == "8":  # all is of one size in one stratum: copies ...
        made = forward.as_large_as(T * K * D)
        hidden = forward.as_large_as(T * K * F)
        # gathered, and second product (with static shapes of all experts); else each expert has its own
        assert sum((made - hidden).values()) <= (2 if execution == "grouped" else 0), made
        # first product: bias, padding rows and activation in place
        assert sum(hidden.values()) <= (1 if execution == "grouped" else 0), hidden
        # padding rows are cleared once in each direction, beside experts without rows (both weights)
        cleared = forward.called["masked_fill_"], backward.called["masked_fill_"]
        assert cleared == ((1, 1 + 2) if execution == "grouped" else (0, 0))


@pytest.mark.parametrize("strata", STRATA)
def test_memory_kept_for_the_backward_pass(strata):
    """At the base model's proportions, at most a tenth more than the bare products keep."""
    torch.manual_seed(0)
    dim, width, tokens = 128, 512, 2048
    block = StratifiedMoE(dim, width, strata, capacity_factor=0, second_expert_policy="all")
    x = torch.randn(tokens, dim, requires_grad=True)
    ours = saved_bytes(lambda: block(x), block.parameters())
    _, stats = block(x)
    rows = int((stats.chosen - stats.dropped).sum())
    floor = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, dim))
    inputs = torch.randn(rows, dim)
    bare = saved_bytes(lambda: floor(inputs), floor.parameters())
    assert bare == rows * (dim + width) * 4
    assert ours <= 1.1 * bare


@needs_grouped_mm
@pytest.mark.parametrize("gate", ["threshold", "expert-choice", "relu", "top-p"])
def test_memory_of_gates_that_may_choose_all_experts(gate):
    """Grouped products keep rows for the copies, not for all of 32 experts."""
    torch.manual_seed(0)
    options = {} if gate == "expert-choice" else {"gate_init_scale": 4.0}
    block, x = StratifiedMoE(64, 256, "32", gate=gate, **options), torch.randn(256, 64)
    if gate == "relu":  # a few experts of each token
        block.layer_norms[0].bias.data.fill_(-1)
        block.gates[0].weight.data.abs_()
    if gate == "threshold":
        block.gates[0].threshold.steps.fill_(2 << 16)
    kept = {}
    for block.execution in ("per-expert", "grouped"):
        kept[block.execution] = saved_bytes(lambda: block(x.requires_grad_()), block.parameters())
    assert kept["grouped"] <= 1.3 * kept["per-expert"], kept
    _, stats = block(x)
    assert int((stats.chosen - stats.dropped).sum()) < x.shape[0] * 32 / 4


@pytest.mark.soak
@needs_grouped_mm
@pytest.mark.parametrize("dynamic", [None, soak(True)])
def test_compiles_for_batches_of_any_length(dynamic):
    """As in training by default: each expert has a capacity. The second graph is for all other lengths."""
    block = make_block("4-4", capacity_factor=2.0)
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(block, fullgraph=not dynamic, backend=graphs, dynamic=dynamic)
    for tokens in (T, T - 2, T + 7, T + 1):
        x = torch.randn(tokens, D)
        (y, _), (expected, _) = compiled(x), block(x)
        torch.testing.assert_close(y, expected)
    assert dynamic or graphs.frame_count == 2
    with pytest.raises(RuntimeError, match=r"torch\.export"), torch.no_grad():
        torch.jit.trace(block.eval(), (x,))
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(RuntimeError, match="StratifiedMoE"):
            transform(lambda x: block(x)[0].sum())(x)


@pytest.mark.soak
@needs_grouped_mm
def test_an_exported_block_takes_batches_of_any_size():
    block = make_block("2-2").eval()
    batch, length = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "length"))

    def inputs(*shape):
        return torch.randn(*shape, D), torch.rand(*shape) < 0.2

    sizes = {name: {0: batch, 1: length} for name in ("x", "padding_mask")}
    program = torch.export.export(block, inputs(3, 5), dynamic_shapes=sizes).module()
    for shape in ((3, 5), (7, 9), (2, 64)):
        x, mask = inputs(*shape)
        torch.testing.assert_close(program(x, mask)[0], block(x, mask)[0])


@needs_grouped_mm
@pytest.mark.parametrize(
    "strata, dtype, tolerance",
    [
        soak("8", torch.float32, 1e-6),
        soak("4-4", torch.float32, 1e-6),
        soak("2-2-2-2", torch.bfloat16, 0.02),
    ],
)
def test_compiles_without_graph_breaks(strata, dtype, tolerance, monkeypatch):
    """The gradient is ours, in which that of experts without rows is 0, whatever the kernel leaves there.

    Traced, the backward pass multiplies by the weights of copies at another point, and rounds there.
    ``tolerance`` is a share of a tensor's largest number: gradients can be small sums of large numbers.
    """
    calls = []
    kind, outer = products.TorchProducts, products.TorchProducts.outer
    monkeypatch.setattr(kind, "outer", lambda *args: calls.append(1) or outer(*args))
    block = make_block(strata).to(dtype)
    block.execution = "grouped"  # which tracing asks for by itself
    x = torch.randn(T, D, dtype=dtype)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for function in (block, compiled):
        calls.clear()
        inputs = x.clone().requires_grad_()
        y, stats = function(inputs)
        block.zero_grad()
        (y.square().sum() + stats.balance_loss).backward()
        results.append([y, inputs.grad, *(p.grad.clone() for p in block.parameters())])
    for ours, theirs in zip(*results, strict=True):
        largest = float(ours.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * largest)
    assert len(calls) >= 2 * len(block.strata)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strata", STRATA)
def test_training_never_waits_for_the_device(strata, dtype):
    block = make_block(strata).to("cuda", dtype)
    block.experts.activation_dropout = block.layer_norms.dropout = 0.1
    x = torch.randn(T, D, device="cuda", dtype=dtype, requires_grad=True)
    padding_mask = torch.zeros(T, dtype=torch.bool, device="cuda")
    for mode in ("default", "error"):  # the first pass warms up
        torch.cuda.set_sync_debug_mode(mode)
        try:
            y, stats = block(x, padding_mask)
            (y.float().square().sum() + stats.balance_loss).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
