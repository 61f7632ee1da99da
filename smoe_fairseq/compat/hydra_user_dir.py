"""Lets ``fairseq-hydra-train common.user_dir=... model=...`` choose what a plugin registers.

For fairseq 0.12.2 on any hydra. It imports the plugin only after hydra has composed the config, when
``model=`` and ``criterion=`` had to be known already; here it is imported first.
"""

import functools
import sys
from argparse import Namespace
from types import ModuleType


def import_user_dir_first(initialize: ModuleType) -> None:
    original = initialize.hydra_init

    @functools.wraps(original)
    def hydra_init(*others, **options):
        from fairseq.utils import import_user_module

        for word in sys.argv[1:]:
            name, _, value = word.lstrip("+").partition("=")
            if name == "common.user_dir" and value:
                import_user_module(Namespace(user_dir=value))
        return original(*others, **options)

    initialize.hydra_init = hydra_init
