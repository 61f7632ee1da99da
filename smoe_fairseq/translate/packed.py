"""Weights of a loaded model in oneDNN's packed layout, for inference on a CPU.

A decoding step multiplies few rows by large matrices. There oneDNN's product with packed weights takes 0.3
to 0.8 times the time of `torch.nn.functional.linear`, and the result of a row does not depend on the number
of rows. int8.py has the same for int8.

Shapes: N rows, I inputs, O outputs, E experts.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from smoe_fairseq.host_memory import reserve_huge_pages
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.experts import Experts
from smoe_fairseq.modules.per_expert import PerExpert, Weights
from smoe_fairseq.modules.rows import Copies
from smoe_fairseq.translate.fastest import fastest

# With fewer weights, the overhead of oneDNN or of int8 is larger than the gain.
MIN_WEIGHTS = 1 << 17


class PackedLinear(nn.Module):
    """``y = W x + b`` with ``W (O, I)`` in float32 and in oneDNN's layout, for evaluation."""

    LEAST_ROWS = 2  # Of a single row and 2,048 inputs or more, sums have another order with AVX512.

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous())
        self.bias_O = None if bias_O is None else bias_O.detach()

    def forward(self, x: Tensor) -> Tensor:
        number = x.shape[:-1].numel()
        if number >= self.LEAST_ROWS:
            return self.product(x)
        # Else a translation would depend on its batch.
        x_NI = F.pad(x.reshape(number, x.shape[-1]), (0, 0, 0, self.LEAST_ROWS - number))
        y_NO = self.product(x_NI)[:number]
        return y_NO.view(*x.shape[:-1], y_NO.shape[1])

    def product(self, x: Tensor) -> Tensor:
        """The outputs of at least `LEAST_ROWS` rows."""
        return torch.ops.mkldnn._linear_pointwise.default(
            x, self.packed, self.bias_O, "none", [], ""
        )

    @staticmethod
    def prepare(x_NI: Tensor) -> tuple[Tensor, ...]:
        """The arguments of `apply_rows`, which all linear layers with this input share."""
        return (x_NI,)

    def apply_rows(self, x_NI: Tensor, start: int, end: int) -> Tensor:
        """The outputs ``(end - start, O)`` of some rows."""
        return self(x_NI[start:end])


class PlainLinear(PackedLinear):
    """The same by `torch.nn.functional.linear`."""

    LEAST_ROWS = 16  # With fewer, MKL's sums have another order: up to 3 on an AMD EPYC, 15 on an Intel Xeon.

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None):
        nn.Module.__init__(self)
        self.weight_OI = weight_OI.detach()
        self.bias_O = None if bias_O is None else bias_O.detach()

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_OI, self.bias_O)


def fastest_linear(weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
    """A `PackedLinear`, or a `PlainLinear` where that is much faster."""
    kinds = {"onednn": PackedLinear, "plain": PlainLinear}
    return kinds[fastest(kinds, weight_OI)](weight_OI, bias_O)


@functools.cache
def can_pack() -> bool:
    """Whether this torch has oneDNN's packed product for this CPU."""
    try:
        y = PackedLinear(torch.ones(16, 64), torch.ones(16))(torch.ones(2, 64))
    except (AttributeError, RuntimeError):
        return False
    return bool((y == 65).all())


class PackedExperts(PerExpert):
    """An execution of experts by two linear layers for each, in place of their stacked weights."""

    def __init__(self, layers: list[list[nn.Module]], experts: Experts):
        super().__init__(experts)
        self.layers = layers

    def __call__(self, x_TD: Tensor, copies: Copies, weights: Weights) -> tuple[Tensor, Weights]:
        copy_N, sizes = self.sort_by_expert(copies)
        weight_N1 = copies.weight_TK.flatten()[copy_N].unsqueeze(1)
        token_N, sizes = copy_N // copies.weight_TK.shape[1], [0] * copies.own.start + sizes
        return self.infer(x_TD.float(), token_N, weight_N1, sizes, weights), weights

    def by_expert(
        self, x_ND: Tensor, sizes: list[int], weights: Weights
    ) -> Iterator[tuple[int, Tensor]]:
        first, second = self.layers
        rows, activation_fn = first[0].prepare(x_ND), self.experts.activation_fn
        end = 0
        for e, size in enumerate(sizes):
            start, end = end, end + size
            if size:
                yield e, second[e](activation_fn(first[e].apply_rows(*rows, start, end)))


def concatenate(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Weight and bias of one linear layer with the concatenated outputs of several."""
    weight, bias = (torch.cat([getattr(each, n) for each in layers]) for n in ("weight", "bias"))
    return weight, bias


@torch.no_grad()
def pack(model: nn.Module, linear: Callable = fastest_linear) -> None:
    """Pack large weights of a `SMoETransformerModel`, which can no longer be trained or saved.

    These are linear layers, experts and the output projection, from `MIN_WEIGHTS` on. A second call
    changes nothing. A model of another type than float32 stays as it is, unless it is for int8.

    Args:
        linear: creates the layer from a weight and a bias.

    Raises:
        ValueError: the model has been packed by another ``linear``.
    """
    if (before := getattr(model, "packed_by", linear)) is not linear:
        raise ValueError(f"the model has {before.__name__}: load it again for {linear.__name__}")
    if linear is fastest_linear and any(p.dtype != torch.float32 for p in model.parameters()):
        return
    model.packed_by = linear
    if linear is fastest_linear:  # int8 is not faster with them
        reserve_huge_pages(4 * sum(p.numel() for p in model.parameters()))
    for attention in (each for each in model.modules() if isinstance(each, MultiheadAttention)):
        # Else fairseq would pass the weights to torch's attention instead of calling the projections.
        attention.skip_embed_dim_check = True
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if not attention.self_attention or not all(type(p) is nn.Linear for p in projections):
            continue
        if 3 * attention.q_proj.weight.numel() >= MIN_WEIGHTS:
            attention.qkv = linear(*concatenate(projections))  # for a step of the search
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child.weight.numel() >= MIN_WEIGHTS:
                setattr(parent, name, linear(child.weight, child.bias))
    for block in [each for each in model.modules() if isinstance(each, StratifiedMoE)]:
        experts = block.experts
        if experts.w1.numel() and experts.w1[0].numel() >= MIN_WEIGHTS:
            pairs = ((experts.w1, experts.b1), (experts.w2, experts.b2))
            layers = [[linear(*each) for each in zip(*pair, strict=True)] for pair in pairs]
            block.execution = partial(PackedExperts, layers)
            for name, parameter in experts.named_parameters():
                setattr(experts, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))
