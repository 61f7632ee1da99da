"""The port over which the processes of a run find one another."""

import os
import socket

import pytest

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import load_dataset
from smoe_fairseq.recipes.training import launcher, train
from smoe_fairseq.recipes.training.launcher import Launch


def test_port_in_use_is_named(monkeypatch):
    import torch.distributed as dist

    from smoe_fairseq.training import launch

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in given.items():
            monkeypatch.setitem(os.environ, name, value)

        def fairseqs(i, main, cfg, kwargs):
            dist.init_process_group("gloo")

        monkeypatch.setattr(launch, "_fairseqs", [fairseqs])
        with pytest.raises(
            SystemExit, match=f"error: MASTER_PORT {port} is in use by another prog"
        ):
            launch.distributed_main(0, None, None, {})


@pytest.fixture
def taken(monkeypatch):
    """A port of this machine on which a program listens that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setattr(launcher, "PATIENCE", 1)
        yield port


def trained(tmp_path, monkeypatch, status: int | None = None) -> list[str]:
    """What ``scripts/train.sh`` would run on two machines; its training ends with a status."""
    started = []

    def run(lines, variables):
        started.extend(line for line in lines if line.startswith("torchrun "))
        if status is not None:
            raise SystemExit(status)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NODES", "2")
    monkeypatch.setenv("GPUS", "0")
    (tmp_path / "data/multi30k/bin").mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(train, "run", run)
    train.train(load_dataset("multi30k"), "moe", ["--no-save"])
    return started


def test_port_that_torchrun_would_wait_at_is_named_before(tmp_path, monkeypatch, taken):
    with pytest.raises(
        UsageError, match=f"^MASTER_PORT {taken} is in use by another program on this"
    ):
        trained(tmp_path, monkeypatch)


def test_port_of_another_torchrun_is_named_when_training_has_failed(tmp_path, monkeypatch):
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    (words,) = trained(tmp_path, monkeypatch)
    assert f"--rdzv-endpoint localhost:{store.port} " in words
    with pytest.raises(UsageError, match=f"^MASTER_PORT {store.port} is in use"):
        trained(tmp_path, monkeypatch, status=1)
    with pytest.raises(SystemExit, match="143"):  # somebody has stopped it
        trained(tmp_path, monkeypatch, status=143)


def test_port_that_is_free_or_of_another_machine(tmp_path, monkeypatch, taken):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of no machine
    launcher.check_port()
    with pytest.raises(SystemExit, match="1"):
        trained(tmp_path, monkeypatch, status=1)
    monkeypatch.delenv("MASTER_ADDR")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    launcher.check_port()


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_port_that_is_none(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match=f"^MASTER_PORT={port}: expected a port, a number from 1"):
        Launch("torchrun", 2, 1).words("fairseq-train")
    assert "--standalone" in Launch("torchrun", 1, 2).words("fairseq-train")
