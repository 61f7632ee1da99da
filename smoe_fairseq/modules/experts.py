"""The experts of a block: their weights, and the choice of how to compute them.

Shapes: D embedding, F feed-forward, E experts of this rank.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from smoe_fairseq.modules.activation import Activation, Hidden, activation, hidden_width
from smoe_fairseq.modules.grouped import Grouped
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.modules.per_expert import PerExpert, Weights
from smoe_fairseq.modules.products import products_of, torch_has_one, why_not_triton
from smoe_fairseq.modules.torch_features import autocast_dtype


class Experts(nn.Module):
    """Parameters of ``FFN_e(x) = w2_e activation(w1_e x + b1_e) + b2_e`` for E experts (paper, eq. 1).

    With a gated activation, w1 is ``(E, 2 F, D)``. They are initialised as in ``nn.Linear``.
    `PerExpert` and `Grouped` compute with them.
    """

    def __init__(
        self,
        placement: Placement,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: Activation = "relu",
        activation_dropout: float = 0.0,
        output_init_scale: float = 1.0,
    ):
        super().__init__()
        self.placement = placement
        num_experts = placement.num_local
        hidden = hidden_width(activation_fn, ffn_embed_dim)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, embed_dim))
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden))
        self.w2 = nn.Parameter(torch.empty(num_experts, embed_dim, ffn_embed_dim))
        self.b2 = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.activation_fn = activation(activation_fn)
        self.activation_dropout = activation_dropout
        self.output_init_scale = output_init_scale
        self.reset_parameters()
        self.mark()

    def mark(self) -> None:
        """Mark sharded parameters, whose gradients fairseq's ``legacy_ddp`` must not average."""
        if self.placement.is_sharded:
            for parameter in self.parameters():
                parameter.expert = True

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.mark()  # copies of parameters lose the mark

    def reset_parameters(self):
        """Draws the values of all experts, so that they do not depend on the number of ranks."""
        if self.w1.is_meta:
            return  # nothing to draw; the loop would take seconds for hundreds of experts
        local = self.placement.local
        scale2 = self.output_init_scale
        for weight, bias, scale in ((self.w1, self.b1, 1.0), (self.w2, self.b2, scale2)):
            bound = scale / math.sqrt(weight.shape[2])
            for stacked in (weight, bias):
                values = torch.empty_like(stacked[0])
                for e in range(self.placement.num_experts):
                    nn.init.uniform_(values, -bound, bound)
                    if e in local:
                        with torch.no_grad():
                            stacked[e - local.start] = values

    def weights(self) -> Weights:
        """``w1``, ``b1``, ``w2``, ``b2`` in the type of the computation: autocast's if it is enabled."""
        dtype = autocast_dtype(self.w1.device) or self.w1.dtype
        cache = None if torch.compiler.is_compiling() else getattr(_casts, "cache", None)
        if cache is None or dtype == self.w1.dtype:
            return self._cast(dtype)
        key = self, dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if key not in cache:
            cache[key] = self._cast(dtype)
        return cache[key]

    def _cast(self, dtype: torch.dtype) -> Weights:
        weights = self.w1, self.b1, self.w2, self.b2
        if self.placement.is_sharded:
            weights = (divide_gradient(w, self.placement.world_size) for w in weights)
        return tuple(w.to(dtype) for w in weights)

    @property
    def hidden(self) -> Hidden:
        """The activation and dropout between an expert's two linear maps."""
        return Hidden(self.activation_fn, self.activation_dropout if self.training else 0.0)


_casts = threading.local()  # ``cache``: weights that were cast within `cast_once`; None outside


@contextmanager
def cast_once() -> Iterator[None]:
    """In this context, experts under autocast cast their weights once per optimizer step.

    Only optimizers may change the weights in it. Without such a scope, changes could not be detected:
    optimizers write to ``p.data``, and torch keeps its own casts only until autocast is left.
    """
    before, cache = getattr(_casts, "cache", None), {}
    hook = register_optimizer_step_post_hook(lambda *_: cache.clear())
    _casts.cache = cache
    try:
        yield
    finally:
        hook.remove()
        _casts.cache = before


def divide_gradient(weight: Tensor, number: int) -> Tensor:
    """The weights, with a gradient divided by ``number``, the world size.

    The gradient of an expert sums over the tokens of all ranks; other gradients are averaged over ranks.
    """
    weight = weight.view_as(weight)
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient / number)
    return weight


EXECUTIONS = ("auto", "per-expert", "grouped", "fused", "fused-triton")
logger = logging.getLogger(__name__)


def start_pass(
    execution: "str | Callable[[Experts], PerExpert]", experts: Experts, weights: Weights
) -> PerExpert | Grouped:
    """The execution of one pass with the experts' ``weights``.

    Args:
        execution: one of `EXECUTIONS`, or a callable that returns an execution of the experts. "grouped" is
            a product per expert where none of all experts is one kernel; "auto" is so, too, on a CPU and in
            exact float32; "fused" is the same as "auto" for blocks that fused.py does not support.
    """
    if callable(execution):
        return execution(experts)
    if execution == "per-expert" or why_per_expert(weights[2], execution):
        return PerExpert(experts)
    return Grouped(experts)


def why_per_expert(weight: Tensor, execution: str = "auto") -> str:
    """Why not to group the products of w2 ``(E, D, F)``; logged once per device but the CPU.

    Where w2 fits, w1 does: it has rows of D and, of gated experts, 2F outputs.
    """
    device, dtype, reason = weight.device, weight.dtype, ""
    is_traced = torch.compiler.is_compiling()
    if execution != "grouped" and not is_traced:
        if device.type == "cpu":
            return "a CPU"
        if device.type != "cuda" or not torch_has_one(weight, dtype):
            reason = why_not_triton(device, dtype)
    if not reason and products_of(weight) is None:
        reason = "no product of all experts fits"
    if device.type != "cpu" and not is_traced:
        _log_execution(str(device), str(dtype).removeprefix("torch."), reason)
    return reason


@functools.cache
def _log_execution(device: str, dtype: str, reason: str) -> None:
    how = "products of all experts in one kernel"
    if reason:
        how = f"a product per expert, whose sizes are read once per stratum; {reason}"
    logger.info("experts on %s in %s: %s", device, dtype, how)
