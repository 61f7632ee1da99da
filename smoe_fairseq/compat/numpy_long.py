"""Lets fairseq say ``np.compat.long``, which numpy 2 no longer has: ``int``.

For fairseq 0.12.2 and numpy 2.0 and later. Language models with ``--sample-break-mode eos``, and their
sampling and interactive use, end in an AttributeError. Only fairseq's module that divides text into samples
sees the name again; numpy stays as it is for everybody else.
"""

from types import ModuleType, SimpleNamespace


class _WithLong:
    """numpy, and what it had."""

    compat = SimpleNamespace(long=int)

    def __init__(self, numpy: ModuleType):
        self._numpy = numpy

    def __getattr__(self, name: str):
        return getattr(self._numpy, name)


def keep_long(module: ModuleType) -> None:
    if not hasattr(module.np, "compat"):
        module.np = _WithLong(module.np)
