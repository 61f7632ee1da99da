"""Lets the stock encoder train over several processes with ``--ddp-backend pytorch_ddp``, fairseq's default.

For fairseq 0.12.2 on any torch. Its encoder layer keeps copies of its weights for torch's fused kernel,
parameters that no gradient ever reaches, and torch's wrapper ends the second update over them ("Expected
to have finished reduction in the prior iteration"). Here the wrapper is told to leave these alone: all
processes have the same, and nothing computes with them.
"""

import functools
from types import ModuleType

_COPIES = tuple(
    f".{of}_{kind}" for of in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")
)


def leave_copies_alone(distributed_fairseq_model: ModuleType) -> None:
    original = distributed_fairseq_model.DistributedDataParallel

    @functools.wraps(original, updated=())
    def without_copies(module, *others, **options):
        from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

        copies = [
            f"{name}{copy}"
            for name, layer in module.named_modules()
            if isinstance(layer, TransformerEncoderLayerBase)
            for copy in _COPIES
        ]
        if copies:
            wrapper = distributed_fairseq_model.nn.parallel.DistributedDataParallel
            wrapper._set_params_and_buffers_to_ignore_for_model(module, copies)
        return original(module, *others, **options)

    distributed_fairseq_model.DistributedDataParallel = without_copies
