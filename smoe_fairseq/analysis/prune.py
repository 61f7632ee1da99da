"""``smoe prune``: removes experts that some directions use little.

Shapes: E experts of an MoE layer, T tokens.
"""

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from numpy import ndarray
from tabulate import tabulate
from torch import Tensor, nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.record import BlockFollower, follow
from smoe_fairseq.checkpoints.reading import RECORD, Record
from smoe_fairseq.checkpoints.sets import (
    add_output_arguments,
    check_output,
    weights_of,
    write_converted,
)
from smoe_fairseq.compat.checkpoint_names import PENDING, rank_files, rank_of, set_name
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.flags import add_flag
from smoe_fairseq.models.memory import shapes_only
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.layer import StratifiedMoE
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.strata import Strata
from smoe_fairseq.translate.load import checkpoint_of

SOFTMAX = (
    "note: these gates use probabilities over all experts that they see, so translations may differ slightly "
    "even if only experts that were never chosen were removed"
)

# Counting how the experts are used, by teacher forcing.


@dataclass(frozen=True)
class Use:
    """How a direction uses the experts of one MoE layer, over all its gates.

    Args:
        choices: ``(E,)``, how often each was chosen, as first or as another choice.
        importance: ``(E,)``, first choices per token of the layer x exp(their mean confidence), the gate's
            probability of its first choice (Koishekenov et al. 2023).
    """

    choices: ndarray
    importance: ndarray

    @property
    def load(self) -> ndarray:
        """``(E,)``: choices of each expert, relative to their mean in the layer."""
        return self.choices / max(self.choices.mean(), 1e-12)


class UseRecorder(BlockFollower):
    """Sums over the decisions of one MoE layer's gates, each ``(E,)``."""

    def __init__(self, block: StratifiedMoE, dictionary: Dictionary):
        super().__init__(block, dictionary)
        self.tokens = 0
        shape, device = (3, block.strata.num_experts), block.stratum_of_expert.device
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.firsts, self.confidence, self.choices = sums

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        first = self.block.strata.first_experts[stratum]
        seen = slice(first, first + routing.num_experts)
        firsts_E = routing.first_choices_E.double()
        self.tokens += len(index_N) if stratum == 0 else 0
        self.firsts[seen] += firsts_E
        confidence_N = routing.probs_TE[row_N, expert_N - first]
        self.confidence.index_add_(0, expert_N, confidence_N.double())
        # A first choice determines a token's next stratum, even if the token gets only null experts.
        self.choices[seen] += torch.maximum(routing.kept_E.double(), firsts_E)

    def use(self) -> Use:
        rate = self.firsts / max(self.tokens, 1)
        importance = rate * (self.confidence / self.firsts.clamp(min=1)).exp()
        return Use(self.choices.cpu().numpy(), importance.cpu().numpy())


def use_of(samples: inputs.Samples) -> dict[str, Use]:
    """How a direction uses the experts of each MoE layer (see `moe_blocks`)."""
    net_inputs = (sample["net_input"] for sample in samples)
    recorders = follow(samples.model, samples.task, net_inputs, UseRecorder)
    return {layer: recorder.use() for layer, recorder in recorders.items()}


# Selecting the experts to keep.


@dataclass(frozen=True)
class Layer:
    """An MoE layer: its strata, and the first of its gates, which are all of one kind."""

    strata: Strata
    gate: nn.Module

    def required(self, score_E: ndarray) -> set[int]:
        """The best experts of the last stratum, or of each stratum of a stack: these are always kept."""
        required = set()
        for experts in self.strata.experts_of_gate[0 if self.strata.stacked else -1 :]:
            best_first = sorted(experts, key=lambda e: (-score_E[e], e))
            required.update(best_first[: self.gate.min_experts])
        return required


def keep_share(
    layers: Mapping[str, Layer], importance: Mapping[str, ndarray], share: float, over_all: bool
) -> dict[str, set[int]]:
    """The ``ceil(share E)`` most important experts, and at least those that gates need.

    Args:
        importance: ``(E,)`` of each layer.
        over_all: compare the experts of all layers; else only those within a layer.
    """
    kept = {name: layer.required(importance[name]) for name, layer in layers.items()}
    for group in [list(layers)] if over_all else [[name] for name in layers]:
        others = sorted(
            (-importance[name][expert], index, expert, name)
            for index, name in enumerate(group)
            for expert in range(layers[name].strata.num_experts)
            if expert not in kept[name]
        )
        total = sum(layers[name].strata.num_experts for name in group)
        rounding = 1e-9  # 0.1 of 10 experts must be one, in spite of rounding
        room = math.ceil(share * total - rounding) - sum(len(kept[name]) for name in group)
        for *_, expert, name in others[: max(room, 0)]:
            kept[name].add(expert)
    return kept


