"""Takes experts out of a checkpoint: their weights, the gates' rows for them, and what its settings say."""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoint.average import weights_of
from smoe_fairseq.checkpoint.names import PENDING, rank_files, rank_of, set_name
from smoe_fairseq.checkpoint.record import KEY, Record
from smoe_fairseq.conversion.selection import Layer
from smoe_fairseq.modules.strata import Strata
from smoe_fairseq.system.errors import UsageError

_EXPERTS = re.compile(r"experts\.(w1|b1|w2|b2)")
_GATE = re.compile(r"gates\.(\d+)\.(weight|bias\.steps)")  # null experts have weights of their own


@dataclass(frozen=True)
class PrunedLayer:
    """The experts of a layer that stay, in their order, and its strata before and after."""

    experts: list[int]
    before: Strata
    after: Strata

    @classmethod
    def of(cls, layer: Layer, kept: set[int]) -> "PrunedLayer":
        return cls(sorted(kept), layer.strata, layer.after(kept))

    @property
    def removed(self) -> list[int]:
        return sorted(set(range(self.before.num_experts)) - set(self.experts))

    def rows(self, name: str) -> list[int] | None:
        """What stays of a tensor's first dimension, by its name in the block; None: all of it."""
        if _EXPERTS.fullmatch(name):
            return self.experts
        if gate := _GATE.fullmatch(name):
            first = self.before.first_experts[int(gate[1])]
            last = first + self.before.visible[int(gate[1])]
            return [expert - first for expert in self.experts if first <= expert < last]
        return None


def check_is_one_file(path: Path) -> None:
    """Raise UsageError where experts are in the files of several processes."""
    name = set_name(path)
    if rank_of(path) is None and (
        path.exists() or not rank_files(name) | rank_files(name, PENDING)
    ):
        return
    raise UsageError(
        f"{path} is of a set with --expert-parallel: make one checkpoint of it first, by smoe consolidate "
        f"{name} --output FILE"
    )


def prune(path: Path, layers: Mapping[str, PrunedLayer]) -> dict:
    """The content of a checkpoint with fewer experts, without the optimizer's state and averages (EMA).

    Args:
        path: of one file, see `check_is_one_file`.
        layers: each MoE layer by its name, ``encoder.layer.1``.

    Raises:
        UsageError: it is missing or damaged.
    """
    state = weights_of(path)
    by_prefix = {f"{state_name(name)}.": layer for name, layer in layers.items()}
    state["model"] = {
        name: _pruned(name, tensor, by_prefix) for name, tensor in state["model"].items()
    }
    strata = {}  # of the sides that have MoE layers; a language model has one
    for name, layer in layers.items():
        strata.setdefault(f"{name.partition('.')[0]}_smoe_strata", []).append(str(layer.after))
    strata = {option: ",".join(of_side) for option, of_side in strata.items()}
    if state.get("cfg"):
        state["cfg"] = {
            part: _with_strata(values, strata) if part == "model" or _has_strata(values) else values
            for part, values in state["cfg"].items()
        }
    else:  # before fairseq had a config, checkpoints held the flat command line
        state["args"] = _with_strata(state["args"], strata)
    if (record := Record.of(state)) is not None:
        experts = {state_name(name): len(layer.experts) for name, layer in layers.items()}
        first = next(iter(experts.values()))
        others = {name: number for name, number in experts.items() if number != first}
        state[KEY] = replace(record, num_experts=first, other_layers=others).as_dict()
    return state


def state_name(layer: str) -> str:
    """``encoder.layer.1`` as the state dict has it: ``encoder.layers.1.moe``."""
    return f"{layer.replace('.layer.', '.layers.')}.moe"


def _pruned(name: str, tensor: Tensor, by_prefix: Mapping[str, PrunedLayer]) -> Tensor:
    for prefix, layer in by_prefix.items():
        if name.startswith(prefix):
            rows = layer.rows(name.removeprefix(prefix))
            return tensor if rows is None else tensor[torch.tensor(rows)]
    return tensor


def _has_strata(values) -> bool:
    """Whether a part of the settings repeats the model's, as fairseq has it for tasks of older kinds."""
    values = vars(values) if isinstance(values, Namespace) else values
    return isinstance(values, Mapping) and "smoe_strata" in values


def _with_strata(values: Namespace | Mapping, strata: Mapping[str, str]) -> Namespace | dict:
    if isinstance(values, Namespace):
        return Namespace(**vars(values) | strata)
    return {**values, **strata}
