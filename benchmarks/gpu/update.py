"""Whole updates of smoe_transformer_base by fairseq-train, their phases, and fairseq-generate's speed."""

import cProfile
import functools
import io
import json
import pstats
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from benchmarks.forked import value
from benchmarks.gpu.parts import Context
from benchmarks.gpu.training import Runs, attempt_fast
from benchmarks.program import LONGEST

VOCABULARY = 8000
MODELS = {
    "dense": ["--moe-freq", 0],
    "moe-8": ["--smoe-strata", "8"],
    "4-4": ["--smoe-strata", "4-4"],
    "2-2-2-2": ["--smoe-strata", "2-2-2-2"],
}
# Updates of each kind, in this order: not counted, timed as they are, synchronized after each phase, with
# torch's profiler, with Python's.
COUNTS = {"warm": 12, "plain": 16, "phases": 8, "kernels": 1, "python": 1}
TINY_COUNTS = {"warm": 1, "plain": 2, "phases": 1, "kernels": 1, "python": 1}
MARK = "update-times "
# Phases of an update: module, class and method. "rest" is the rest of an update, "between" the time between
# two updates, in which fairseq loads data and logs.
PHASES = {
    "move": ("fairseq.trainer", "Trainer", "_prepare_sample"),
    "clear": ("smoe_fairseq.training.trainer", "SMoETrainer", "zero_grad"),
    "forward": ("smoe_fairseq.criterions", "SMoELabelSmoothedCrossEntropyCriterion", "forward"),
    "norm": ("smoe_fairseq.training.trainer", "SMoETrainer", "clip_grad_norm"),
    "optimizer": ("fairseq.tasks.fairseq_task", "FairseqTask", "optimizer_step"),
    "log": ("smoe_fairseq.training.trainer", "SMoETrainer", "_reduce_and_log_stats"),
}