# Removing experts from a checkpoint: their weights, the gates' rows for them, and the settings.

_EXPERTS = re.compile(r"experts\.(w1|b1|w2|b2)")
_GATE = re.compile(r"gates\.(\d+)\.(.+)")


def sizes_of_gate(block: StratifiedMoE) -> dict[str, list[int]]:
    """The dimensions that are the number of experts that a gate sees, by the names of the gates' tensors."""
    options, visible, own = (block.config, block.embed_dim), block.strata.visible, block.strata.own
    with shapes_only():
        one, more = (block.kind(*options, visible[0] + n, own[0] + n) for n in (0, 1))
    pairs = zip(one.state_dict().items(), more.state_dict().values(), strict=True)
    shapes = {name: enumerate(zip(few.shape, many.shape)) for (name, few), many in pairs}
    return {name: [i for i, (a, b) in shape if a != b] for name, shape in shapes.items()}


@dataclass(frozen=True)
class PrunedLayer:
    """The original strata of a layer, the kept experts in their order, and `sizes_of_gate`."""

    before: Strata
    experts: list[int]
    sizes: Mapping[str, list[int]]

    @property
    def after(self) -> Strata:
        """The strata of the kept experts."""
        strata = [self.before.stratum_of_expert[expert] for expert in self.experts]
        sizes = tuple(map(strata.count, range(len(self.before.sizes))))
        return Strata(sizes, self.before.stacked, self.before.chain)

    @property
    def removed(self) -> list[int]:
        return sorted(set(range(self.before.num_experts)) - set(self.experts))

    def pruned(self, name: str, tensor: Tensor) -> Tensor:
        """The kept part of a tensor, by its name in the block."""
        rows, sizes = self.experts, [0] if _EXPERTS.fullmatch(name) else []
        if gate := _GATE.fullmatch(name):
            first = self.before.first_experts[int(gate[1])]
            seen = range(first, first + self.before.visible[int(gate[1])])
            rows, sizes = [e - first for e in rows if e in seen], self.sizes.get(gate[2], [])
        for dimension in sizes:
            tensor = tensor.index_select(dimension, torch.tensor(rows))
        return tensor


def prune(path: Path, layers: Mapping[str, PrunedLayer]) -> dict:
    """The content of a checkpoint file with fewer experts, without optimizer state and EMA.

    Args:
        layers: by the MoE layers' names (``encoder.layer.1``).
    """
    state = weights_of(path)
    # ``encoder.layer.1`` is ``encoder.layers.1.moe`` in the state dict.
    by_state = {f"{n.replace('.layer.', '.layers.')}.moe": layer for n, layer in layers.items()}
    for name, tensor in state["model"].items():
        block, separator, parameter = name.partition(".moe.")
        if separator and f"{block}.moe" in by_state:
            state["model"][name] = by_state[f"{block}.moe"].pruned(parameter, tensor)
    strata = {}  # by side; a language model has one
    for name, layer in layers.items():
        strata.setdefault(f"{name.partition('.')[0]}_smoe_strata", []).append(str(layer.after))
    strata = {option: ",".join(values) for option, values in strata.items()}
    if state.get("cfg"):  # other parts of the config repeat the model's settings for older tasks
        state["cfg"] = {part: _with_strata(values, strata) for part, values in state["cfg"].items()}
    else:  # before fairseq had a config, checkpoints held the flat command line
        state["args"] = _with_strata(state["args"], strata)
    if (record := Record.of(state, path)) is not None:
        experts = {name: len(layer.experts) for name, layer in by_state.items()}
        first = next(iter(experts.values()))
        others = {name: number for name, number in experts.items() if number != first}
        state[RECORD] = asdict(replace(record, num_experts=first, other_layers=others))
    return state


def _with_strata(values: Any, strata: Mapping[str, str]) -> Any:
    """A model's settings with other strata; other values are not changed."""
    options = vars(values) if isinstance(values, Namespace) else values
    if not isinstance(options, Mapping) or "smoe_strata" not in options:
        return values
    changed = {**options, **strata}
    return Namespace(**changed) if isinstance(values, Namespace) else changed


def add_prune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="CHECKPOINT")
    inputs.add_input_arguments(parser, "directions for which to prune the model")
    share = "share of the experts to keep, above 0 up to 1: those of highest importance"
    importance = "the rate of first choices times exp(mean gate probability of these)"
    add_flag(parser, "--keep", "SHARE", f"{share}, which is {importance}", float)
    over = (
        "whether --keep is a share of each MoE layer's experts, or of all experts; default: layer"
    )
    parser.add_argument("--over", choices=("layer", "all"), help=over)
    load = "instead of --keep: remove experts whose load (choices, over the mean of the layer)"
    most = "is at most this in every direction; 0 removes those that were never chosen"
    add_flag(parser, "--min-load", "LOAD", f"{load} {most}", float)
    add_output_arguments(parser)


