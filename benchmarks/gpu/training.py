"""fairseq-train and fairseq-generate on a device, forked from a process that has made their imports, and
whole trainings through scripts/.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import fairseq_cli.generate
import fairseq_cli.train
import torch

from benchmarks.forked import Forked, command, value
from benchmarks.gpu.parts import Context
from benchmarks.program import PACKAGE, make_data, updates
from benchmarks.timing import ROOT
from smoe_fairseq import cli

STUDY = ROOT / "build/gpu-check/study"  # stays, so that the next check resumes it
SMALL = ["--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64]
SMALL += ["--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64]
# Nothing random and nothing dropped, so that runs can be compared.
STEADY = ["--dropout", 0, "--moe-capacity-factor", 0, "--moe-second-expert-policy", "all"]


class Runs:
    """Runs on one small data set; ``device`` is the context's unless a run says otherwise."""

    def __init__(
        self, context: Context, sentences: int = 200, vocabulary: int = 90, test: int = 20
    ):
        self.context = context
        self.folder = Path(context.folder)
        sizes = {"train": sentences, "valid": 10, "test": test}
        self.data = make_data(self.folder / "data", vocabulary, sizes)

    def train(
        self,
        name: str,
        *flags,
        device: str | None = None,
        ranks: int = 0,
        tiny: bool = True,
        around: Callable[[Callable], object] = lambda main: main(),
    ) -> str:
        """What fairseq-train printed; its checkpoints are in ``folder/name``.

        Args:
            ranks: processes of a group; with 0 there is one process without a group.
            around: called in the process with the function that trains.

        Raises:
            RuntimeError: it failed; with the end of what it printed.
        """
        words = ["--user-dir", PACKAGE, "--num-workers", 0 if tiny else 2]
        words += ["--arch", "smoe_transformer_tiny"]
        if tiny:
            words += [*SMALL, "--smoe-strata", "2-2", *STEADY]
        words += ["--criterion", "smoe_label_smoothed_cross_entropy", "--label-smoothing", 0.1]
        words += ["--optimizer", "adam", "--adam-eps", 1e-4, "--lr", 1e-3, "--max-tokens", 400]
        words += ["--max-update", 3, "--log-interval", 1, "--log-format", "json"]
        words += ["--no-epoch-checkpoints", "--disable-validation"]
        words += ["--save-dir", self.folder / name, *self._cpu(device)]
        words += [] if ranks else ["--distributed-world-size", 1]
        main = command(fairseq_cli.train.cli_main, [self.data, *words, *flags])

        text = run_ranks(lambda: around(main), ranks)
        if ranks and worlds(text) != [ranks] * len(worlds(text)):
            raise RuntimeError(f"world sizes {worlds(text)} in the log, started were {ranks}")
        return text

    def generate(
        self, name: str, *flags, device: str | None = None, around=lambda main: main()
    ) -> str:
        words = ["--user-dir", PACKAGE, "--path", self.folder / name / "checkpoint_last.pt"]
        words += ["--beam", 5, "--max-len-a", 0, "--max-len-b", 20, "--batch-size", 8]
        words += self._cpu(device)
        main = command(fairseq_cli.generate.cli_main, [self.data, *words, *flags])

        return run_ranks(lambda: around(main))

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


