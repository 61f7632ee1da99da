"""Times the beam search at base size in float32 and int8, dense and with experts, on untrained models.

    python -m benchmarks.translation_base --sentences 8 --length 16

All translations are forced to one length, so that every model makes the same number of steps. fairseq's
`SequenceGenerator` takes turns with ours on the dense model, and so does CTranslate2 where it is installed.
Times are CPU time, which other programs on the machine hardly change, unless ``--elapsed`` asks for those of
the clock, which says more of several threads on a quiet machine. As in ``smoe translate``, malloc keeps
what is freed. The block's general way of inference ("NAME general") takes turns with the short one
(smoe_fairseq/modules/inference.py).
"""

import argparse
import copy
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from benchmarks import machine, timing
from smoe_fairseq import models  # noqa: F401  (registers the architectures)
from smoe_fairseq.checkpoints.export import write_ctranslate2
from smoe_fairseq.host_memory import keep_freed_memory
from smoe_fairseq.modules import inference
from smoe_fairseq.translate.int8 import quantize
from smoe_fairseq.translate.packed import pack
from smoe_fairseq.translate.search import BeamSearch, SearchOptions

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
    return build_model(parsed(architecture, flags).model, task).eval()


def parsed(architecture: str, flags: tuple[str, ...]):
    """fairseq's config of its training flags."""
    parser = options.get_training_parser()
    words = ["data", "--arch", architecture, "--source-lang", "a", "--target-lang", "b", *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))


def of_ctranslate2(
    model: torch.nn.Module, config, task: Task, tokens_BS: torch.Tensor, length: int, threads: int
) -> dict[str, Callable[[], object]]:
    """CTranslate2 in float32 and int8 on a dense model; none where it is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        return {}
    import ctranslate2

    texts = [[task.source_dictionary[i] for i in row[:-1]] for row in tokens_BS.tolist()]

    def contender(folder: str, compute_type: str) -> Callable[[], object]:
        translator = ctranslate2.Translator(
            folder, compute_type=compute_type, intra_threads=threads
        )
        return lambda: translator.translate_batch(
            texts,
            beam_size=BEAM,
            max_batch_size=len(texts),
            min_decoding_length=length,
            max_decoding_length=length,
        )

    with tempfile.TemporaryDirectory() as folder:
        for language in "ab":
            task.source_dictionary.save(f"{folder}/dict.{language}.txt")
        checkpoint = Path(folder, "checkpoint.pt")
        torch.save({"cfg": OmegaConf.to_container(config), "model": model.state_dict()}, checkpoint)
        write_ctranslate2(checkpoint, Path(folder, "model"), force=False)
        return {
            f"ctranslate2 {name}": contender(f"{folder}/model", name)
            for name in ("float32", "int8")
        }


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    task = Task(args.vocabulary)
    tokens_BS = torch.randint(4, args.vocabulary, (args.sentences, args.length + 1))
    tokens_BS[:, -1] = task.source_dictionary.eos()
    lengths = torch.full((args.sentences,), args.length + 1)
    sample = {"net_input": {"src_tokens": tokens_BS, "src_lengths": lengths}}
    # The end of sentence counts for fairseq's limits, and comes after that many tokens.
    limits = {"min_len": args.length, "max_len_b": args.length}
    search = BeamSearch(task.target_dictionary, SearchOptions(BEAM, **limits))

    def ours(model) -> Callable[[], object]:
        return lambda: search.generate([model], sample)

    def general(model) -> Callable[[], object]:
        def call():
            with mock.patch.object(inference, "applies", lambda *_: False):
                return search.generate([model], sample)

        return call

    contenders = {}
    for name in args.systems:
        flags = SYSTEMS[name]
        model = untrained(args.arch, flags, task)
        if name == "dense":
            fairseq = SequenceGenerator([model], task.target_dictionary, BEAM, **limits)
            contenders["fairseq dense"] = lambda fairseq=fairseq, model=model: fairseq.generate(
                [model], sample
            )
            contenders |= of_ctranslate2(
                model, parsed(args.arch, flags), task, tokens_BS, args.length, args.threads
            )
        for suffix, prepare in (("", pack), (" int8", quantize)):
            prepared = copy.deepcopy(model)
            prepare(prepared)
            contenders[name + suffix] = ours(prepared)
            if name != "dense" and not suffix:
                contenders[f"{name} general"] = general(prepared)
    clock = time.perf_counter if args.elapsed else time.process_time
    times = timing.in_turns(contenders, torch.device("cpu"), args.seconds, clock)
    run = machine.describe(torch.device("cpu")) | vars(args) | {"out": str(args.out)}
    run["rounds"] = len(next(iter(times.values())))
    run["speed"] = {n: timing.summary([args.sentences / t for t in times[n]]) for n in times}
    for over in {"dense", "dense int8", "ctranslate2 float32", "ctranslate2 int8"} & set(times):
        run[f"over {over}"] = {n: timing.ratio(times, n, over) for n in times if n != over}
    run["int8_faster"] = {n: timing.ratio(times, n, f"{n} int8") for n in args.systems}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps(run, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="smoe_transformer_base")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--length", type=int, default=30, help="of each text and translation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--elapsed", action="store_true", help="by the clock")
    parser.add_argument("--seconds", type=float, default=60, help="of turns, at least five")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/translation_base.json")
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