def run_prune(args: Namespace) -> None:
    _check(args)
    args.path = checkpoint_of(args.path)
    check_output([args.path], [args.output], args.force)
    with quietly():
        model, task, directions, subset = inputs.load_inputs(args)
        blocks = moe_blocks(model)
        for block in blocks.values():
            for reason in filter(None, (gate.unprunable for gate in block.gates)):
                gate = f"--moe-gate {block.config.gate}"
                expected = "expected gates that score each expert by itself"
                raise UsageError(
                    f"{args.path}, {gate}, has {reason}, so all experts are needed; {expected}"
                )
        uses = [use_of(inputs.Samples(model, task, name, subset)) for name in directions]
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = {name: Layer(block.strata, block.gates[0]) for name, block in blocks.items()}
    sizes = {name: sizes_of_gate(block) for name, block in blocks.items()}
    del model, blocks
    if args.keep is not None:  # by the mean importance, in which all directions weigh the same
        importance = {n: np.mean([use[n].importance for use in uses], axis=0) for n in layers}
        kept = keep_share(layers, importance, args.keep, args.over == "all")
    else:  # by the highest load in any direction
        loads = {n: np.max([use[n].load for use in uses], axis=0) for n in layers}
        used = {n: set(np.flatnonzero(loads[n] > args.min_load).tolist()) for n in layers}
        kept = {n: layer.required(loads[n]) | used[n] for n, layer in layers.items()}
    pruned = {
        name: PrunedLayer(layer.strata, sorted(kept[name]), sizes[name])
        for name, layer in layers.items()
    }
    state = prune(args.path, pruned)
    write_converted(state, args.output, args.force)
    print(f"choices were counted over {args.gen_subset} of {', '.join(directions)}")
    print(_table(pruned, {n: np.sum([use[n].choices for use in uses], axis=0) for n in layers}))
    shrunk = (layer for name, layer in layers.items() if pruned[name].removed)
    if any(layer.gate.weights_depend_on_all for layer in shrunk):
        print(SOFTMAX)
    before, after = sum(parameters.values()), sum(state["model"][n].numel() for n in parameters)
    experts = sum(len(layer.experts) for layer in pruned.values())
    total = sum(layer.before.num_experts for layer in pruned.values())
    files = [f"{path.stat().st_size / 1e6:.1f} MB" for path in (args.output, args.path)]
    print(
        f"{experts} of {total} experts, {after:,} of {before:,} parameters ({after / before:.1%})\n"
        f"{args.output} has {files[0]}; {args.path} has {files[1]}, which may include its optimizer"
    )


def _check(args: Namespace) -> None:
    """Raise UsageError for missing, invalid or contradictory flags, or if the path is that of a set."""
    if (args.keep is None) == (args.min_load is None):
        flags = "neither --keep nor" if args.keep is None else "--keep with"
        expected = "a share of the experts to keep or the load of those to remove"
        raise UsageError(f"{flags} --min-load: expected one of the two, {expected}")
    if args.keep is not None and not 0 < args.keep <= 1:
        raise UsageError(f"--keep {args.keep:g}: expected a share above 0, up to 1, such as 0.5")
    if args.min_load is not None and not 0 <= args.min_load < math.inf:
        raise UsageError(f"--min-load {args.min_load:g}: expected a number of at least 0")
    if args.min_load is not None and args.over is not None:
        raise UsageError(f"--over {args.over} with --min-load: expected it with --keep")
    name = set_name(args.path)
    files = rank_files(name) | rank_files(name, PENDING)
    if rank_of(args.path) is not None or (files and not args.path.exists()):
        advice = f"make one checkpoint of it first, by smoe consolidate {name} --output FILE"
        raise UsageError(f"{args.path} is of a set with --expert-parallel: {advice}")


def _table(pruned: Mapping[str, PrunedLayer], choices: Mapping[str, ndarray]) -> str:
    """A row per layer: strata, experts, and the removed experts' share of the choices."""
    rows = [["layer", "strata", "", "kept", "removed", "their choices"]]
    for name, layer in pruned.items():
        lost = choices[name][layer.removed].sum() / max(choices[name].sum(), 1)
        numbers = (" ".join(map(str, e)) or "-" for e in (layer.experts, layer.removed))
        rows.append([name.replace(".", " "), layer.before, layer.after, *numbers, f"{lost:.1%}"])
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
