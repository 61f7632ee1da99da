"""``smoe prune``: a checkpoint without the experts that are used little."""

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.record import hooked, run_direction
from smoe_fairseq.checkpoints.average import weights_of
from smoe_fairseq.checkpoints.io import PENDING, RECORD, Record, rank_files, rank_of, set_name
from smoe_fairseq.errors import UsageError, positive, quietly
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.gates.base import BaseGate
from smoe_fairseq.modules.gates.depths import DepthsGate
from smoe_fairseq.modules.gates.relu import ReLUGate
from smoe_fairseq.modules.gates.threshold import ThresholdGate
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.layer import StratifiedMoE
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.strata import Strata

_ROUNDING = 1e-9  # 0.1 of 10 experts is one, whatever floats make of it


@dataclass(frozen=True)
class Layer:
    """What has to be known of a MoE layer: its strata, `fewest_of` its gates, and `weighs_all` of them."""

    strata: Strata
    fewest: int
    weighs_all: bool = False

    @classmethod
    def of(cls, block: StratifiedMoE) -> "Layer":
        gate = block.gates[0]  # all are of one kind
        return cls(block.strata, fewest_of(gate), weighs_all(gate))

    def required(self, score_E: ndarray) -> set[int]:
        """The experts that stay however little they are used: the best ones of the strata that need some."""
        strata = self.strata
        needy = range(len(strata.sizes)) if strata.stacked else [len(strata.sizes) - 1]
        return {
            expert
            for stratum in needy
            for expert in ranked(
                score_E, [e for e, s in enumerate(strata.stratum_of_expert) if s == stratum]
            )[: self.fewest]
        }

    def after(self, kept: set[int]) -> Strata:
        """The strata of the experts that stay."""
        strata = self.strata
        of_kept = [strata.stratum_of_expert[expert] for expert in kept]
        sizes = tuple(of_kept.count(stratum) for stratum in range(len(strata.sizes)))
        return Strata(sizes, strata.stacked, strata.chain)


def fewest_of(gate: nn.Module) -> int:
    """Experts that a gate has to see: those that it chooses, null ones aside, and one at least."""
    if isinstance(gate, ReLUGate | ThresholdGate):
        return gate.goal
    return max(1, gate.top_k - gate.free_experts) if isinstance(gate, TopKGate) else 1


def weighs_all(gate: nn.Module) -> bool:
    """Whether experts that a gate does not choose have a part in its decisions, by the softmax over all.

    They have none where the weights of the chosen ones are divided by their sum, or where each expert
    has its score by itself.
    """
    if isinstance(gate, TopKGate):
        return gate.scores == "softmax" and (gate.normalization == "none" or gate.bias is not None)
    return not isinstance(gate, BaseGate | ReLUGate | ThresholdGate | DepthsGate)


def ranked(score_E: ndarray, experts: list[int]) -> list[int]:
    """These experts, the best first; of equals that of the lower number."""
    return sorted(experts, key=lambda expert: (-score_E[expert], expert))


def keep_share(
    layers: Mapping[str, Layer], importance: Mapping[str, ndarray], share: float, over_all: bool
) -> dict[str, set[int]]:
    """The most important experts, ``ceil(share E)`` of them and at least those that gates need.

    Args:
        importance: ``(E,)`` of each layer.
        over_all: E is that of all layers together, and so is the ranking; else of each layer by itself.
    """
    if not over_all:
        return {
            name: keep_share({name: layer}, {name: importance[name]}, share, True)[name]
            for name, layer in layers.items()
        }
    kept = {name: layer.required(importance[name]) for name, layer in layers.items()}
    others = [
        (-importance[name][expert], place, expert, name)
        for place, (name, layer) in enumerate(layers.items())
        for expert in range(layer.strata.num_experts)
        if expert not in kept[name]
    ]
    total = sum(layer.strata.num_experts for layer in layers.values())
    room = math.ceil(share * total - _ROUNDING) - sum(map(len, kept.values()))
    for *_, expert, name in sorted(others)[: max(room, 0)]:
        kept[name].add(expert)
    return kept


def keep_loaded(
    layers: Mapping[str, Layer], loads: Mapping[str, ndarray], min_load: float
) -> dict[str, set[int]]:
    """Experts with a load above ``min_load``, and those that gates need.

    Args:
        loads: ``(E,)`` of each layer, see `Use.load`.
    """
    return {
        name: layer.required(loads[name])
        | {expert for expert, load in enumerate(loads[name].tolist()) if load > min_load}
        for name, layer in layers.items()
    }


# What directions use the experts for: choices of the gates and their confidence, by teacher
# forcing.
#
# Shapes: E experts, K choices per token.


