"""Sharded experts beside replicated ones, in a step of one block: python -m benchmarks.processes

    python -m benchmarks.processes [--processes 2] [--tokens 2048] [--strata 4-4] [--cmr]

Processes on this machine, over gloo, one thread each. A step is forward and backward; replicated experts
then sum their gradients over the processes, sharded ones have exchanged tokens on the way. Prints the
ratio, and the share of the sharded step that passes in exchanges, waiting for the others included.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.system.memory import keep_freed_memory

ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of each process")
    parser.add_argument("--strata", default="4-4")
    parser.add_argument("--cmr", action="store_true", help="with a shared network; one stratum")
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--ffn-embed-dim", type=int, default=2048)
    parser.add_argument("--port", type=int, default=29511)
    args = parser.parse_args()
    multiprocessing.spawn(process, (args,), nprocs=args.processes)


def process(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    address = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=args.processes)
    options = dict(capacity_factor=0, second_expert_policy="all", strata=args.strata, cmr=args.cmr)
    blocks = {
        name: StratifiedMoE(
            args.embed_dim, args.ffn_embed_dim, **options, expert_parallel=name == "sharded"
        )
        for name in ("replicated", "sharded")
    }
    exchanges = Stopwatch()
    dist.all_to_all_single = exchanges.around(dist.all_to_all_single)  # of counts and of rows
    x_TD = torch.randn(args.tokens, args.embed_dim)
    times = {name: [] for name in blocks}
    shares = []
    for number in range(ROUNDS + 2):
        for name, block in blocks.items():
            exchanges.seconds = 0.0
            dist.barrier()
            start = time.perf_counter()
            step(block, x_TD)
            dist.barrier()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
                if name == "sharded":
                    shares.append(exchanges.seconds / times[name][-1])
    if rank == 0:
        ratios = [s / r for s, r in zip(times["sharded"], times["replicated"], strict=True)]
        found = {name: statistics.median(values) for name, values in times.items()}
        found |= {"sharded / replicated": statistics.median(ratios)}
        found |= {"share of exchanges": statistics.median(shares)}
        print(json.dumps({**vars(args), "torch": torch.__version__, **found}, indent=1))
    dist.destroy_process_group()


def step(block: StratifiedMoE, x_TD: torch.Tensor) -> None:
    block.zero_grad()
    y_TD, stats = block(x_TD.clone().requires_grad_())
    torch.autograd.backward(
        [y_TD, stats.balance_loss], [torch.ones_like(y_TD), stats.balance_loss.new_ones(())]
    )
    if not block.experts.placement.is_sharded:
        for parameter in block.experts.parameters():
            dist.all_reduce(parameter.grad)


class Stopwatch:
    """Seconds within the functions that it is put around, and waiting for what they have started."""

    def __init__(self):
        self.seconds = 0.0

    def around(self, function):
        def timed(*arguments, **options):
            start = time.perf_counter()
            try:
                started = function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start
            return started and Started(self.around(started.wait))

        return timed


class Started(NamedTuple):
    """Of a collective call that goes on, what its caller knows."""

    wait: Callable[[], bool]


if __name__ == "__main__":
    main()
