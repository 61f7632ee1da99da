"""Does the model fit into this machine's memory? Reckoned before anything of it is made.

A typing error in ``--smoe-strata`` asks for terabytes, which a machine goes on trying to give until it
stands still. Weights are made in float32 in main memory, whatever is trained in and on, so what they take
is the least that there has to be.
"""

import torch
import torch.distributed as dist

from smoe_fairseq.models.config import DecoderOptions
from smoe_fairseq.models.moe_options import flag
from smoe_fairseq.system.memory import machine_memory

BYTES = 4  # of a weight
# Modules and tensors as Python objects: what is left on the meta device, where weights take no memory.
LAYER_OBJECTS, GATE_OBJECTS = 50_000, 5_000


def check_size(config: DecoderOptions, task) -> None:
    """Raise ValueError with one sentence that names the flags of the part that is too large.

    The config's sizes have to be positive numbers.
    """
    memory = machine_memory()
    on_meta = torch.empty(0).is_meta  # for its shapes alone
    sizes = {
        part: objects + (0 if on_meta else BYTES * weights)
        for part, (weights, objects) in _parts(config, task).items()
    }
    if memory is None or sum(sizes.values()) <= memory:
        return
    largest = max(sizes, key=sizes.get)
    raise ValueError(
        f"{largest}: the model would take {_readable(sum(sizes.values()))}, of which this part takes "
        f"{_readable(sizes[largest])}; expected one that fits into the {_readable(memory)} of memory here"
    )


def _parts(config: DecoderOptions, task) -> dict[str, tuple[int, int]]:
    """(weights, bytes of objects) of each part of the model, by the flags that make it large."""
    processes = 1
    if config.expert_parallel and dist.is_initialized():
        processes = dist.get_world_size()
    parts = {}
    for side in config.SIDES:
        copies = _copies(config, side, task)
        attentions = 2 if side == "decoder" and "encoder" in config.SIDES else 1
        dim, ffn, layers = (
            getattr(config, f"{side}_{name}") for name in ("embed_dim", "ffn_embed_dim", "layers")
        )
        strata = config.strata_of(side)
        flags = f"--{side}-embed-dim {dim} --{side}-ffn-embed-dim {ffn} --{side}-layers {layers}"
        dense = layers if config.moe_cmr else layers - len(strata)
        parts[flags] = (
            copies * (layers * attentions * 4 * dim**2 + dense * 2 * dim * ffn),
            copies * layers * LAYER_OBJECTS,
        )
        width = config.moe_expert_ffn_dim or ffn
        experts = sum(each.num_experts for each in strata) * 2 * dim * width // processes
        gates = sum(map(len, strata))
        experts += (
            sum(sum(each.visible) for each in strata) + config.moe_null_experts * gates
        ) * dim
        beside = config.moe_shared_experts * width + config.moe_residual * ffn
        experts += len(strata) * 2 * dim * beside
        name = config.strata_option_of(side)
        parts[f"{flag(name)} {_short(getattr(config, name))} with {flags}"] = (
            copies * experts,
            copies * gates * GATE_OBJECTS,
        )
        # Positions that are computed have a table too.
        name = config.positions_option_of(side)
        positions = getattr(config, name)
        table = 0 if config.no_token_positional_embeddings else positions * dim
        parts[f"{flag(name)} {positions} with --{side}-embed-dim {dim}"] = (copies * table, 0)
        dictionary = task.source_dictionary if side == "encoder" else task.target_dictionary
        parts[f"--{side}-embed-dim {dim} and a dictionary of {len(dictionary)}"] = (
            _tables(config, side, copies) * len(dictionary) * dim,
            0,
        )
    return parts


def _copies(config: DecoderOptions, side: str, task) -> int:
    """How many encoders or decoders there are: with a model per language pair one for each language."""
    pairs = getattr(task, "model_lang_pairs", None)
    if pairs is None or getattr(config, f"share_{side}s", False):
        return 1
    return len({pair.split("-")[side == "decoder"] for pair in pairs})


def _tables(config: DecoderOptions, side: str, copies: int) -> int:
    """How many tables of words a side's copies have that no other has: of the input, and of the output."""
    if getattr(config, "share_all_embeddings", False):
        return 1 if side == "encoder" else 0
    inputs = 1 if getattr(config, f"share_{side}_embeddings", False) else copies
    if side == "encoder" or config.share_decoder_input_output_embed:
        return inputs
    return inputs + copies


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def _readable(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:,.0f} MiB"
    # Integers, since a float may be too small.
    return f"{size * 10 // 2**30 / 10:,.1f} GiB" if size < 2**60 else "more than an EiB"
