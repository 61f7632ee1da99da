"""The experts of token types, for hash gates."""

import heapq

import torch
from fairseq.data import Dictionary
from torch import Tensor

from smoe_fairseq.models.moe_options import MoEOptions


def hash_table(config: MoEOptions, dictionary: Dictionary, experts: int) -> Tensor:
    """The expert, of so many, of each entry of a dictionary, ``(V,)``.

    "balanced" gives the entries, from the most frequent on, to the expert that has the fewest tokens so far
    (Roller et al. 2021), by the dictionary's counts.

    Raises:
        ValueError: the dictionary's counts do not tell its entries apart; one sentence.
    """
    if torch.empty(0).is_meta:  # a model made for its shapes alone, whose dictionary has no counts
        return torch.zeros(len(dictionary), dtype=torch.long)
    if str(config.moe_hash_table) == "random":
        generator = torch.Generator("cpu").manual_seed(config.moe_hash_seed)
        return torch.randint(experts, (len(dictionary),), generator=generator, device="cpu")
    if len(set(dictionary.count[dictionary.nspecial :])) < 2:
        raise ValueError(
            "--moe-hash-table balanced: the dictionary says of all its entries that they are equally "
            "frequent; expected counts of the training data as fairseq-preprocess writes them without "
            "--srcdict, or --moe-hash-table random"
        )
    table = torch.zeros(len(dictionary), dtype=torch.long, device="cpu")
    loads = [(0, expert) for expert in range(experts)]
    for index in sorted(range(len(dictionary)), key=lambda i: -dictionary.count[i]):
        load, expert = heapq.heappop(loads)
        table[index] = expert
        heapq.heappush(loads, (load + dictionary.count[index], expert))
    return table