class Watch:
    """Times the updates of a fairseq-train in this process.

    Args:
        counts: number of updates of each kind, as in `COUNTS`.
        profile: path, without its suffix, of the two profilers' reports; None: none.
    """

    def __init__(self, counts: dict[str, int], profile: Path | None):
        self.kinds = [kind for kind, number in counts.items() for _ in range(number)]
        self.profile = profile
        self.kind = "warm"
        self.phases: Counter[str] = Counter()
        self.found: dict[str, object] = {}
        self.times: list[float] = []  # of plain updates, from the end of one to the end of the next
        self.tokens: list[int] = []
        self.ended: float | None = None

    def install(self) -> None:
        """Wrap fairseq's methods; for a process of its own."""
        from fairseq.optim import FairseqOptimizer
        from fairseq.optim.fp16_optimizer import FP16Optimizer

        from smoe_fairseq.training.trainer import SMoETrainer

        for phase, (module, owner, method) in PHASES.items():
            self._wrap(getattr(__import__(module, fromlist=[owner]), owner), method, phase)
        for owner in (FairseqOptimizer, FP16Optimizer):
            self._wrap(owner, "backward", "backward")
        original = SMoETrainer.train_step

        @functools.wraps(original)
        def train_step(trainer, samples, *others, **options):
            done = trainer.get_num_updates()
            self.kind = self.kinds[done] if done < len(self.kinds) else "warm"
            with self._update(samples):
                return original(trainer, samples, *others, **options)

        SMoETrainer.train_step = train_step

    def _wrap(self, owner: type, method: str, phase: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*arguments, **options):
            if self.kind != "phases":
                return original(*arguments, **options)
            start = self._now()
            try:
                return original(*arguments, **options)
            finally:
                self.phases[phase] += self._now() - start

        setattr(owner, method, timed)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def _update(self, samples) -> Iterator[None]:
        waits = self.kind in ("phases", "kernels", "python")
        start = self._now() if waits else time.perf_counter()
        if self.kind == "phases" and self.ended is not None:
            self.phases["between"] += start - self.ended
        with {"kernels": self._kernels, "python": self._python}.get(self.kind, nullcontext)():
            yield
        last = self.kind == "plain" and self.kinds.count("plain") == len(self.times) + 1
        now = self._now() if waits or last else time.perf_counter()
        if self.kind == "phases":
            self.phases["update"] += now - start
        if self.kind == "plain" and self.ended is not None:
            self.times.append(now - self.ended)
            self.tokens.append(sum(sample["ntokens"] for sample in samples))
        self.ended = now

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        with profile(activities=activities) as profiler:
            yield
            self._now()
        on_device = torch.autograd.DeviceType.CUDA
        kernels = [e for e in profiler.events() if e.device_type == on_device]
        kernels = [e for e in kernels if not getattr(e, "is_user_annotation", False)]
        self.found["kernels"] = len(kernels)
        self.found["kernels' ms"] = sum(e.time_range.elapsed_us() for e in kernels) / 1000
        operations = profiler.key_averages()
        keys = ["self_cpu_time_total"] + ["self_cuda_time_total"] * cuda
        table = "\n".join(operations.table(sort_by=key, row_limit=30) for key in keys)
        self._write("kernels.txt", table)

    @contextmanager
    def _python(self) -> Iterator[None]:
        with cProfile.Profile() as profiler:
            yield
        text = io.StringIO()
        for key in ("tottime", "cumtime"):
            pstats.Stats(profiler, stream=text).sort_stats(key).print_stats(45)
        self._write("python.txt", text.getvalue())

    def _write(self, ending: str, text: str) -> None:
        if self.profile is not None:
            self.profile.with_suffix(f".{ending}").write_text(text)

    def around(self, main: Callable[[], object]) -> None:
        """Call ``main`` and print the result as JSON."""
        self.install()
        main()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        print(f"{MARK}{json.dumps({'device': device, **self.result()})}", flush=True)

    def result(self) -> dict:
        """Numbers of the plain updates, and the milliseconds of each phase of an update."""
        phases = {name: 1000 * t / self.kinds.count("phases") for name, t in self.phases.items()}
        names = [name for name in (*PHASES, "backward") if name in phases]
        phases["rest"] = phases.pop("update", 0.0) - sum(phases[name] for name in names)
        rates = [n / t for n, t in zip(self.tokens, self.times, strict=True)]
        return {
            "tokens/s": statistics.median(rates) if rates else 0.0,
            "ms": 1000 * statistics.median(self.times) if rates else 0.0,
            "tokens": statistics.median(self.tokens) if rates else 0,
            **self.found,
            "phases, ms": phases,
        }


def update(context: Context) -> Iterator[dict]:
    """Models in bf16 and fp16, with and without Triton's kernels, the most important first."""
    runs = Runs(context) if context.tiny else Runs(context, 40000, VOCABULARY)
    cases = [(name, "bf16", "auto") for name in MODELS]
    if not context.tiny:
        cases = [("dense", "bf16", "auto"), ("moe-8", "bf16", "fused"), ("4-4", "bf16", "fused")]
        cases += [("4-4", "bf16", "grouped"), ("dense", "fp16", "auto"), ("4-4", "fp16", "auto")]
        cases += [("4-4", "fp16", "fused"), ("2-2-2-2", "bf16", "fused"), ("moe-8", "fp16", "auto")]
    for name, precision, execution in cases:
        case = f"{name}, {precision}" + ("" if execution == "auto" else f", {execution}")
        flags = [*MODELS[name], f"--{precision}"]
        flags += [] if execution == "auto" else ["--moe-execution", execution]
        yield attempt_fast(case, lambda f=flags, c=case: timed(runs, c, f, context))


