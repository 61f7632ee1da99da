"""Lets ``--store-ema`` average a model that has whole numbers in its state.

For fairseq 0.12.2 on any torch. It multiplies everything in the state dict by the decay, in place, which
torch refuses for integers: a hash gate's table, the steps of a bias, or what batch norm has counted. An
average of them would mean nothing either. fairseq knows keys that are copied instead; they are made to be
among them.
"""

import functools
from types import ModuleType


def copy_integers(ema: ModuleType) -> None:
    original = ema.EMA.__init__

    @functools.wraps(original)
    def __init__(self, model, *others, **options):
        original(self, model, *others, **options)
        state = self.model.state_dict()
        integers = {n for n, value in state.items() if not value.is_floating_point()}
        self.skip_keys = {*self.skip_keys, *integers}

    ema.EMA.__init__ = __init__
