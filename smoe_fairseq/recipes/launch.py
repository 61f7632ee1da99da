"""Where training runs: processes without or with one GPU, on one machine, or on several by SLURM."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from smoe_fairseq.recipes.shell import dry_run
from smoe_fairseq.recipes.training.rendezvous import endpoint
from smoe_fairseq.system.errors import UsageError

LAUNCHERS = ("plain", "torchrun", "slurm")


@dataclass(frozen=True)
class Launch:
    """``gpus`` of each of ``nodes`` machines, one process on each; no GPU is one process too.

    cpu: whether the processes compute on the CPU, for want of GPUs or because they are told to.
    """

    launcher: str
    nodes: int
    gpus: int
    cpu: bool = False

    @property
    def processes(self) -> int:
        """Over all machines: what distributed training calls the world size."""
        return self.nodes * max(1, self.gpus)

    @property
    def meets_at_port(self) -> bool:
        """Whether ``MASTER_PORT`` is used; otherwise torchrun takes a free one."""
        return self.launcher == "slurm" or (self.launcher == "torchrun" and self.nodes > 1)

    def words(self, program: str) -> list[str]:
        """The command that starts a program in every process."""
        if self.launcher == "plain":
            return [program]
        each = ["--nproc-per-node", str(max(1, self.gpus)), "--no-python", program]
        if not self.meets_at_port:
            return ["torchrun", "--standalone", *each]
        address, port = endpoint()
        nodes = ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d"]
        nodes += ["--rdzv-id", os.environ.get("SLURM_JOB_ID") or "smoe"]
        start = ["torchrun", *nodes, "--rdzv-endpoint", f"{address}:{port}", *each]
        if self.launcher == "slurm":
            return ["srun", "--nodes", str(self.nodes), "--ntasks-per-node", "1", *start]
        return start

    def flags(self) -> dict[str, object]:
        """What fairseq has to know of it."""
        flags = {"cpu": self.cpu}
        if self.cpu and self.launcher != "plain":
            flags["distributed-backend"] = "gloo"  # fairseq's default is for GPUs only
        if self.processes > 1:
            return flags | {"ddp-backend": "legacy_ddp"}
        # Without it fairseq would start a process for every GPU that it sees.
        return flags | {"distributed-world-size": 1}


def launch(extra: Sequence[str]) -> Launch:
    """From ``GPUS`` (those of this machine), ``NODES`` (1) and ``LAUNCHER`` (as these numbers need).

    ``GPUS`` processes compute on the CPU where ``extra`` flags say ``--cpu``, or where this machine has no
    GPU. A dry run and SLURM take it as it is given: they are for other machines.
    """
    gpus = whole_number("GPUS", least=0, default=None)
    nodes = whole_number("NODES", least=1, default=1)
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    several = nodes * gpus > 1 or nodes > 1
    launcher = os.environ.get("LAUNCHER") or ("torchrun" if several else "plain")
    if launcher not in LAUNCHERS:
        raise UsageError(f"LAUNCHER={launcher}: choose one of {', '.join(LAUNCHERS)}")
    if launcher == "plain" and several:
        raise UsageError(
            f"LAUNCHER=plain is for one process, not for NODES={nodes} with GPUS={gpus}: choose "
            "torchrun or slurm"
        )
    cpu = gpus == 0 or "--cpu" in extra
    if not cpu and launcher != "slurm" and not dry_run():
        cpu = not _has_gpus(gpus)
    return Launch(launcher, nodes, gpus, cpu)


def cores() -> int:
    """Those that this process may use, where the system tells: a batch system's job has not all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(count: int) -> list[str]:
    """The first ``count`` of them, as ``CUDA_VISIBLE_DEVICES`` names those that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return (named or [str(i) for i in range(count)])[:count]


def _has_gpus(wanted: int) -> bool:
    """Whether this machine has them; False where it has none at all."""
    import torch

    there = torch.cuda.device_count()
    if 0 < there < wanted:
        raise UsageError(
            f"GPUS={wanted}: this machine has {there}; expected at most as many, or --cpu behind the method"
        )
    return there > 0


def whole_number(name: str, least: int, default: int | None) -> int | None:
    """A variable of the environment.

    Raises:
        UsageError: it is no number, or less than ``least``.
    """
    given = os.environ.get(name) or None
    if given is None:
        return default
    if not given.isdecimal() or int(given) < least:
        raise UsageError(f"{name}={given}: expected a whole number of at least {least}")
    return int(given)
