"""Lets processes tell one another their logs without a GPU, however long these are.

For fairseq 0.12.2 on any torch. It gathers them in a buffer on the GPU, also with ``--cpu`` and gloo ("type
torch.cuda.ByteTensor not available"), and in one of ``--all-gather-list-size`` bytes, which the logs of a
hundred batches of ``fairseq-validate`` are too long for ("encoded data size exceeds max_size"). torch's own
function for this takes whatever device the group communicates on, and any size.
"""

import functools
from types import ModuleType


def gather_on_any_device(utils: ModuleType) -> None:
    import torch.distributed as dist

    original = utils.all_gather_list

    @functools.wraps(original)
    def all_gather_list(data, group=None, max_size=16384):
        from fairseq.utils import move_to_cpu

        group = utils.get_global_group() if group is None else group
        if utils.use_xla():
            return original(data, group, max_size)
        values = [None] * utils.get_world_size(group)
        dist.all_gather_object(values, move_to_cpu(data), group=group)
        return values

    utils.all_gather_list = all_gather_list
