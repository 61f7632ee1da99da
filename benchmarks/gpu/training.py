"""fairseq-train and fairseq-generate on a device, through their commands."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.fairseq_runs import PACKAGE, updates
from benchmarks.gpu.parts import Context
from benchmarks.synthetic import make_data

SMALL = {
    "--encoder-embed-dim": 32,
    "--encoder-ffn-embed-dim": 64,
    "--decoder-embed-dim": 32,
    "--decoder-ffn-embed-dim": 64,
}
# Nothing is drawn by chance and nothing dropped, so that runs can be compared.
STEADY = ["--dropout", 0, "--moe-capacity-factor", 0, "--moe-second-expert-policy", "all"]


class Runs:
    """Runs on one small data set; ``device`` is the context's unless a run says otherwise."""

    def __init__(self, context: Context, sentences: int = 200, vocabulary: int = 90):
        self.context = context
        self.folder = Path(context.folder)
        sizes = {"train": sentences, "valid": 10, "test": 20}
        self.data = make_data(self.folder / "data", vocabulary, sizes)

    def train(self, name: str, *flags, device: str | None = None, ranks: int = 0, tiny=True) -> str:
        """What fairseq-train printed; its checkpoints are in ``folder/name``.

        ranks: processes of a group; with 0 there is one process without a group.

        Raises:
            RuntimeError: it failed; with the end of what it printed.
        """
        words = ["--user-dir", PACKAGE, "--num-workers", 0, "--arch", "smoe_transformer_tiny"]
        if tiny:
            words += [word for pair in SMALL.items() for word in pair]
            words += ["--smoe-strata", "2-2", *STEADY]
        words += ["--criterion", "smoe_label_smoothed_cross_entropy", "--label-smoothing", 0.1]
        words += ["--optimizer", "adam", "--adam-eps", 1e-4, "--lr", 1e-3, "--max-tokens", 400]
        words += ["--max-update", 3, "--log-interval", 1, "--log-format", "json"]
        words += ["--no-epoch-checkpoints", "--disable-validation"]
        words += ["--save-dir", self.folder / name]
        words += self._cpu(device)
        command = [sys.executable, "-m", "fairseq_cli.train", self.data, *words, *flags]
        text = run_ranks([list(map(str, command))] * max(1, ranks), grouped=ranks > 0)
        if ranks and worlds(text) != [ranks] * len(worlds(text)):
            raise RuntimeError(f"world sizes {worlds(text)} in the log, started were {ranks}")
        return text

    def generate(self, name: str, *flags, device: str | None = None) -> str:
        words = ["--user-dir", PACKAGE, "--path", self.folder / name / "checkpoint_last.pt"]
        words += ["--beam", 5, "--max-len-a", 0, "--max-len-b", 20, "--batch-size", 8]
        words += self._cpu(device)
        command = [sys.executable, "-m", "fairseq_cli.generate", self.data, *words, *flags]
        return run_ranks([list(map(str, command))])

    def _cpu(self, device: str | None) -> list[str]:
        return ["--cpu"] if (device or self.context.device) == "cpu" else []


def worlds(text: str) -> list[int]:
    """The world sizes that a run's log names.

    Raises:
        RuntimeError: it names none.
    """
    found = [int(number) for number in re.findall(r"training on (\d+) devices", text)]
    if not found:
        raise RuntimeError("the log names no world size")
    return found


