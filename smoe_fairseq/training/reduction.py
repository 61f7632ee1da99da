"""Averages gradients over the ranks in buckets, most of them while the backward pass computes the rest.

fairseq's ``legacy_ddp`` sends all gradients after the backward pass. Here, a bucket is sent as soon as its
gradients, and all buckets before it, are complete. Buckets depend only on the parameters, so that sums are
rounded alike in every update, and a resumed run equals an uninterrupted one.
"""

import functools
from collections import Counter, deque

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.models.transformer import experts_of
from smoe_fairseq.training.foreach import runs

BUCKET = 25 * 2**20  # bytes; a larger parameter has a bucket of its own
IN_FLIGHT = 2  # buckets that are sent at a time, each with a copy of its gradients


@replaces(
    "fairseq.distributed.legacy_distributed_data_parallel:LegacyDistributedDataParallel.all_reduce_grads"
)
def average_gradients(original, wrapper):
    """Average shared gradients over all ranks; sum those of experts over the ranks with the same experts."""
    if wrapper.accumulate_grads:
        return
    if not hasattr(wrapper, "reduction"):
        wrapper.reduction = Reduction(wrapper)
    wrapper.reduction.finish()
    for experts in experts_of(wrapper.module).values():
        place = experts.placement
        if place.num_replicas > 1:
            group = _replica_group(place.num_experts, place.world_size)
            for parameter in experts.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)


def send_rest(model) -> None:
    """Send the gradients that the backward pass of a wrapped model left. A collective call.

    Before any other one that follows the backward pass, so that all ranks have the same order even if one has
    run out of memory.
    """
    if reduction := getattr(model, "reduction", None):
        reduction.send_rest()


@functools.cache
def _replica_group(num_experts: int, world_size: int):
    """The ranks that hold the same experts as this one. A collective call."""
    groups = [dist.new_group(list(range(e, world_size, num_experts))) for e in range(num_experts)]
    return groups[dist.get_rank() % num_experts]


class Reduction:
    """Averages the gradients of a model over the ranks.

    The first update after the start is averaged after its backward pass, and so is the second, in which the
    gradients of each parameter are counted: activation checkpointing can compute one in several parts.

    Sharded experts exchange tokens within the backward pass, and a model per language pair has several
    backward passes, so that ranks could make these calls in different orders. Both are averaged afterwards.

    A rank that runs out of memory in the backward pass contributes the buckets that it has sent, and then 0.

    Args:
        wrapper: fairseq's ``LegacyDistributedDataParallel``.
    """

    def __init__(self, wrapper):
        from fairseq.models import FairseqMultiModel

        self.wrapper = wrapper
        parameters = [p for p in wrapper.module.parameters() if p.requires_grad]
        shared = [p for p in parameters if not hasattr(p, "expert")]
        self.experts = [p for p in parameters if hasattr(p, "expert")]
        backwards = reversed(shared)  # about the order of the backward pass
        self.buckets = list(
            runs(backwards, BUCKET, lambda p: p.nbytes, lambda p: (p.dtype, p.device))
        )
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.expected: Counter | None = None  # parts of each gradient, once they were counted
        self._begin()
        sharded = any(hasattr(p, "expert") for p in wrapper.module.parameters())
        if not sharded and not isinstance(wrapper.module, FairseqMultiModel):
            for parameter in shared:
                parameter.register_post_accumulate_grad_hook(self._arrived)

    def _begin(self) -> None:
        self.arrived = Counter()
        self.incomplete = [len(bucket) for bucket in self.buckets]
        self.num_sent = 0
        self.in_flight: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()

    def _arrived(self, parameter: Tensor) -> None:
        """Called in the backward pass, after a part of the parameter's gradient was added."""
        if self.wrapper.accumulate_grads:
            return
        self.arrived[parameter] += 1
        if self.expected is None:
            return
        if self.arrived[parameter] > self.expected[parameter]:
            raise RuntimeError(
                "a gradient came in more parts than before: use --ddp-backend pytorch_ddp"
            )
        if self.arrived[parameter] == self.expected[parameter]:
            self.incomplete[self.bucket_of[parameter]] -= 1
            while self.num_sent < len(self.buckets) and not self.incomplete[self.num_sent]:
                self._send()

    def send_rest(self) -> None:
        """Send what is left, with 0 for parameters without a gradient."""
        while self.num_sent < len(self.buckets):
            self._send()

    def finish(self) -> None:
        """Send what is left, and wait for the averages."""
        self.send_rest()
        while self.in_flight:
            self._receive()
        for parameter in self.experts:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.expected is None and self.arrived:
            self.expected = Counter({p: max(1, self.arrived[p]) for p in self.bucket_of})
        self._begin()

    def _send(self) -> None:
        if len(self.in_flight) == IN_FLIGHT:
            self._receive()
        bucket = self.buckets[self.num_sent]
        self.num_sent += 1
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in bucket]
        if len(bucket) == 1 and gradients[0].is_contiguous():
            buffer = gradients[0].view(-1)
        else:
            buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
        buffer.div_(self.wrapper.world_size)
        work = dist.all_reduce(buffer, group=self.wrapper.process_group, async_op=True)
        self.in_flight.append((bucket, buffer, work))

    def _receive(self) -> None:
        bucket, buffer, work = self.in_flight.popleft()
        work.wait()
        sizes = [parameter.numel() for parameter in bucket]
        for parameter, average in zip(bucket, buffer.split(sizes), strict=True):
            if parameter.grad is None:  # also of a rank that has run out of memory since
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(average.view_as(parameter))