def run_ranks(call: Callable[[], object], ranks: int = 0) -> str:
    """Output of a process, or of the ranks of one run, which share GPU 0 where there is only one.

    Raises:
        RuntimeError: one failed, at which the others are killed; with the end of what it printed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    devices = max(1, gpus()) if ranks else 1
    processes = [] if ranks else [Forked(call)]
    for rank in range(ranks):
        local = rank % devices
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(local)}
        processes.append(Forked(call, **group, **of_rank))
    with futures.ThreadPoolExecutor(len(processes)) as pool:
        waits = [pool.submit(process.wait) for process in processes]
        for wait in futures.wait(waits, return_when=futures.FIRST_EXCEPTION).done:
            if wait.exception():
                for process in processes:
                    process.kill()
                raise wait.exception()
    return "\n".join(wait.result() for wait in waits)


def gpus() -> int:
    """Their number, found in another process, since this one forks those that use them."""
    return value(torch.cuda.device_count)


def attempt(case: str, function) -> dict:
    """The result of a case; one that fails is wrong, and the next is still run."""
    try:
        return {"case": case, **function()}
    except Exception as error:
        return {"case": case, "ok": False, "error": f"{type(error).__name__}: {error}"}


def attempt_fast(case: str, function) -> dict:
    """`attempt` of a case that only measures: one that is too large for the device is not wrong."""
    found = attempt(case, function)
    fits = "OutOfMemoryError" not in found.get("error", "")
    return found if fits else {"case": case, "ok": None, "error": "does not fit"}


def losses(text: str) -> list[float]:
    return [float(update["loss"]) for update in updates(text)]


def falls(text: str, count: int) -> dict:
    """All updates were made and the loss went down."""
    found = losses(text)
    return {"ok": len(found) >= count and found[-1] < found[0], "losses": found}


def precision(context: Context) -> Iterator[dict]:
    """bf16, and on a GPU fp16 and --amp, which fairseq has on GPUs only."""
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
    """fp32 on the device and activation checkpointing, both against the CPU."""
    runs = Runs(context)
    want = losses(runs.train("cpu", device="cpu"))
    cases = {"an update as on the CPU": []}
    cases["activation checkpointing"] = ["--checkpoint-activations"]
    for name, flags in cases.items():
        folder = name.replace(" ", "-")
        yield attempt(name, lambda f=flags, n=folder: close(losses(runs.train(n, *f)), want))


def close(got: list[float], want: list[float]) -> dict:
    """As many losses, equal but for rounding (fairseq logs three digits after the point)."""
    same = len(got) == len(want) > 0
    furthest = max((abs(a - b) / abs(b) for a, b in zip(got, want)), default=None)
    return {"ok": same and furthest <= 2e-3, "difference": furthest}


def generate(context: Context) -> Iterator[dict]:
    """Hypotheses in fp32; rounding may decide a tie otherwise in one of twenty."""
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
    nccl = not context.tiny and gpus() > 1
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
    output = runs.folder / "resharded" / "checkpoint_last.pt"
    source = runs.folder / name / "checkpoint_last.pt"
    words = ["reshard", str(source), "--world-size", "1", "--output", str(output)]
    run_ranks(lambda: sys.exit(cli.main(words)))
    return close(losses(runs.train("resharded", *flags)), want)


def script(folder: Path, name: str, *words, **variables) -> str:
    """What a script printed; its runs and results are in ``folder``.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    places = {"RUN_DIR": folder / "runs", "RESULTS_DIR": folder / "results", **variables}
    command = ["bash", ROOT / f"scripts/{name}.sh", *words]
    done = subprocess.run(
        list(map(str, command)),
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        env={**os.environ, **{key: str(value) for key, value in places.items()}},
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:])
    return done.stdout


def demo(context: Context) -> Iterator[dict]:
    """The demo; a rehearsal prepares its corpus and makes two updates."""
    folder = Path(context.folder)
    data = {"DATA_DIR": folder / "data"}
    if context.tiny:
        script(folder, "prepare", "phrasebook", **data)
        words = ["phrasebook", "smoe-2-2-2-2", "--max-update", 2, "--cpu"]
        script(folder, "train", *words, **data)
        yield {"case": "two updates of the demo", "ok": True}
        return
    text = script(folder, "demo", **data)
    yield {"case": "demo", "ok": True, "end": text[-600:]}


def study(context: Context) -> Iterator[dict]:
    """Needs Multi30k, prepared beforehand; the next check resumes what the time limit ends."""
    if context.tiny:
        yield {"case": "left out of a rehearsal", "ok": None}
        return
    if not (ROOT / "data/multi30k").exists():
        yield {"case": "left out: data/multi30k is not there (scripts/prepare.sh)", "ok": None}
        return
    base = ["--arch", "smoe_transformer_base", "--bf16", "--lr", 0.001]
    base += ["--save-interval-updates", 100]
    script(STUDY, "study", "multi30k", "dense", "smoe-4-4", *base)
    yield {"case": "study of dense and smoe-4-4 at base size", "ok": True, "in": str(STUDY)}