def run_ranks(commands: list[list[str]], grouped: bool = False) -> str:
    """Output of all; if ``grouped`` they are the ranks of one run, on GPU 0 where there is only one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank, command in enumerate(commands):
        environment = {**os.environ, "LOGLEVEL": "INFO", "PYTHONWARNINGS": "ignore"}
        if grouped:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(len(commands))}
            environment |= {"LOCAL_RANK": str(rank % max(1, torch.cuda.device_count()))}
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(output[-600:])
    return "\n".join(outputs)


def attempt(case: str, function) -> dict:
    """The result of a case; one that fails is wrong, and the next is still run."""
    try:
        return {"case": case, **function()}
    except (RuntimeError, OSError, ValueError, KeyError, IndexError) as error:
        return {"case": case, "ok": False, "error": str(error)}


def losses(text: str) -> list[float]:
    return [float(update["loss"]) for update in updates(text)]


def falls(text: str, count: int) -> dict:
    """As many updates as asked for were made and the loss went down."""
    found = losses(text)
    return {"ok": len(found) >= count and found[-1] < found[0], "losses": found}


def precision(context: Context) -> Iterator[dict]:
    """fairseq has fp16 and --amp on GPUs only, so a rehearsal has bf16 alone."""
    runs = Runs(context)
    more = ["--max-update", 8, "--lr", 5e-3]
    cases = {"bf16": ["--bf16"]}
    if not context.tiny:
        cases |= {"fp16": ["--fp16"], "amp": ["--amp"]}
    for name, flags in cases.items():
        yield attempt(name, lambda f=flags, n=name: falls(runs.train(n, *f, *more), 8))
    for flag in () if context.tiny else ("--fp16", "--amp"):
        name = f"{flag[2:]}, forced overflow"
        yield attempt(name, lambda f=flag, n=name: overflow(runs, n, f))


def overflow(runs: Runs, name: str, flag: str) -> dict:
    """A loss scale of 2^40 overflows; it is halved until updates are made."""
    text = runs.train(name.replace(" ", "-"), flag, "--fp16-init-scale", 2**40, "--max-update", 3)
    noticed = len(re.findall(r"overflow", text, re.IGNORECASE))
    return {"ok": noticed > 0 and len(losses(text)) >= 3, "overflows": noticed}


def options(context: Context) -> Iterator[dict]:
    """fp32 on the device against the CPU, and activation checkpointing against neither."""
    runs = Runs(context)
    want = losses(runs.train("cpu", device="cpu"))
    cases = {
        "an update as on the CPU": [],
        "activation checkpointing": ["--checkpoint-activations"],
    }
    for name, flags in cases.items():
        folder = name.replace(" ", "-")
        yield attempt(name, lambda f=flags, n=folder: close(losses(runs.train(n, *f)), want))


def close(got: list[float], want: list[float], tolerance: float = 2e-3) -> dict:
    """As many losses, equal but for rounding (fairseq logs three digits after the point)."""
    same = len(got) == len(want) > 0
    furthest = max((abs(a - b) / abs(b) for a, b in zip(got, want)), default=None)
    return {"ok": same and furthest <= tolerance, "difference": furthest}


def generate(context: Context) -> Iterator[dict]:
    """Hypotheses in fp32; a tie may be rounded otherwise in one of twenty."""
    runs = Runs(context)
    runs.train("model", "--max-update", 10)

    def compare() -> dict:
        want, got = (hypotheses(runs.generate("model", device=d)) for d in ("cpu", None))
        equal = sum(want[key] == got.get(key) for key in want)
        return {"ok": len(want) == 20 and equal >= 19, "equal": equal, "of": len(want)}

    yield attempt("hypotheses as on the CPU", compare)


def hypotheses(text: str) -> dict[str, str]:
    return dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", text, re.MULTILINE))


def ranks(context: Context) -> Iterator[dict]:
    """Ranks against one process with the same global batch; the last update is after a restart.

    One rank over NCCL, then two. NCCL wants a GPU for each rank; else two use gloo and one GPU.
    """
    runs = Runs(context)
    nccl = not context.tiny and torch.cuda.device_count() > 1
    backend = "nccl" if nccl else "gloo"
    alone = ["--batch-size", 2, "--update-freq", 2]
    want = losses(runs.train("one", *alone))
    group = ["--ddp-backend", "legacy_ddp", "--distributed-backend"]
    single = "gloo" if context.tiny else "nccl"
    yield attempt(
        f"one rank, {single}",
        lambda: close(losses(runs.train("one-rank", *alone, *group, single, ranks=1)), want),
    )
    for name, flags in {"replicated": [], "expert-parallel": ["--expert-parallel"]}.items():
        flags = [*group, backend, "--batch-size", 2, *flags]

        def begin(name=name, flags=flags):
            return close(losses(runs.train(name, *flags, "--max-update", 2, ranks=2)), want[:2])

        def resume(name=name, flags=flags):
            return close(losses(runs.train(name, *flags, ranks=2)), want[2:])

        yield attempt(f"two ranks {name}, {backend}", begin)
        if "--expert-parallel" in flags:
            yield attempt(
                "resharded to one rank", lambda n=name: resharded(runs, n, alone, want[2:])
            )
        yield attempt(f"two ranks {name} resumed, {backend}", resume)


def resharded(runs: Runs, name: str, flags: list, want: list[float]) -> dict:
    """The checkpoint of ``name`` for one rank, which trains on."""
    smoe = Path(sys.executable).with_name("smoe")
    output = runs.folder / "resharded" / "checkpoint_last.pt"
    source = runs.folder / name / "checkpoint_last.pt"
    run_ranks([[str(w) for w in (smoe, "reshard", source, "--world-size", 1, "--output", output)]])
    return close(losses(runs.train("resharded", *flags)), want)


def speed(text: str) -> float:
    """Median of the words per second of the later half of the updates."""
    rates = [float(update["wps"]) for update in updates(text)]
    rates = sorted(rates[len(rates) // 2 :])
    return rates[len(rates) // 2]
