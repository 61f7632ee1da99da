"""Times the beam search on untrained models of any size: ours in float32 and int8, and CTranslate2.

    python -m benchmarks.decoding --systems dense moe-8 smoe-4-4 --sentences 1 16 --length 15

Calls take turns in one process; times are CPU time, which other programs change little. All translations
are forced to one length, so that every system takes the same number of steps. CTranslate2 is compared where
it is installed.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec as is_installed
from pathlib import Path

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from benchmarks import timing
from benchmarks.report import spread, table
from benchmarks.translation import ctranslate2_translators
from smoe_fairseq import models  # noqa: F401  (registers the architectures)
from smoe_fairseq.checkpoints.export import write_ctranslate2
from smoe_fairseq.host_memory import keep_freed_memory
from smoe_fairseq.translate.int8 import quantize
from smoe_fairseq.translate.packed import pack
from smoe_fairseq.translate.search import BeamSearch, SearchOptions

SYSTEMS = {
    "dense": ("--moe-freq", "0"),
    "moe-8": ("--smoe-strata", "8"),
    "smoe-4-4": ("--smoe-strata", "4-4"),
    "smoe-2-2-2-2": ("--smoe-strata", "2-2-2-2"),
}
OVER = "ctranslate2 float32", "ctranslate2 int8", "dense float32"


class Task:
    """What fairseq asks of a task to build a model: dictionaries of so many entries."""

    def __init__(self, vocabulary: int):
        self.source_dictionary = self.target_dictionary = Dictionary()
        for i in range(vocabulary - len(self.source_dictionary)):
            self.source_dictionary.add_symbol(f"w{i}")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    print(json.dumps(timing.describe(torch.device("cpu")), indent=1), flush=True)
    contenders = {sentences: {} for sentences in args.sentences}
    for name in args.systems:
        for sentences, of_system in systems(args, name).items():
            contenders[sentences] |= of_system
    for sentences, of_size in contenders.items():
        times = timing.in_turns(of_size, torch.device("cpu"), args.seconds, time.process_time)
        over = [each for each in OVER if each in times]
        rounds = len(next(iter(times.values())))
        print(f"\n{sentences} sentences, {rounds} rounds, medians with quartiles\n")
        rows = []
        for name, seconds in times.items():
            ms = timing.summary([1000 * each for each in seconds])
            ratios = [spread(timing.ratio(times, name, each)) for each in over]
            rows.append([name, f"{ms['median']:.0f} ({ms['low']:.0f}-{ms['high']:.0f})", *ratios])
        print(table(["system", "ms", *(f"over {each}" for each in over)], rows))


def systems(args, name: str) -> dict[int, dict[str, Callable[[], object]]]:
    """By number of sentences: a call for each way to compute the system ``name``."""
    task = Task(args.vocabulary)
    parser = options.get_training_parser()
    words = ["data", "--arch", args.arch, "--source-lang", "a", "--target-lang", "b"]
    config = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, [*words, *SYSTEMS[name]])
    )

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return build_model(config.model, task).eval()

    torch.manual_seed(1)
    size = max(args.sentences), args.length + 1
    tokens_BS = torch.randint(4, args.vocabulary, size)
    tokens_BS[:, -1] = task.source_dictionary.eos()
    # The end of sentence comes after that many tokens.
    limits = {"min_len": args.length, "max_len_b": args.length}
    search = BeamSearch(task.target_dictionary, SearchOptions(args.beam, **limits))
    calls = {}
    for compute_type, prepare in (("float32", pack), ("int8", quantize)):
        prepare(prepared := model())
        calls[f"{name} {compute_type}"] = partial(search.generate, [prepared])
    if name == "dense":
        plain = model()
        fairseq = SequenceGenerator([plain], task.target_dictionary, args.beam, **limits)
        calls["fairseq float32"] = partial(fairseq.generate, [plain])
        if is_installed("ctranslate2"):
            calls |= of_ctranslate2(args, plain, config, task.source_dictionary)
    samples = {number: {"src_tokens": tokens_BS[:number]} for number in args.sentences}
    for sample in samples.values():
        sample["src_lengths"] = torch.full((len(sample["src_tokens"]),), args.length + 1)
    return {
        number: {n: partial(call, {"net_input": sample}) for n, call in calls.items()}
        for number, sample in samples.items()
    }


def of_ctranslate2(args, model, config, dictionary) -> dict[str, Callable]:
    """CTranslate2 in float32 and int8 on a dense model."""
    with tempfile.TemporaryDirectory() as folder:
        for language in "ab":
            dictionary.save(f"{folder}/dict.{language}.txt")
        checkpoint, exported = Path(folder, "checkpoint.pt"), Path(folder, "model")
        torch.save({"cfg": OmegaConf.to_container(config), "model": model.state_dict()}, checkpoint)
        write_ctranslate2(checkpoint, exported, force=False, data=folder)
        translators = ctranslate2_translators(exported, args.threads)

    def call(translator, sample):
        rows = sample["net_input"]["src_tokens"].tolist()
        return translator.translate_batch(
            [[dictionary[i] for i in row[:-1]] for row in rows],
            beam_size=args.beam,
            max_batch_size=len(rows),
            min_decoding_length=args.length,
            max_decoding_length=args.length + 1,  # steps
        )

    return {name: partial(call, translator) for name, translator in translators.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="smoe_transformer_base")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=["dense", "moe-8", "smoe-4-4"]
    )
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--sentences", type=int, nargs="+", default=[1, 16], help="of a batch")
    parser.add_argument("--length", type=int, default=15, help="of each text and translation")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="five rounds at least")
    return parser.parse_args()


if __name__ == "__main__":
    main()
