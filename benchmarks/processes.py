"""Sharded experts beside replicated ones, in a step of one block: python -m benchmarks.processes

    python -m benchmarks.processes [--processes 2] [--tokens 2048] [--strata 4-4] [--cmr]

Processes on this machine, over gloo, one thread each. A step is forward and backward; replicated experts
then sum their gradients over the processes, sharded ones have exchanged tokens on the way. Prints the
ratio, and the share of the sharded step that passes in exchanges, waiting for the others included. With
--cmr there is a third contender, sharded experts whose outputs are waited for before anything else.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from smoe_fairseq.host_memory import keep_freed_memory
from smoe_fairseq.modules import StratifiedMoE

ROUNDS = 12


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
    names = ("replicated", "sharded", *(("waiting",) if args.cmr else ()))
    blocks = {
        name: StratifiedMoE(
            args.embed_dim, args.ffn_embed_dim, **options, expert_parallel=name != "replicated"
        )
        for name in names
    }
    if args.cmr:
        wait_first(blocks["waiting"])
    exchanges = Exchanges()
    dist.all_to_all_single = exchanges.around(dist.all_to_all_single)  # of counts and of rows
    x_TD = torch.randn(args.tokens, args.embed_dim)
    times = {name: [] for name in blocks}
    shares, sent = {name: [] for name in blocks}, {}
    for number in range(ROUNDS + 2):
        for name, block in blocks.items():
            exchanges.seconds, exchanges.bytes = 0.0, 0
            dist.barrier()
            start = time.perf_counter()
            step(block, x_TD)
            dist.barrier()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
                shares[name].append(exchanges.seconds / times[name][-1])
                sent[name] = exchanges.bytes
    if rank == 0:
        found = {name: statistics.median(values) for name, values in times.items()}
        for other in (name for name in names if name != "sharded"):
            ratios = [s / o for s, o in zip(times["sharded"], times[other], strict=True)]
            found[f"sharded / {other}"] = statistics.quantiles(ratios, n=4)
        for name in names[1:]:
            found[f"share of exchanges, {name}"] = statistics.median(shares[name])
        found["MiB of rows sent to others, sharded"] = sent["sharded"] / 2**20
        numel = sum(p.numel() for p in blocks["replicated"].experts.parameters())
        found["MiB of gradients sent, replicated"] = (
            2 * (args.processes - 1) / args.processes * 4 * numel / 2**20
        )
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


def wait_first(block: StratifiedMoE) -> None:
    """Lets it wait for the experts' outputs, and only then compute the shared network."""
    dispatcher = block.dispatcher

    def dispatch_first(x_TD, copies, run, weights, branches):
        *mixed, _ = dispatcher(x_TD, copies, run, weights, lambda: None)
        return *mixed, branches()

    block.dispatcher = dispatch_first


class Exchanges:
    """Seconds within exchanges, waiting for what they have started included, and bytes sent to others."""

    def __init__(self):
        self.seconds, self.bytes = 0.0, 0

    def around(self, all_to_all_single):
        def timed(output, given, received=None, sent=None, **options):
            if sent:
                own = sent[dist.get_rank()]
                self.bytes += (sum(sent) - own) * given[:1].numel() * given.element_size()
            work = self._time(all_to_all_single, output, given, received, sent, **options)
            return work and SimpleNamespace(wait=lambda: self._time(work.wait))

        return timed

    def _time(self, function, *arguments, **options):
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - start


if __name__ == "__main__":
    main()
