"""The gradient norm and the optimizer state of sharded experts."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from fairseq import utils
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.training.foreach import HALF


class ExpertNorm:
    """The gradient norm over shared parameters and the experts of all ranks.

    fairseq's optimizers pass it on as their ``aggregate_norm_fn``.

    Args:
        places: the placement of each expert parameter, in the optimizer's order. The optimizer's
            float32 copies are marked as experts but do not know their placement.
    """

    def __init__(self, places: list[Placement]):
        self.places = places

    def __call__(self, shared: list[Tensor], experts: list[Tensor | None]) -> Tensor:
        """A scalar, equal on all ranks, in at least float32; not finite if any gradient is not."""
        by_replicas = {}
        for place, gradient in zip(self.places, experts, strict=True):
            if gradient is not None:
                by_replicas.setdefault(place.num_replicas, []).append(gradient)
        # The shared part, which all ranks have, is summed too: the result is bitwise equal on all ranks.
        squared = _norm(shared).square() / self.places[0].world_size
        for replicas, gradients in by_replicas.items():
            squared = squared + _norm(gradients).square() / replicas
        dist.all_reduce(squared)
        return squared.sqrt()


def _norm(gradients: list[Tensor]) -> Tensor:
    """The total norm, a scalar.

    torch computes the norm of a half-precision gradient in half precision, which overflows at 65,504. So
    each norm is computed in float32 first; the norm of the norms is the total norm.
    """
    return get_total_norm(
        [
            torch.linalg.vector_norm(g, dtype=torch.float32) if g.dtype in HALF else g
            for g in gradients
        ]
    )


@replaces("fairseq.utils:clip_grad_norm_")
@torch.no_grad()
def clip_together(original, params, max_norm, aggregate_norm_fn=None):
    """With few kernels, and with sharded experts, which fairseq would leave out of the norm and not clip.

    fairseq's function is used with apex and FSDP, which have their own kernels.
    """
    params = [params] if torch.is_tensor(params) else list(params)
    present = [p for p in params if p is not None and p.grad is not None]
    shared = [p.grad for p in present if not hasattr(p, "expert")]
    one_kind = len({(g.device, g.dtype) for g in shared}) == 1
    if isinstance(aggregate_norm_fn, ExpertNorm):
        norm = aggregate_norm_fn(shared, [p.grad for p in params if hasattr(p, "expert")])
    elif aggregate_norm_fn or utils.multi_tensor_l2norm_available or not one_kind:
        return original(params, max_norm, aggregate_norm_fn)
    else:
        norm = torch.norm(torch.stack(torch._foreach_norm(shared, 2, dtype=torch.float32)))
    if max_norm > 0:
        factor = (float(max_norm) / (norm + 1e-6)).clamp_(max=1)
        torch._foreach_mul_([p.grad for p in present], factor)
    return norm


# ZeRO with sharded experts (``--zero-sharding os`` with ``--expert-parallel``).
#
# fairscale's OSS shards the optimizer's state of the shared parameters over all ranks and broadcasts
# each parameter after its update. The state of an expert stays on the expert's rank.
# Checkpoints are the same with and without the flag.


@replaces("fairseq.optim:shard_")
def shard_shared_state(original, optimizer, group):
    """fairseq's function would overwrite the experts of all ranks by those of one."""
    if any(hasattr(parameter, "expert") for parameter in optimizer.params):
        optimizer.optimizer = ShardedSharedState(optimizer, group)
    else:
        original(optimizer, group)


class ShardedSharedState(Optimizer):
    """Combines two optimizers: OSS for the shared parameters, and one for this rank's experts.

    Its own ``param_groups`` contain all parameters in their order, and the options that schedulers change.

    Args:
        optimizer: fairseq's optimizer, whose torch optimizer this one replaces.
        group: the ranks over which the state is sharded.
    """

    disable_mem_eff_fp16_loading_hack = True  # `load_state_dict` keeps the types

    def __init__(self, optimizer, group: torch.distributed.ProcessGroup):
        from fairscale.optim import OSS

        whole = optimizer.optimizer
        super().__init__(whole.param_groups, whole.defaults)
        shared, experts = (self._groups_of(is_expert) for is_expert in (False, True))
        self.shared = OSS(shared, type(whole), group=group, **optimizer.optimizer_config)
        self.experts = type(whole)(experts, **optimizer.optimizer_config)

    def __getattr__(self, name: str):
        if name.startswith("supports"):  # where fairseq looks up an optimizer's features
            return getattr(self.experts, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def _groups_of(self, is_expert: bool) -> list[dict]:
        return [
            {**group, "params": [p for p in group["params"] if hasattr(p, "expert") == is_expert]}
            for group in self.param_groups
        ]

    def step(self, closure=None, **options):
        """Update the parameters. A collective call, since updated shared parameters are broadcast."""
        loss = None if closure is None else closure()
        parts = (self.experts, self.shared)
        for part in parts:  # schedulers change the options in param_groups
            _copy_options(self.param_groups, part.param_groups)
        for part in parts:
            part.step(**options)
        # Some optimizers count steps there.
        _copy_options(self.shared.param_groups, self.param_groups)
        return loss

    def consolidate_state_dict(self) -> None:
        """Gather all shared state on every rank, for the next `state_dict`. A collective call."""
        self.shared.consolidate_state_dict(recipient_rank=-1)

    def state_dict(self) -> dict:
        """The state of all shared parameters and of this rank's experts, as without ZeRO.

        Raises:
            RuntimeError: `consolidate_state_dict` has not been called.
        """
        numbers, state = self._numbers(), {}
        for part in (self.shared, self.experts):
            gathered = part.state_dict()["state"]
            for i, parameter in enumerate(_parameters(part)):
                if i in gathered:
                    state[numbers[parameter]] = gathered[i]
        self.shared._all_states.clear()  # else OSS keeps the state of all ranks in memory
        return {**super().state_dict(), "state": dict(sorted(state.items()))}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load this rank's part of the state, and keep its types."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers, state = self._numbers(), state_dict["state"]
        for part in (self.shared.optim, self.experts):
            part.state.clear()
            for parameter in _parameters(part):
                if numbers[parameter] in state:
                    part.state[parameter] = {
                        key: value.to(parameter.device) if torch.is_tensor(value) else value
                        for key, value in state[numbers[parameter]].items()
                    }

    def _numbers(self) -> dict[Tensor, int]:
        return {parameter: i for i, parameter in enumerate(_parameters(self))}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _copy_options(source: list[dict], target: list[dict]) -> None:
    for one, other in zip(source, target, strict=True):
        other.update({name: value for name, value in one.items() if name != "params"})