@dataclass(frozen=True)
class Use:
    """What one direction, or several, use the experts of one MoE layer for; all its gates taken together.

    Args:
        choices: ``(E,)``, how often an expert was chosen, as first or as further expert.
        importance: ``(E,)``, see `LayerRecorder.importance`.
    """

    choices: ndarray
    importance: ndarray

    @property
    def load(self) -> ndarray:
        """``(E,)``: choices of each expert over their mean in the layer; 0: it was never chosen."""
        return self.choices / max(self.choices.mean(), 1e-12)


class LayerRecorder:
    """Sums over what the gates of one MoE layer decide, ``(E,)``, while a model runs."""

    def __init__(self, num_experts: int, device: torch.device):
        self.tokens = 0
        self.firsts, self.confidence, self.choices = (
            torch.zeros(num_experts, dtype=torch.float64, device=device) for _ in range(3)
        )

    def record(self, first_expert: int, is_first: bool, routing: Routing) -> None:
        """One gate has decided, which sees the experts from ``first_expert`` on; padding counts nowhere."""
        seen = slice(first_expert, first_expert + routing.num_experts)
        active_T = routing.active_T
        choice_T = routing.first_choice_T[active_T]
        confidence_T = routing.probs_TE[active_T].gather(1, choice_T.unsqueeze(1)).squeeze(1)
        firsts_E = routing.first_choices_E.double()
        self.tokens += int(active_T.sum()) if is_first else 0
        self.firsts[seen] += firsts_E
        self.confidence[seen].index_add_(0, choice_T, confidence_T.double())
        # The first choice decides where a token goes on even if null experts are all that it gets.
        self.choices[seen] += torch.maximum(routing.kept_E.double(), firsts_E)

    def use(self) -> Use:
        return Use(self.choices.cpu().numpy(), self.importance().cpu().numpy())

    def importance(self) -> torch.Tensor:
        """Rate of first choices x exp(mean confidence of these), ``(E,)`` (Koishekenov et al. 2023).

        The rate is per token of the layer, the confidence a gate's probability of its first choice.
        """
        mean = self.confidence / self.firsts.clamp(min=1)
        return self.firsts / max(self.tokens, 1) * mean.exp()


