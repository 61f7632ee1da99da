"""Members of the wider family beside the vanilla top-2 mixture: a training step of one block, in turns.

python -m benchmarks.family [--tokens 2048] [--seconds 60] [--members "chain of 2"]
python -m benchmarks.family --assignment --tokens 4096
"""

from argparse import ArgumentParser

import torch

from benchmarks.machine import describe
from benchmarks.timing import in_turns, measure, ratio
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.gates.base import balanced_assignment

DIM, WIDTH, EXPERTS, VOCABULARY = 512, 2048, 8, 1000
MEMBERS = {
    "topk": {},
    "topk, top-1": dict(top_k=1),
    "topk, top-4": dict(top_k=4, capacity_factor=4.0),
    "top-p": dict(gate="top-p", capacity_factor=0.0),
    "relu": dict(gate="relu", capacity_factor=0.0),
    "threshold": dict(gate="threshold", capacity_factor=0.0),
    "depths": dict(strata="1", gate="depths", top_k=1, capacity_factor=0.5),
    "hash": dict(gate="hash"),
    "base": dict(gate="base"),
    "expert-choice": dict(gate="expert-choice"),
    "null experts, top-4 of 8 + 8": dict(top_k=4, null_experts=8, capacity_factor=4.0),
    "residual, top-1": dict(top_k=1, residual=True),
    "shared, 1 + top-1": dict(top_k=1, shared_experts=1),
    "fine-grained, 1 + top-7 of 32, F / 4": dict(
        strata="32", top_k=7, shared_experts=1, expert_ffn_dim=WIDTH // 4, capacity_factor=7.0
    ),
    "bias": dict(balance="bias", second_expert_policy="all"),
    "sigmoid": dict(scores="sigmoid", balance="bias", second_expert_policy="all"),
    "MoE++": dict(
        null_experts=1,
        copy_experts=1,
        constant_experts=6,
        gate_residual="layers",
        gate_normalization="none",
        second_expert_policy="all",
    ),
    "over an update": dict(balance_over="update"),
    "chain of 2": dict(chain=2),
}


def training_step(options: dict, tokens: int):
    torch.manual_seed(1)
    if options.get("gate") == "hash":
        options = {**options, "hash_table": torch.randint(EXPERTS, (VOCABULARY,))}
    block = StratifiedMoE(DIM, WIDTH, **{"strata": str(EXPERTS), **options})
    x = torch.randn(tokens // 32, 32, DIM, requires_grad=True)
    ids = torch.randint(VOCABULARY, x.shape[:-1])
    experts = []

    def step():
        y, stats = block(x, ids=ids)
        (y.square().mean() + 0.01 * stats.balance_loss).backward()
        if stats.observed is not None:
            block.end_update(stats.observed)
        experts.append(int((stats.chosen - stats.dropped).sum()) / tokens)

    return step, experts


def time_assignment(tokens: int) -> None:
    """BASE's, with affinities as at the start of training: shortest of nine."""
    for experts in (8, 32, 128):
        torch.manual_seed(1)
        affinity = torch.randn(tokens, DIM) @ (0.1 * torch.randn(experts, DIM) / DIM**0.5).t()
        cpu = torch.device("cpu")
        seconds = min(measure(lambda a=affinity: balanced_assignment(a), cpu) for _ in range(9))
        print(f"assignment of {tokens} tokens to {experts} experts: {seconds:.3f} s")


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--members", nargs="+", choices=MEMBERS, help="those alone, and topk")
    parser.add_argument("--assignment", action="store_true", help="BASE's alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.assignment:
        return time_assignment(args.tokens)
    names = ["topk", *args.members] if args.members else MEMBERS
    steps = {name: training_step(MEMBERS[name], args.tokens) for name in names}
    times = in_turns({n: step for n, (step, _) in steps.items()}, torch.device("cpu"), args.seconds)
    for name, value in describe(torch.device("cpu")).items():
        print(f"{name}: {value}")
    print(
        "\n| member | experts per token | time over topk | of the shortest times |\n|---|---|---|---|"
    )
    for name, (_, experts) in steps.items():
        found = ratio(times, name, "topk")
        print(f"| {name} | {experts[-1]:.2f} | {found['median']:.2f} | {found['best']:.2f} |")


if __name__ == "__main__":
    main()
