"""Lets half precision go on after an overflow where there is no GPU.

For fairseq 0.12.2 on any torch. Its trainer skips an update whose gradients overflow, and then makes a norm
of 0 ``.cuda()``, whatever it trains on, which ends in "Torch not compiled with CUDA enabled". The loss
scale starts high and comes down by such overflows, so ``--fp16 --cpu`` seldom got past its first updates.
"""

import functools
from types import ModuleType


def skip_overflow_on_cpu(trainer: ModuleType) -> None:
    original, torch = trainer.Trainer.train_step, trainer.torch

    @functools.wraps(original)
    def train_step(self, *arguments, **options):
        if torch.cuda.is_available():
            return original(self, *arguments, **options)
        cuda = torch.Tensor.cuda
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        try:
            return original(self, *arguments, **options)
        finally:
            torch.Tensor.cuda = cuda

    trainer.Trainer.train_step = train_step
