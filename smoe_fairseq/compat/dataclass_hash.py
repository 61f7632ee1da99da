"""Lets fairseq's dataclasses hold instances of each other as defaults.

For fairseq 0.12.2 on Python 3.11 and later. There ``@dataclass`` refuses a default value without
``__hash__`` ("mutable default ... is not allowed"), which every plain dataclass instance is, and
``fairseq.dataclass.configs.FairseqConfig`` is made of such defaults, so ``import fairseq`` fails.
fairseq never changes these defaults in place; giving its dataclasses a hash is all it takes.
"""

import functools
from types import ModuleType


def hash_dataclasses(dataclasses: ModuleType) -> None:
    original = dataclasses.dataclass

    @functools.wraps(original)
    def dataclass(cls=None, /, **options):
        if cls is None:
            return lambda decorated: dataclass(decorated, **options)
        if cls.__module__.partition(".")[0] == "fairseq" and not options.get("frozen"):
            options.setdefault("unsafe_hash", True)
        return original(cls, **options)

    # torch 2.6 reads the names of the options there (torch/distributed/tensor/placement_types.py).
    dataclass.__kwdefaults__ = original.__kwdefaults__
    dataclasses.dataclass = dataclass
