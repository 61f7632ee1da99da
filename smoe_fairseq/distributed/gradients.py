"""Gradients of sharded experts: summed over replicas, and part of the norm that fairseq clips by."""

import functools
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from smoe_fairseq.models.moe_layers import experts_of
from smoe_fairseq.modules.placement import Placement


def sum_over_replicas(ddp: ModuleType) -> None:
    """Adds to ``legacy_ddp``, which leaves experts alone, the sum over the replicas of an expert."""
    wrapper = ddp.LegacyDistributedDataParallel
    original = wrapper.all_reduce_grads

    @functools.wraps(original)
    def all_reduce_grads(self):
        original(self)
        if self.accumulate_grads:
            return
        for experts in experts_of(self.module).values():
            place = experts.placement
            if place.num_replicas > 1:
                group = _replica_group(place.num_experts, place.world_size)
                for parameter in experts.parameters():
                    if parameter.grad is not None:
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

    Args:
        places: of each parameter of experts, in the order of the optimizer's, which does not know them: its
            copies in float32 have nothing but the mark.
    """

    def __init__(self, places: list[Placement]):
        self.places = places

    def __call__(self, shared: list[Tensor], experts: list[Tensor | None]) -> Tensor:
        """Scalar, the same on every process; in at least float32, not finite if any gradient is not."""
        by_replicas = {}
        for place, gradient in zip(self.places, experts, strict=True):
            if gradient is not None:
                by_replicas.setdefault(place.num_replicas, []).append(gradient)
        # The shared part too, though all have it: so the sum has the same bits on machines of any kind.
        squared = _norm(shared).square() / self.places[0].world_size
        for replicas, gradients in by_replicas.items():
            squared = squared + _norm(gradients).square() / replicas
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
        params = list(params)
        experts = [p.grad for p in params if hasattr(p, "expert")]
        shared = [p.grad for p in params if p.grad is not None and not hasattr(p, "expert")]
        norm = aggregate_norm_fn(shared, experts)
        if max_norm > 0:
            clip_grads_with_norm_([p for p in params if p.grad is not None], max_norm, norm)
        return norm

    utils.clip_grad_norm_ = clip_grad_norm_
