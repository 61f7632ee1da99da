"""Drops the warnings about how fairseq calls hydra, some thirty lines at every command's start.

For fairseq 0.12.2 on hydra 1.1 and later. They name old functions, arguments and headers inside
fairseq, which work all the same, and a user can do nothing about them. Errors, and warnings from
anywhere else, are untouched.
"""

import functools
import warnings
from types import ModuleType


def quiet_hydra(dataclass_utils: ModuleType) -> None:
    original = dataclass_utils.convert_namespace_to_omegaconf

    @functools.wraps(original)
    def convert_namespace_to_omegaconf(args):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return original(args)

    dataclass_utils.convert_namespace_to_omegaconf = convert_namespace_to_omegaconf
