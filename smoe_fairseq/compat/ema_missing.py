"""Lets ``--store-ema`` begin at a checkpoint that was saved without.

For fairseq 0.12.2 on any torch. It means to take the checkpoint's own parameters as the first average, and
has removed them by then: resuming ends in ``KeyError: 'model'``. By then they are the model's.
"""

import functools
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


def begin_average_at_model(trainer: ModuleType) -> None:
    original = trainer.Trainer.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self, filename, *others, **options):
        ema = self.cfg.ema
        if not ema.store_ema:
            return original(self, filename, *others, **options)
        ema.store_ema = False
        try:
            extra_state = original(self, filename, *others, **options)
        finally:
            ema.store_ema = True
        if extra_state is not None:
            _restore(self, extra_state, filename)
        return extra_state

    trainer.Trainer.load_checkpoint = load_checkpoint


def _restore(trainer, extra_state: dict, filename: str) -> None:
    parameters = extra_state.get("ema")
    if parameters is None:
        logger.warning("%s has no average (--store-ema): it begins at its parameters", filename)
        parameters = trainer.get_model().state_dict()
    trainer.ema.restore(parameters)
    if trainer.cfg.ema.ema_fp32:
        trainer.ema.build_fp32_params(extra_state.get("ema_fp32_params", parameters))