def use_of(
    model: nn.Module,
    task,
    directions: Iterable[str],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
) -> Iterator[dict[str, Use]]:
    """Of one direction after the other, by MoE layer (see `moe_blocks`), over all tokens, special ones too.

    Arguments and errors are those of `collect`.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def run(net_input: dict) -> None:
        model(**net_input)

    for name in directions:
        with _recording(model, device) as recorders:
            run_direction(run, model, task, name, subset, sentences, max_tokens)
        yield {layer: recorder.use() for layer, recorder in recorders.items()}


def together(uses: Sequence[dict[str, Use]]) -> dict[str, Use]:
    """Of several directions: all choices, and the mean importance, to which each adds the same."""
    return {
        layer: Use(
            np.sum([use[layer].choices for use in uses], axis=0),
            np.mean([use[layer].importance for use in uses], axis=0),
        )
        for layer in uses[0]
    }


def highest_load(uses: Sequence[dict[str, Use]]) -> dict[str, ndarray]:
    """``(E,)`` of each layer: the load in the direction where it is highest."""
    return {layer: np.max([use[layer].load for use in uses], axis=0) for layer in uses[0]}


@contextmanager
def _recording(model: nn.Module, device: torch.device) -> Iterator[dict[str, LayerRecorder]]:
    recorders, hooks = {}, []
    for layer, block in moe_blocks(model).items():
        recorders[layer] = LayerRecorder(block.strata.num_experts, device)
        for i, gate in enumerate(block.gates):
            first = block.strata.first_experts[i]
            hooks.append((gate, _listener(recorders[layer], first, i == 0)))
    with hooked(hooks):
        yield recorders


def _listener(recorder: LayerRecorder, first_expert: int, is_first: bool):
    def listen(gate, inputs, routing):
        recorder.record(first_expert, is_first, routing)

    return listen


# Takes experts out of a checkpoint: their weights, the gates' rows for them, and what its settings
# say.

_EXPERTS = re.compile(r"experts\.(w1|b1|w2|b2)")
# Null experts have weights of their own.
_GATE = re.compile(r"gates\.(\d+)\.(weight|bias\.steps|threshold\.steps)")


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
        state[RECORD] = replace(record, num_experts=first, other_layers=others).as_dict()
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


# ``smoe prune``: a checkpoint without the experts that some directions use little.

with quietly():
    from smoe_fairseq.analysis import inputs
    from smoe_fairseq.checkpoints.sets import check_output, write_converted
    from smoe_fairseq.models.transformer import moe_blocks
    from smoe_fairseq.modules.gates.hashed import HashGate

OVER = ("layer", "all")
SOFTMAX = (
    "note: these gates' decisions go by probabilities over all experts that they see, so that translations "
    "differ, if little, even without experts that were never chosen"
)


def add_prune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="CHECKPOINT")
    parser.add_argument("data", metavar="DATA", help="binarised data, as fairseq-train takes it")
    parser.add_argument(
        "--lang-pairs",
        metavar="PAIRS",
        help="the directions that the model is for, such as en-cs,cs-en; default: all of the checkpoint",
    )
    parser.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="keep this share of the experts, above 0 up to 1: those of highest importance, which is the "
        "rate of first choices x exp(mean confidence of these)",
    )
    parser.add_argument(
        "--over",
        choices=OVER,
        help="what --keep is a share of: the experts of each MoE layer, or of all; default: layer",
    )
    parser.add_argument(
        "--min-load",
        type=float,
        metavar="LOAD",
        help="in place of --keep: remove experts whose load, which is their choices over the mean of "
        "their layer, is above this in no direction; 0 removes those that were never chosen",
    )
    parser.add_argument(
        "--gen-subset",
        default="valid",
        help="train, valid or test: what is counted; default: valid",
    )
    parser.add_argument(
        "--sentences", type=positive, metavar="N", help="a random sample of N per direction"
    )
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a batch")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run_prune(args: Namespace) -> None:
    """Counts, chooses, writes, and says what is left."""
    check_request(args)
    check_is_one_file(args.path)
    check_output([args.path], [args.output], args.force)
    with quietly():
        model, task, directions = inputs.load_sparse_model(
            args.path, args.data, args.lang_pairs, args.cpu
        )
        blocks = moe_blocks(model)
        if any(isinstance(gate, HashGate) for block in blocks.values() for gate in block.gates):
            raise UsageError(
                f"{args.path} has --moe-gate hash, which looks an expert up for every token of the "
                "dictionary, so that each is needed; expected a gate that scores them"
            )
        of_subset = args.gen_subset, args.sentences, args.max_tokens
        uses = list(use_of(model, task, directions, *of_subset))
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = {name: Layer.of(block) for name, block in blocks.items()}
    del model, blocks
    use = together(uses)
    if args.keep is not None:
        importance = {name: layer.importance for name, layer in use.items()}
        kept = keep_share(layers, importance, args.keep, args.over == "all")
    else:
        kept = keep_loaded(layers, highest_load(uses), args.min_load)
    pruned = {name: PrunedLayer.of(layers[name], kept[name]) for name in layers}
    state = prune(args.path, pruned)
    write_converted(state, args.output)
    print(f"choices counted over {args.gen_subset} of {', '.join(directions)}")
    print(table(pruned, use))
    left = sum(state["model"][name].numel() for name in parameters)
    if any(layer.weighs_all and pruned[name].removed for name, layer in layers.items()):
        print(SOFTMAX)
    print(summary(args, pruned, sum(parameters.values()), left))


def check_request(args: Namespace) -> None:
    """Raise UsageError unless it is clear how much is to stay."""
    if (args.keep is None) == (args.min_load is None):
        raise UsageError(
            f"{'neither --keep nor' if args.keep is None else '--keep with'} --min-load: expected one of "
            "the two, a share of the experts to keep or the load of those to remove"
        )
    if args.keep is not None and not 0 < args.keep <= 1:
        raise UsageError(f"--keep {args.keep:g}: expected a share above 0, up to 1, such as 0.5")
    if args.min_load is not None and not 0 <= args.min_load < math.inf:
        raise UsageError(f"--min-load {args.min_load:g}: expected a number of at least 0")
    if args.min_load is not None and args.over is not None:
        raise UsageError(f"--over {args.over} with --min-load: expected it with --keep")


def table(pruned: Mapping[str, PrunedLayer], use: Mapping[str, Use]) -> str:
    """A row for each layer: strata, experts, and what share of the choices were of those removed."""
    rows = [("layer", "strata", "", "kept", "removed", "their choices")]
    for name, layer in pruned.items():
        choices = use[name].choices
        lost = choices[layer.removed].sum() / max(choices.sum(), 1)
        rows.append(
            (
                name.replace(".", " "),
                str(layer.before),
                str(layer.after),
                _numbers(layer.experts),
                _numbers(layer.removed),
                f"{lost:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _numbers(experts: list[int]) -> str:
    return " ".join(map(str, experts)) or "-"


def summary(args: Namespace, pruned: Mapping[str, PrunedLayer], before: int, after: int) -> str:
    experts = sum(len(layer.experts) for layer in pruned.values())
    of_all = sum(layer.before.num_experts for layer in pruned.values())
    sizes = [f"{path.stat().st_size / 1e6:.1f} MB" for path in (args.output, args.path)]
    return (
        f"{experts} of {of_all} experts, {after:,} of {before:,} parameters ({after / before:.1%})\n"
        f"{args.output}: {sizes[0]}; {args.path} has {sizes[1]}, with what training keeps beside the weights"
    )
