"""Which process holds which experts."""

import functools
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Placement:
    """E experts over N processes; each holds the same number of consecutive ones.

    Where there are more processes than experts, every E consecutive ones are a group with one expert
    each, and the groups are replicas of one another: tokens stay in their group, gradients are summed
    over the replicas of an expert.

    Raises:
        ValueError: neither of E and N is a multiple of the other.
    """

    num_experts: int
    world_size: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.num_experts % self.world_size and self.world_size % self.num_experts:
            fits = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"{self.num_experts} experts cannot be spread evenly over {self.world_size} processes; "
                f"accepted are {', '.join(map(str, fits))} processes or a multiple of {self.num_experts}"
            )

    @classmethod
    def over_processes(cls, num_experts: int) -> "Placement":
        """Over the processes of the run that this one is part of; all of them here if it is alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(num_experts, dist.get_world_size(), dist.get_rank())
        return cls(num_experts)

    @property
    def is_sharded(self) -> bool:
        return self.world_size > 1

    @property
    def group_size(self) -> int:
        """Processes that hold all experts together, and exchange tokens."""
        return min(self.num_experts, self.world_size)

    @property
    def num_replicas(self) -> int:
        """Processes that hold the same expert."""
        return self.world_size // self.group_size

    def process_group(self) -> dist.ProcessGroup:
        """The processes that this one exchanges tokens with, itself among them.

        At the first call every process of the run has to call it.
        """
        if self.num_replicas == 1:
            return dist.group.WORLD
        groups = _groups(dist.group.WORLD, self.world_size, self.group_size)
        return groups[self.rank // self.group_size]

    @property
    def num_local(self) -> int:
        return self.num_experts // self.group_size

    @property
    def local(self) -> range:
        """The experts of this process."""
        first = self.rank % self.group_size * self.num_local
        return range(first, first + self.num_local)


@functools.cache
def _groups(world: dist.ProcessGroup, world_size: int, size: int) -> list[dist.ProcessGroup]:
    """One group for every ``size`` consecutive processes of ``world``."""
    return [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]
