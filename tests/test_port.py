"""The port over which the processes of a run find one another."""

import os
import socket
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from commands import touch_binarised
from programs import HANGS
from ranks import free_port
from sampling import soak

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.training import launcher, train
from smoe_fairseq.recipes.training.launcher import Launch
from smoe_fairseq.training import launch


@pytest.mark.parametrize("interface", [None, "nosuch0"])
def test_port_in_use_and_interface_that_is_missing_are_named(monkeypatch, interface):
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(free_port() if interface else taken.getsockname()[1])
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        named = f"MASTER_PORT {port} is in use by another prog"
        if interface:
            given |= {"WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": interface}
            named = f"GLOO_SOCKET_IFNAME {interface}"
        for name, value in given.items():
            monkeypatch.setitem(os.environ, name, value)

        def fairseqs(i, main, cfg, kwargs):
            dist.init_process_group("gloo")

        monkeypatch.setattr(launch, "_original_main", [fairseqs])
        with pytest.raises(SystemExit, match=f"error: {named}"):
            launch.distributed_main(0, None, None, {})


def test_port_that_torchrun_would_wait_at_is_named_before(tmp_path, monkeypatch):
    """But not that of another machine, nor on a machine that joins a run."""
    started = []
    monkeypatch.chdir(tmp_path)
    touch_binarised(tmp_path, "multi30k")
    monkeypatch.setattr(train, "run", lambda lines, *_: started.extend(map(str, lines)))

    def trained(**variables: str) -> None:
        settings = Settings.read({"NODES": "2", "GPUS": "0"})
        settings = replace(settings, variables=settings.variables | variables)
        train.train(load_dataset("multi30k", settings), "moe", ["--no-save"])

    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        with pytest.raises(UsageError, match=f"^MASTER_PORT {taken} is in use by another program"):
            trained(MASTER_PORT=taken)
        assert not started
        trained(MASTER_PORT=taken, MASTER_ADDR="192.0.2.1")  # of no machine
        monkeypatch.setattr(train.identity, "joined", {Path("runs/multi30k/moe")})
        trained(MASTER_PORT=taken)
    assert f"--rdzv-endpoint localhost:{taken} " in started[-1]
    monkeypatch.undo()
    monkeypatch.setenv("MASTER_PORT", taken)
    launcher.check_port(Launch("torchrun", 2, 1, settings=Settings.read()))  # free now


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_port_that_is_none(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match=f"^MASTER_PORT={port}: expected a whole number from 1"):
        Launch("torchrun", 2, 1, settings=Settings.read()).words("fairseq-train")
    assert "--standalone" in Launch("torchrun", 1, 2).words("fairseq-train")


def meeting(rank: int, port: int, size: int = 2) -> Namespace:
    return Namespace(
        distributed_rank=rank,
        distributed_world_size=size,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )


def test_ranks_wait_for_one_another():
    port = free_port()
    with ThreadPoolExecutor() as threads:
        given = [threads.submit(launch.wait_for_all, meeting(rank, port, 3)) for rank in (2, 0)]
        wait(given, 0.5)
        assert not any(each.done() for each in given)
        given.append(threads.submit(launch.wait_for_all, meeting(1, port, 3)))
        assert all(each.result(HANGS) is not None for each in given)


@pytest.mark.parametrize("rank", [soak(0), 1])
def test_a_rank_that_does_not_come_is_named(monkeypatch, caplog, rank):
    monkeypatch.setattr(launch, "REPORT_SECONDS", 0.3 if rank else 0.001)  # own port: no hurry
    monkeypatch.setattr(launch, "TIMEOUT_SECONDS", 1)
    port = free_port()
    with pytest.raises(
        UsageError, match=f"^rank {1 - rank} has not connected to 127.0.0.1:{port} "
    ):
        launch.wait_for_all(meeting(rank, port))
    assert f"waiting for rank {1 - rank} at 127.0.0.1:{port}" in caplog.messages


@pytest.mark.soak
def test_a_first_rank_that_ends_ends_the_others():
    """Such as one that was killed, or that did not like its flags."""
    port = free_port()
    first = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "from datetime import timedelta; from torch.distributed import TCPStore;"
            f"store = TCPStore('127.0.0.1', {port}, None, True, timedelta(seconds=60),"
            " wait_for_workers=False); store.wait(['smoe rank 1'])",
        ]
    )
    with pytest.raises(UsageError, match="^rank 0 has ended"):
        launch.wait_for_all(meeting(1, port))
    assert first.wait() == 0


@pytest.mark.parametrize(
    "method, place",
    [
        *(("tcp://[::1]:80", ("::1", 80)), ("file:///tmp/x", None)),
        *(("tcp://host:99999999", None), ("None", None), ("env://", ("a", 5))),
    ],
)
def test_where_ranks_meet(monkeypatch, method, place):
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "5")
    given = Namespace(distributed_init_method=method)
    assert launch._master_address(given) == place
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert method != "env://" or launch._master_address(given) is None