def timed(runs: Runs, case: str, flags: list, context: Context) -> dict:
    counts = TINY_COUNTS if context.tiny else COUNTS
    profile = Path(context.out) / f"update-{case.replace(', ', '-')}" if context.out else None
    watch = Watch(counts, profile)
    words = [*flags, "--max-update", sum(counts.values()), "--no-save"]
    if not context.tiny:
        words = ["--arch", "smoe_transformer_base", "--max-tokens", 16384, *words]

    text = runs.train(case.replace(", ", "-"), *words, tiny=context.tiny, around=watch.around)
    line = next(line for line in text.splitlines() if line.startswith(MARK))
    found = json.loads(line.removeprefix(MARK))
    model = ["--arch", "smoe_transformer_base", *MODELS[case.split(",")[0]]]
    device = found.pop("device")
    share = "-"
    if device:  # in another process, since this one forks the next training: it must not touch CUDA
        flops = value(lambda: flops_per_token(model))
        share = share_of_peak(found["tokens/s"], flops, device)
    if "fused" in case and ": fused kernels" not in text:  # which the log names
        found = {"ran": "the general forward", **found}
    return {"ok": None, "share of peak": share, **found}


# Dense bf16 TFLOP/s as the vendor states them, by words of the device's name; the first that fits.
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, "GH200": 989}
PEAKS |= {"B200": 2250, "A100": 312, "L40S": 362, "L4": 121}


def share_of_peak(tokens_per_second: float, flops_per_token: float, device: str) -> float | str:
    """For an update, whose backward pass counts as two forward passes; "-" for unknown devices."""
    words = set(re.split(r"[ -]", device))
    peak = next((1e12 * n for key, n in PEAKS.items() if words >= set(key.split())), None)
    return 3 * tokens_per_second * flops_per_token / peak if peak else "-"


def flops_per_token(model: list) -> float:
    """Products of a forward pass for the longest sentence; looking up embeddings is none."""
    from smoe_fairseq.analysis.cost import build_meta_model, count, parse_model

    flops = count(build_meta_model(parse_model(list(map(str, model))), VOCABULARY), LONGEST).flops
    return sum(number for part, number in flops.items() if part != "embedding")


def decode(context: Context) -> Iterator[dict]:
    """Beam 5, every sentence to the same length, because the model is hardly trained.

    The clock begins after the first batch, in which the GPU loads its kernels.
    """
    sentences, batch = (20, 4) if context.tiny else (1280, 256)
    runs = Runs(context, vocabulary=90 if context.tiny else VOCABULARY, test=sentences)
    sizes = [] if context.tiny else ["--arch", "smoe_transformer_base", "--fp16"]

    def decoded(name: str, flags: list) -> dict:
        made = [*sizes, *flags, "--max-update", 1, "--no-save-optimizer-state"]
        runs.train(name, *made, tiny=context.tiny)
        words = ["--min-len", 20, "--batch-size", batch, *(["--fp16"] if sizes else [])]
        text = runs.generate(name, *words, around=time_search)
        return {"ok": None, **json.loads(text.split(MARK)[1].splitlines()[0])}

    for name, flags in MODELS.items():
        yield attempt_fast(name, lambda n=name, f=flags: decoded(n, f))


def time_search(main: Callable[[], object]) -> None:
    """Call ``main`` and print the speed of fairseq's search, from the second batch on, as JSON."""
    from fairseq.tasks.fairseq_task import FairseqTask

    original, batches = FairseqTask.inference_step, []  # seconds, sentences, tokens of each

    def inference_step(*arguments, **options):
        start = time.perf_counter()
        hypotheses = original(*arguments, **options)
        tokens = sum(len(each[0]["tokens"]) for each in hypotheses)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        batches.append((time.perf_counter() - start, len(hypotheses), tokens))
        return hypotheses

    FairseqTask.inference_step = inference_step
    main()
    seconds, sentences, tokens = map(sum, zip(*batches[1:], strict=True))
    found = {"tokens/s": tokens / seconds, "sentences": sentences, "seconds": seconds}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
