"""What the exit bias saves where experts are large: one block in evaluation with several biases, in turns.

python -m benchmarks.exits [--tokens 2048] [--seconds 60]
"""

import math
from argparse import ArgumentParser

import torch

from benchmarks.machine import describe
from benchmarks.timing import in_turns, ratio
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.gates.linear import exit_bias

DIM, WIDTH, STRATA = 512, 2048, ("4-4", "2-2-2-2")
BIASES = (-math.inf, 0.0, 1.0, 2.0, 4.0, math.inf)


@torch.no_grad()
def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=60, help="for each arrangement of strata")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in describe(torch.device("cpu")).items():
        print(f"{name}: {value}")
    print("\n| strata | bias | requested capacity | time over bias 0 |\n|---|---|---|---|")
    for strata in STRATA:
        torch.manual_seed(1)
        # Gates about as sure of themselves as trained ones.
        block = StratifiedMoE(DIM, WIDTH, strata, gate_init_scale=3.0).eval()
        x = torch.randn(args.tokens // 32, 32, DIM)

        def step(bias, block=block, x=x):
            with exit_bias(block, bias):
                return block(x)[1].requested_capacity

        steps = {str(bias): (lambda b=bias: step(b)) for bias in BIASES}
        times = in_turns(steps, torch.device("cpu"), args.seconds)
        for bias, call in steps.items():
            requested = call().double().mean()
            print(
                f"| {strata} | {bias} | {requested:.2f} | {ratio(times, bias, '0.0')['median']:.2f} |"
            )


if __name__ == "__main__":
    main()
