"""Times the block against the bare matrix products and against other packages' layers.

    python -m benchmarks.block [--quick] [--cases base/8/] [--device cuda --dtype bfloat16]

Each case of `layers.py`: our block, the floor and the peers in interleaved runs. After each case it
prints a line and writes everything so far to OUT as JSON.
"""

import argparse
import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import layers, timing
from benchmarks.peers import PEERS, agreement, check_room
from smoe_fairseq.host_memory import keep_freed_memory


def main() -> None:
    args = parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    # As fairseq-train does with the plugin; this helps the floor and the peers, too.
    kept = device.type == "cpu" and keep_freed_memory()
    cases = layers.quick() if args.quick else layers.full()
    chosen = [case for case in cases if re.search(args.cases, str(case))]
    clock = time.process_time if args.cpu_time else time.perf_counter
    run = {**timing.describe(device), "dtype": args.dtype, "keeps_memory": kept, "cases": []}
    print(f"{run['device']}, {run['cpu']}, {run['threads']} threads")
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
    parser.add_argument("--cases", default="", help="regular expression, such as base/8/")
    parser.add_argument("--seconds", type=float, default=10, help="per case, five rounds at least")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; not on a GPU")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/block.json"))
    return parser.parse_args()


def time_case(
    case: layers.Case,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    peers: list[str],
    clock: Callable[[], float],
) -> dict:
    torch.manual_seed(0)
    train = case.mode == "train"
    block = layers.make_block(case, device, dtype)
    x_TD = torch.randn(case.tokens, case.embed_dim, device=device, dtype=dtype)
    counts_LE = layers.routed_tokens(block, x_TD)
    floor = layers.BareProducts(case.embed_dim, case.ffn_embed_dim, counts_LE).to(device, dtype)
    modules = {"ours": layers.Ours(block).train(train)}
    checked, left_out = {}, {}
    for name in peers if case.strata == "8" else []:  # they have one stratum
        try:
            check_room(PEERS[name], case, device)
            modules[name] = PEERS[name](block).to(device, dtype).train(train)
            checked[name] = agreement(block, modules[name], x_TD)
        except Exception as error:  # whatever another package raises
            left_out[name] = f"{type(error).__name__}: {error}"
            modules.pop(name, None)
    steps = {name: layers.block_step(module, x_TD, train) for name, module in modules.items()}
    steps["floor"] = layers.floor_step(floor, x_TD, train)
    times = timing.in_turns(steps, device, seconds, clock)
    return {
        "case": str(case),
        **{key: getattr(case, key) for key in ("size", "strata", "tokens", "mode")},
        "routed": sum(map(sum, counts_LE)),
        "touched": sum(n > 0 for counts_E in counts_LE for n in counts_E),
        "rounds": len(times["ours"]),
        "seconds": {name: timing.summary(values) for name, values in times.items()},
        "over_floor": {name: timing.ratio(times, name, "floor") for name in times},
        "over_ours": {name: timing.ratio(times, name, "ours") for name in times},
        "agreement": checked,
        "left_out": left_out,
        "memory": {
            name: timing.memory_of(steps[name], module, train, device)
            for name, module in {"floor": floor, **modules}.items()
        },
    }


def line(result: dict) -> str:
    text = f"{result['case']:32} floor {result['seconds']['floor']['median'] * 1000:9.2f} ms"
    for name, ratio in result["over_floor"].items():
        if name != "floor":
            text += f"  {name} {ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
    return text + "".join(f"\n    {name} left out: {e}" for name, e in result["left_out"].items())


if __name__ == "__main__":
    main()
