"""Times the block against the bare matrix products and against other packages' layers.

    python -m benchmarks.block [--quick] [--cases base/8/] [--device cuda --dtype bfloat16]

For each case of `contenders.py`: ours, the floor and the peers in turns; prints a line, and writes
everything to OUT as JSON when the case is done.
"""

import argparse
import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import contenders, memory, timing
from benchmarks.contenders import BareProducts, routed_tokens
from benchmarks.peers import PEERS, agreement
from smoe_fairseq.host_memory import keep_freed_memory


def main() -> None:
    args = parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    # As fairseq-train does with the plugin; the floor and the peers profit as well.
    kept = device.type == "cpu" and not args.fresh_memory and keep_freed_memory()
    chosen = [
        case
        for case in (contenders.quick() if args.quick else contenders.full())
        if re.search(args.cases, str(case)) and case.tokens <= args.max_tokens
    ]
    clock = time.process_time if args.cpu_time else time.perf_counter
    run = {**timing.describe(device), "dtype": args.dtype, "keeps_memory": kept, "cases": []}
    print(
        f"{run['device']}, {run['cpu']}, {run['threads']} threads, torch {run['versions']['torch']}"
    )
    for i, case in enumerate(chosen):
        result = time_case(case, device, dtype, args.seconds, args.peers, clock)
        run["cases"].append(result)
        print(f"[{i + 1}/{len(chosen)}] {line(result)}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(run, indent=1))
        gc.collect()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a subset, about three minutes")
    parser.add_argument(
        "--cases", default="", help="only those whose name matches, such as base/8/"
    )
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=10, help="per case, five rounds at least")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the process, for a busy machine; not on a GPU"
    )
    parser.add_argument(
        "--fresh-memory",
        action="store_true",
        help="leave malloc alone (smoe_fairseq/host_memory.py)",
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/block.json"))
    return parser.parse_args()


def time_case(
    case: contenders.Case,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    peers: list[str],
    clock: Callable[[], float] = time.perf_counter,
) -> dict:
    torch.manual_seed(0)
    train = case.mode == "train"
    block = contenders.make_block(case, device, dtype)
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=dtype)
    counts_LE = routed_tokens(block, x_TD)
    floor = BareProducts(case.embed_dim, case.ffn_embed_dim, counts_LE).to(device, dtype)
    modules = {"floor": floor, "ours": contenders.Ours(block).train(train)}
    checked, left_out = {}, {}
    for name in peers if case.has_peers else []:
        try:
            if PEERS[name].has_capacity_tensors:
                memory.check_room(case, device)
            modules[name] = PEERS[name](block).to(device, dtype).train(train)
            checked[name] = agreement(block, modules[name], x_TD)
        except Exception as error:  # whatever is wrong with a peer, the others are timed
            left_out[name] = f"{type(error).__name__}: {error}"
            modules.pop(name, None)
    steps = {
        name: (contenders.floor_step if name == "floor" else contenders.block_step)(
            module, x_TD, train
        )
        for name, module in modules.items()
    }
    times = timing.in_turns(steps, device, seconds, clock)
    return {
        "case": str(case),
        **vars(case),
        "routed": sum(map(sum, counts_LE)),
        "touched": sum(n > 0 for counts_E in counts_LE for n in counts_E),
        "rounds": len(times["ours"]),
        "seconds": {name: timing.summary(values) for name, values in times.items()},
        "over_floor": {name: timing.ratio(times, name, "floor") for name in times},
        "over_ours": {name: timing.ratio(times, name, "ours") for name in times},
        "agreement": checked,
        "left_out": left_out,
        "memory": {name: memory.of(steps[name], modules[name], train, device) for name in steps},
    }


def line(result: dict) -> str:
    ratios = result["over_floor"]
    text = f"{result['case']:32} floor {result['seconds']['floor']['median'] * 1000:9.2f} ms"
    for name, ratio in ratios.items():
        if name != "floor":
            text += f"  {name} {ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
    kinds = [kind for kind in ("saved", "peak") if result["memory"]["floor"][kind]]
    for kind in kinds:
        text += f"  {kind} {result['memory']['ours'][kind] / result['memory']['floor'][kind]:.2f}"
    for name, found in result["agreement"].items():
        text += (
            f"\n    {name}: {found['same_tokens']:.1%} of tokens routed as ours, outputs there differ by "
            f"{found['difference']:.1e}, {found['copies']:.1%} of our copies"
        )
    for name, reason in result["left_out"].items():
        text += f"\n    {name} left out: {reason}"
    return text


if __name__ == "__main__":
    main()
