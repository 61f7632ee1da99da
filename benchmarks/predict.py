"""How long the bare products of a whole program take, those of a dense model and those that were routed."""

import statistics

import torch

from benchmarks import contenders, timing
from benchmarks.floor import BareProducts

MOST_PASSES = 60


def bare_seconds(
    passes: list[dict], embed_dim: int, ffn_embed_dim: int, layers: int, train: bool
) -> dict[str, float]:
    """Seconds of the bare products of all ``passes`` through MoE layers, dense and routed.

    Args:
        passes: as `record_routing.py` writes them; of many, an even sample is timed and scaled up.
        layers: MoE layers of the model. Each has weights of its own, since the next one's drive those
            of the last out of the caches.
    """
    every = max(1, len(passes) // MOST_PASSES)
    # In order, so that as in the program each layer follows the one before it; odd steps meet all of them.
    sample = passes[:: every + 1 - every % 2] if every > 1 else passes
    num_experts = len(passes[0]["counts_LE"][0])
    routed_layers = [
        BareProducts(embed_dim, ffn_embed_dim, [[0] * num_experts]) for _ in range(layers)
    ]
    dense_layers = [BareProducts(embed_dim, ffn_embed_dim, [[0]]) for _ in range(layers)]

    def steps(modules, counts):
        result = []
        for i, one in enumerate(sample):
            floor = modules[i % layers]
            floor.counts_LE = counts(one)
            result.append(contenders.floor_step(floor, torch.empty(0), train))
        return lambda: [step() for step in result]

    times = timing.in_turns(
        {
            "dense": steps(dense_layers, lambda one: [[one["tokens"]]]),
            "routed": steps(routed_layers, lambda one: one["counts_LE"]),
        },
        torch.device("cpu"),
        seconds=20,
    )
    scale = len(passes) / len(sample)
    return {name: statistics.median(values) * scale for name, values in times.items()}
