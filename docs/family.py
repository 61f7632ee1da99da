"""Writes the table of methods in docs/family.md: `python docs/family.py`.

With `--seconds N`, it first measures the times, in turns for N seconds, and writes them and the machine to
benchmarks/results/methods.json.
"""

import json
import re
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from smoe_fairseq.errors import quietly
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.methods import method_flags
from smoe_fairseq.recipes.program_flags import arguments
from smoe_fairseq.recipes.settings import Settings

PAGE = Path(__file__).with_suffix(".md")
TIMES = Path(__file__).parents[1] / "benchmarks/results/methods.json"
START, END = "<!-- methods, made by docs/family.py -->", "<!-- end -->"
DATASET, VOCABULARY = "m4", 32_000
STRATA = {"moe-fine": "31", "moe-hash-topk": "8", "pyramid": "4-4-8"}  # else 4-4, of a family
LAYERS = {"deep": "4", "pyramid": "6"}  # of each side, in the times
TOKENS, SENTENCES = 1024, 32


def methods() -> dict[str, tuple[str, str]]:
    """The family's or method's name, and its purpose in a sentence, by method."""
    found = {}
    for file in sorted((Settings.read().config_dir / "methods").glob("*.yaml")):
        text = file.read_text("utf-8")
        purpose = text.partition("\n")[0].strip("#. ")
        is_family = re.search(r"\{(strata|layers)\}", text)
        name = f"{file.stem}-{STRATA.get(file.stem, '4-4')}" if is_family else file.stem
        found[name] = file.stem, purpose
    return found


def words_of(method: str) -> list[str]:
    """The flags of a method's model at base size."""
    dataset = load_dataset(DATASET)
    return arguments(dataset.train | method_flags(method, dataset))


def table() -> str:
    from smoe_fairseq.analysis.cost import build_meta_model, count, parse_model

    times = json.loads(TIMES.read_text("utf-8"))["times"]
    lines = ["|method|what it is for|parameters|FLOPs|time|", "|---|---|--:|--:|--:|"]
    for method, (_, purpose) in methods().items():
        cost = count(build_meta_model(parse_model(words_of(method)), VOCABULARY))
        numbers = f"{cost.parameters / 1e6:.0f}|{cost.flops_per_token / 1e6:.0f}"
        time = f"{times[method]:.2f}" if method in times else "-"  # of a new one
        lines.append(f"|`{method}`|{purpose}|{numbers}|{time}|")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The text of the page with its table made anew."""
    before, after = page.split(START)
    return f"{before}{START}\n{table()}\n{END}{after.partition(END)[2]}"


def measured(seconds: float) -> dict:
    """The machine, and the time of a training step of each method divided by that of `moe`."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.timing import describe, in_turns, ratio
    from smoe_fairseq.analysis.cost import build_model, parse_model

    def step_of(stem: str, method: str):
        torch.manual_seed(1)
        layers = LAYERS.get(stem, "2")
        words = [*words_of(method), "--encoder-layers", layers, "--decoder-layers", layers]
        model = build_model(parse_model(words), 1000).train()
        tokens = torch.randint(4, 1000, (SENTENCES, TOKENS // SENTENCES))
        lengths = torch.full((SENTENCES,), tokens.shape[1])

        def step() -> None:
            model(tokens, lengths, tokens)[0].square().mean().backward()
            model.zero_grad()

        return step

    torch.set_num_threads(1)
    layers = {method: int(LAYERS.get(stem, "2")) for method, (stem, _) in methods().items()}
    steps = {method: step_of(stem, method) for method, (stem, _) in methods().items()}
    times = in_turns(steps, torch.device("cpu"), seconds, time.process_time)
    found = {name: 2 * ratio(times, name, "moe")["median"] / layers[name] for name in times}
    machine = describe(torch.device("cpu")) | {
        "command": f"python docs/family.py --seconds {seconds:g}"
    }
    return {"machine": machine, "times": {name: round(value, 2) for name, value in found.items()}}


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--seconds", type=float)
    args = parser.parse_args()
    with quietly():
        if args.seconds:
            TIMES.write_text(json.dumps(measured(args.seconds), indent=2) + "\n")
        PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
