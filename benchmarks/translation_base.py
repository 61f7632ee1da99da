"""Times the beam search at base size in float32 and int8, dense and with experts, on untrained models.

    python -m benchmarks.translation_base --sentences 8 --length 16

All translations are forced to one length, so that every model makes the same number of steps. fairseq's
`SequenceGenerator` takes turns with ours on the dense model.
"""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.sequence_generator import SequenceGenerator

from benchmarks import machine, timing
from smoe_fairseq import models  # noqa: F401  (registers the architectures)
from smoe_fairseq.translate.int8 import quantize
from smoe_fairseq.translate.search import BeamSearch

BEAM = 5
SYSTEMS = {
    "dense": ("--moe-freq", "0"),
    "moe-8": ("--smoe-strata", "8"),
    "smoe-4-4": ("--smoe-strata", "4-4"),
    "smoe-2-2-2-2": ("--smoe-strata", "2-2-2-2"),
}


class Task:
    """What fairseq asks of a task to build a model: dictionaries of so many entries."""

    def __init__(self, vocabulary: int):
        self.source_dictionary = self.target_dictionary = Dictionary()
        for i in range(vocabulary - len(self.source_dictionary)):
            self.source_dictionary.add_symbol(f"w{i}")


def untrained(architecture: str, flags: tuple[str, ...], task: Task) -> torch.nn.Module:
    """A model of fairseq's flags, in evaluation mode."""
    torch.manual_seed(1)
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["data", "--arch", architecture, *flags])
    return build_model(convert_namespace_to_omegaconf(args).model, task).eval()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    task = Task(args.vocabulary)
    tokens_BS = torch.randint(4, args.vocabulary, (args.sentences, args.length + 1))
    tokens_BS[:, -1] = task.source_dictionary.eos()
    lengths = torch.full((args.sentences,), args.length + 1)
    sample = {"net_input": {"src_tokens": tokens_BS, "src_lengths": lengths}}
    # The end of sentence counts for fairseq's limits, and comes after that many tokens.
    limits = {"min_len": args.length, "max_len_b": args.length}
    search = BeamSearch(task.target_dictionary, BEAM, **limits)

    def ours(model) -> Callable[[], object]:
        return lambda: search.generate([model], sample)

    contenders = {}
    for name, flags in SYSTEMS.items():
        model = untrained(args.arch, flags, task)
        if name == "dense":
            fairseq = SequenceGenerator([model], task.target_dictionary, BEAM, **limits)
            contenders["fairseq dense"] = lambda fairseq=fairseq, model=model: fairseq.generate(
                [model], sample
            )
        contenders[name] = ours(model)
        quantized = copy.deepcopy(model)
        quantize(quantized)
        contenders[f"{name} int8"] = ours(quantized)
    times = timing.in_turns(contenders, torch.device("cpu"), args.seconds)
    run = machine.describe(torch.device("cpu")) | vars(args) | {"out": str(args.out)}
    run["rounds"] = len(times["dense"])
    run["speed"] = {n: timing.summary([args.sentences / t for t in times[n]]) for n in times}
    run["over_dense"] = {n: timing.ratio(times, n, "dense") for n in times if n != "dense"}
    run["int8_faster"] = {n: timing.ratio(times, n, f"{n} int8") for n in SYSTEMS}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps(run, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="smoe_transformer_base")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--length", type=int, default=30, help="of each text and translation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of turns, at least five")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/translation_base.json")
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
