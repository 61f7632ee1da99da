"""Other packages' layers on a GPU, those of benchmarks/peers.py that are installed.

Shapes: T tokens, D embedding.
"""

import importlib.util
from collections.abc import Iterator

import torch

from benchmarks.contenders import Ours, block_step, make_block
from benchmarks.gpu.fast import Case
from benchmarks.gpu.parts import Context
from benchmarks.peers import PEERS, Peer, agreement
from benchmarks.timing import in_turns, ratio


def installed() -> dict[str, type[Peer]]:
    """By the name of the package; one may be there and still not be usable."""
    modules = {"st-moe-pytorch": "st_moe_pytorch"}
    return {n: p for n, p in PEERS.items() if importlib.util.find_spec(modules.get(n, n))}


def peers(context: Context) -> Iterator[dict]:
    """Forward and backward of each installed peer, top-2 of 8 experts, beside our block.

    In bf16; a rehearsal on the CPU is in fp32, in which all of them run there.
    ``ratio`` is of the peer's time over ours. A peer that fails is no failure of ours.
    """
    found = installed()
    for name in sorted(PEERS.keys() - found.keys()):
        yield {"case": f"{name}: not installed", "ok": None}
    for tokens, width in [(64, 16)] if context.tiny else [(16384, 512), (16384, 1024)]:
        case = Case("8", tokens, width, 4 * width, "train")
        for name, peer in found.items():
            result = {"case": f"{name}, {tokens} tokens, D {width}", "ok": None}
            try:
                result |= compare(peer, case, context)
            except Exception as error:  # whatever another package raises
                result["error"] = f"{type(error).__name__}: {error}"[:300]
            yield result


def compare(kind: type[Peer], case: Case, context: Context) -> dict:
    """Compares a peer's outputs with those of our block, and times both in turns."""
    torch.manual_seed(1)
    device = torch.device(context.device)
    block = make_block(case, torch.device("cpu"), torch.float32)
    peer = kind(block)
    dtype = torch.float32 if context.tiny else torch.bfloat16
    block, peer = (module.to(device, dtype) for module in (block, peer))
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=dtype)
    block.eval(), peer.eval()
    same = {"same tokens": agreement(block, peer, x_TD)["same_tokens"]}
    block.train(), peer.train()
    steps = {"ours": block_step(Ours(block), x_TD, True), "peer": block_step(peer, x_TD, True)}
    times = in_turns(steps, device, 0.1 if context.tiny else 1.0)
    medians = {name: 1000 * sorted(of)[len(of) // 2] for name, of in times.items()}
    ratios = {"ratio": ratio(times, "peer", "ours")["median"]}
    return {"ms": medians["peer"], "our ms": medians["ours"], **ratios, **same}
