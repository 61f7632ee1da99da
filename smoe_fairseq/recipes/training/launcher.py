"""Where training runs: processes, machines, torchrun or SLURM."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.processes import PYTHON
from smoe_fairseq.recipes.settings import Settings

LAUNCHERS = ("plain", "torchrun", "slurm")


@dataclass(frozen=True)
class Launch:
    """``gpus`` processes on each of ``nodes`` machines, one per GPU; one process if ``gpus`` is 0.

    ``cpu``: the processes compute on the CPU, for lack of a GPU or because of ``--cpu``.
    """

    launcher: str
    nodes: int
    gpus: int
    cpu: bool = False
    settings: Settings = field(default=Settings(), compare=False)

    @property
    def processes(self) -> int:
        """Over all machines: the world size of distributed training."""
        return self.nodes * max(1, self.gpus)

    @property
    def uses_master_port(self) -> bool:
        """Whether ``MASTER_PORT`` is used; otherwise torchrun takes a free port."""
        return self.launcher == "slurm" or (self.launcher == "torchrun" and self.nodes > 1)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port where the machines meet, the same on all."""
        return self.settings.master_addr or "localhost", self.settings.master_port

    def words(self, program: str) -> list[str]:
        """The command that starts a program in every process."""
        if self.launcher == "plain":
            return [program]
        each = ["--nproc-per-node", str(max(1, self.gpus)), "--no-python", program]
        # A dry run prints torch's command, a run starts ours (torchrun.py).
        ours = [*PYTHON, "-m", f"{__package__}.torchrun"]
        torchrun = ["torchrun"] if self.settings.dry_run else ours
        if not self.uses_master_port:
            return [*torchrun, "--standalone", *each]
        address, port = self.endpoint
        start = [*torchrun, "--nnodes", str(self.nodes), "--rdzv-backend", "c10d"]
        start += ["--rdzv-id", os.environ.get("SLURM_JOB_ID") or "smoe"]
        start += ["--rdzv-endpoint", f"{address}:{port}", *each]
        if self.launcher == "slurm":
            srun = ["srun", "--kill-on-bad-exit", "--nodes", str(self.nodes)]
            return [*srun, "--ntasks-per-node", "1", *start]
        return start

    def flags(self) -> dict[str, object]:
        """The flags of fairseq-train for this launch."""
        flags = {"cpu": self.cpu}
        if self.cpu and self.launcher != "plain":
            flags["distributed-backend"] = "gloo"  # fairseq's default is for GPUs only
        if self.processes > 1:
            return flags | {"ddp-backend": "legacy_ddp"}
        # Without this flag, fairseq starts a process per visible GPU.
        return flags | {"distributed-world-size": 1}


def plan_launch(settings: Settings, extra: Sequence[str]) -> Launch:
    """The launch requested by ``GPUS``, ``NODES`` and ``LAUNCHER``.

    By default all GPUs of this machine, 1 node, and torchrun for several processes. The processes compute on
    the CPU if the flags ``extra`` contain ``--cpu`` or this machine has no GPU. A dry run and SLURM ignore
    this machine's GPUs, since the run is for other machines.
    """
    gpus, nodes = settings.gpus, settings.nodes
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    several = nodes * gpus > 1 or nodes > 1
    launcher = settings.launcher or ("torchrun" if several else "plain")
    if launcher not in LAUNCHERS:
        raise UsageError(f"--launcher {launcher}: choose one of {', '.join(LAUNCHERS)}")
    if launcher == "plain" and several:
        both = f"--nodes {nodes} --gpus {gpus}"
        raise UsageError(f"--launcher plain, one process, with {both}: choose torchrun or slurm")
    cpu = gpus == 0 or "--cpu" in extra
    if not cpu and launcher != "slurm" and not settings.dry_run:
        import torch

        available = torch.cuda.device_count()
        if 0 < available < gpus:
            expected = "expected at most as many, or --cpu behind the method"
            raise UsageError(f"--gpus {gpus}: this machine has {available}; {expected}")
        cpu = available == 0
    return Launch(launcher, nodes, gpus, cpu, settings)


def visible_gpus(count: int) -> list[str]:
    """The first ``count`` GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return (names or [str(i) for i in range(count)])[:count]


def check_port(launch: Launch) -> None:
    """Raise UsageError if a program uses the port at which the machines connect on this machine.

    torchrun would wait at it for minutes or forever.
    """
    address, port = launch.endpoint
    try:
        socket.create_server((address, 0)).close()
    except OSError:  # the address of another machine
        return
    dual = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        socket.create_server(("", port), **dual if socket.has_dualstack_ipv6() else {}).close()
    except OSError:
        used = f"MASTER_PORT {port} is in use by another program on this machine"
        raise UsageError(f"{used}: set it to a free port, the same on all machines") from None
