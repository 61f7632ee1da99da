"""The port over which the processes of a run find one another."""

import os
import socket

import pytest

from smoe_fairseq.system.errors import UsageErrorOfAll


def test_port_in_use_is_named(monkeypatch):
    import torch.distributed as dist

    from smoe_fairseq.distributed import start

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in given.items():
            monkeypatch.setitem(os.environ, name, value)

        def fairseqs(i, main, cfg, kwargs):
            dist.init_process_group("gloo")

        monkeypatch.setattr(start, "_fairseqs", [fairseqs])
        with pytest.raises(UsageErrorOfAll, match=f"MASTER_PORT {port} is in use by another prog"):
            start.distributed_main(0, None, None, {})
