"""Lets ``--cpu`` train over several processes with ``--ddp-backend pytorch_ddp``, fairseq's default.

For fairseq 0.12.2 on any torch. It names a GPU to torch's wrapper even where the model is on the CPU,
and the wrapper refuses ("device_ids and output_device arguments only work with ... GPU modules").
"""

import functools
from types import ModuleType


def name_no_gpu(distributed_fairseq_model: ModuleType) -> None:
    original = distributed_fairseq_model.DistributedDataParallel

    @functools.wraps(original, updated=())
    def on_its_device(module, device_ids=None, output_device=None, **options):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        return original(
            module=module, device_ids=device_ids, output_device=output_device, **options
        )

    distributed_fairseq_model.DistributedDataParallel = on_its_device
