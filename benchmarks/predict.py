"""How long the bare products of a whole program take, those of a dense model and those that were routed."""

import statistics

import torch

from benchmarks import contenders, timing
from benchmarks.floor import BareProducts

MOST_PASSES = 130


def bare_seconds(
    passes: list[dict], embed_dim: int, ffn_embed_dim: int, train: bool
) -> dict[str, float]:
    """Seconds of the bare products of all ``passes`` through MoE layers, dense and routed.

    Args:
        passes: as `record_routing.py` writes them; of many, the first are timed and scaled up. Each
            layer has weights of its own, since one layer's drive those of the others out of the caches.
    """
    sample = passes[:MOST_PASSES]
    num_layers = 1 + max(one["layer"] for one in sample)
    num_experts = len(sample[0]["counts_LE"][0])

    def steps(num_networks, counts):
        layers = [
            BareProducts(embed_dim, ffn_embed_dim, [[0] * num_networks]) for _ in range(num_layers)
        ]
        calls = []
        for one in sample:
            floor = layers[one["layer"]]
            floor.counts_LE = counts(one)
            calls.append(contenders.floor_step(floor, torch.empty(0), train))
        return lambda: [call() for call in calls]

    times = timing.in_turns(
        {
            "dense": steps(1, lambda one: [[one["tokens"]]]),
            "routed": steps(num_experts, lambda one: one["counts_LE"]),
        },
        torch.device("cpu"),
        seconds=20,
    )
    scale = len(passes) / len(sample)
    return {name: statistics.median(values) * scale for name, values in times.items()}
