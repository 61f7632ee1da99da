"""ZeRO beside sharded experts: what ``--zero-sharding os`` does with ``--expert-parallel``.

The optimizer's state of the parameters that all processes share is spread over them by fairscale's OSS,
which sends every updated parameter to the rest. An expert is not shared: who holds it keeps its state. A
checkpoint has in it what it has without the flag, so either can go on with what the other has saved.
"""

import functools
from collections.abc import Iterator
from itertools import chain
from types import ModuleType

import torch
from torch import Tensor
from torch.optim import Optimizer


def spread_shared_state(optim: ModuleType) -> None:
    """fairseq's ``shard_`` would send one process's experts to all others."""
    original = optim.shard_

    @functools.wraps(original)
    def shard_(optimizer, group):
        if any(hasattr(parameter, "expert") for parameter in optimizer.params):
            optimizer.optimizer = SpreadSharedState(optimizer, group)
        else:
            original(optimizer, group)

    optim.shard_ = shard_


class SpreadSharedState(Optimizer):
    """Two of a kind in one: an OSS of the shared parameters, and an optimizer of this process's experts.

    All parameters are in its own ``param_groups``, in their order, with the options that count.

    Args:
        optimizer: fairseq's, whose torch optimizer this one takes the place of.
        group: the processes that the state is spread over.
    """

    disable_mem_eff_fp16_loading_hack = True  # `load_state_dict` keeps the types as they are

    def __init__(self, optimizer, group: torch.distributed.ProcessGroup):
        from fairscale.optim import OSS

        whole = optimizer.optimizer
        super().__init__(whole.param_groups, whole.defaults)
        shared, experts = (self._groups_of(is_expert) for is_expert in (False, True))
        self.shared = OSS(shared, type(whole), group=group, **optimizer.optimizer_config)
        self.experts = type(whole)(experts, **optimizer.optimizer_config)

    def __getattr__(self, name: str):
        if name.startswith("supports"):  # by which fairseq asks what a torch optimizer can do
            return getattr(self.experts, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def _groups_of(self, is_expert: bool) -> list[dict]:
        return [
            {**group, "params": [p for p in group["params"] if hasattr(p, "expert") == is_expert]}
            for group in self.param_groups
        ]

    def step(self, closure=None, **options):
        """Every process has to make it: the updated shared parameters are sent to all."""
        loss = None if closure is None else closure()
        parts = (self.experts, self.shared)
        for part in parts:  # schedulers have written into the groups
            _copy_options(self.param_groups, part.param_groups)
        for part in parts:
            part.step(**options)
        _copy_options(self.shared.param_groups, self.param_groups)  # some count their steps there
        return loss

    def consolidate_state_dict(self) -> None:
        """Brings all shared state to each process, for one `state_dict`; every process has to call it."""
        self.shared.consolidate_state_dict(recipient_rank=-1)

    def state_dict(self) -> dict:
        """As without ZeRO: of all shared parameters, and of this process's experts.

        Raises:
            RuntimeError: nothing has been gathered by `consolidate_state_dict`.
        """
        numbers, state = self._numbers(), {}
        for part in (self.shared, self.experts):
            gathered = part.state_dict()["state"]
            for i, parameter in enumerate(_parameters(part)):
                if i in gathered:
                    state[numbers[parameter]] = gathered[i]
        self.shared._all_states.clear()  # OSS would keep everyone's until the next time
        return {**super().state_dict(), "state": dict(sorted(state.items()))}

    def load_state_dict(self, state_dict: dict) -> None:
        """Keeps of it what is this process's, in the types that it has."""
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
        """The number of each parameter in a state dict."""
        return {parameter: i for i, parameter in enumerate(_parameters(self))}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _copy_options(source: list[dict], target: list[dict]) -> None:
    """All that groups hold beside their parameters."""
    for one, other in zip(source, target, strict=True):
        other.update({name: value for name, value in one.items() if name != "params"})
