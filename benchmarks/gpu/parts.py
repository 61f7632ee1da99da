"""The parts of a check, most important first: a name, a time limit, and the function that does it."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part runs in its own process, which is ended after ``seconds``.

    function: ``module:name`` of a generator function of this package. It takes a `Context` and yields a
        dict per result, with ``case``, ``ok`` (None: nothing to pass or fail) and whatever was measured.
    least: with fewer seconds left than this, the part is not started.
    """

    name: str
    function: str
    seconds: int
    about: str
    least: int = 5

    @property
    def group(self) -> str:
        return self.name.split("-")[0]

    @property
    def alone(self) -> bool:
        """Whether it measures times, so that nothing else may run."""
        return self.group != "right"

    def run(self, context: "Context") -> Iterator[dict]:
        module, name = self.function.split(":")
        return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(context)


@dataclass(frozen=True)
class Context:
    """Where a part runs: ``device`` is "cuda" or "cpu"; on "cpu" sizes are tiny, a rehearsal."""

    device: str
    folder: str  # of its own, for data and checkpoints
    seconds: float
    out: str = ""  # the check's folder, for files beside the report

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


PARTS = (
    Part("right-block", "right:block", 90, "block with every gate and option against plain loops"),
    Part("right-precision", "training:precision", 90, "fp16, bf16, --amp with a forced overflow"),
    Part("right-options", "training:options", 60, "a CPU's update, activation checkpointing"),
    Part("right-generate", "training:generate", 60, "translations equal to the CPU's"),
    Part("right-compile", "right:compiled", 90, "torch.compile against the block as it is"),
    Part("right-ranks", "training:ranks", 120, "one and two ranks: equal, resumed, resharded"),
    Part("fast-update", "update:update", 120, "updates of smoe_transformer_base, and their phases"),
    Part("fast-block", "fast:block", 90, "block over its bare products: time, memory, host waits"),
    Part("fast-decode", "update:decode", 60, "tokens per second of fairseq-generate"),
    Part("fast-products", "fast:products", 30, "products of experts: grouped, padded, one by one"),
    Part("fast-peers", "peers:peers", 60, "other packages' layers that are installed, and ours"),
    Part("whole-demo", "whole:demo", 240, "the training of `make demo`", least=20),
    Part("whole-study", "whole:study", 86400, "Multi30k's study at base size", least=60),
)


def choose(names: Iterable[str]) -> tuple[Part, ...]:
    """The parts whose name is given, or begins with a given group ("right"); all for none.

    Raises:
        ValueError: a name fits no part.
    """
    names = list(names)
    for name in names:
        if not any(name in (part.name, part.group) for part in PARTS):
            known = ", ".join(part.name for part in PARTS)
            raise ValueError(f"--parts {name}: no such part or group; there are {known}")
    return tuple(p for p in PARTS if not names or {p.name, p.group} & set(names))
