"""Gradients of sharded experts: summed over replicas, and part of the norm that fairseq clips by."""

import functools
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from smoe_fairseq.models.moe_layers import placement_of
from smoe_fairseq.modules.placement import Placement


def sum_over_replicas(ddp: ModuleType) -> None:
    """Adds to ``legacy_ddp``, which leaves experts alone, the sum over the replicas of an expert."""
    wrapper = ddp.LegacyDistributedDataParallel
    original = wrapper.all_reduce_grads

    @functools.wraps(original)
    def all_reduce_grads(self):
        original(self)
        place = placement_of(self.module)
        if place is None or place.num_replicas == 1 or self.accumulate_grads:
            return
        group = _replica_group(place.num_experts, place.world_size)
        for parameter in self.module.parameters():
            if hasattr(parameter, "expert") and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

    wrapper.all_reduce_grads = all_reduce_grads


@functools.cache
def _replica_group(num_experts: int, world_size: int):
    """The processes with this one's experts; all processes have to ask for it at the same time."""
    mine = dist.get_rank() % num_experts
    for first in range(num_experts):
        group = dist.new_group(list(range(first, world_size, num_experts)))
        if first == mine:
            found = group
    return found


_HALF = (torch.float16, torch.bfloat16)


class ExpertNorm:
    """The norm over shared parameters and the experts of all processes.

    It travels through fairseq's optimizers as their ``aggregate_norm_fn``, to where the gradients are.
    """

    def __init__(self, place: Placement):
        self.place = place

    def __call__(self, shared: list[Tensor], experts: list[Tensor]) -> Tensor:
        """Scalar, the same on every process; in at least float32, not finite if any gradient is not."""
        # The shared part too, though all have it: so the sum has the same bits on machines of any kind.
        squared = _norm(shared).square() / self.place.world_size
        squared = squared + _norm(experts).square() / self.place.num_replicas
        dist.all_reduce(squared)
        return squared.sqrt()


def _norm(gradients: list[Tensor]) -> Tensor:
    """Scalar; torch's own would have the norm of a gradient in half precision in half precision too.

    That overflows at 65,504, and the norm of norms is that of all, so each of these is first taken by itself.
    """
    return get_total_norm(
        [
            torch.linalg.vector_norm(g, dtype=torch.float32) if g.dtype in _HALF else g
            for g in gradients
        ]
    )


def norm_over_all_experts(utils: ModuleType) -> None:
    """fairseq leaves parameters marked ``expert`` out of the norm, so clipping and overflow miss them."""
    original = utils.clip_grad_norm_

    @functools.wraps(original)
    @torch.no_grad()
    def clip_grad_norm_(params, max_norm, aggregate_norm_fn=None):
        if not isinstance(aggregate_norm_fn, ExpertNorm):
            return original(params, max_norm, aggregate_norm_fn)
        with_gradient = [p for p in params if p.grad is not None]
        shared, experts = (
            [p.grad.detach() for p in with_gradient if hasattr(p, "expert") == is_expert]
            for is_expert in (False, True)
        )
        norm = aggregate_norm_fn(shared, experts)
        if max_norm > 0:
            clip_grads_with_norm_(with_gradient, max_norm, norm)
        return norm

    utils.clip_grad_norm_ = clip_grad_norm_
