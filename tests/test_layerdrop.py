"""LayerDrop over several processes, each of which leaves out other layers."""

import json
import re

import torch
from test_lock import SMALL

FLAGS = """--moe-freq 1 --smoe-strata 2-2 --encoder-layerdrop 0.7 --decoder-layerdrop 0.7
    --distributed-backend gloo --ddp-backend legacy_ddp --update-freq 2 --max-update 4 --no-save
    --log-interval 1 --log-format json""".split()


def test_layer_drop_over_processes(ranks, small_corpus, tmp_path):
    run = ranks.train(tmp_path, 2, small_corpus, *SMALL, *FLAGS)
    logs = [json.loads(x) for x in re.findall(r"train_inner \| (\{.*\})", run.output(0))]
    assert len(logs) == 4
    assert all("loss" in log and "gnorm" in log for log in logs)
    assert any("requested_capacity" in log for log in logs)


def sums() -> None:
    """In a process of two: what fairseq's sum is given, and makes of it."""
    import os

    import torch.distributed as dist
    from fairseq.distributed.utils import all_reduce_dict

    from smoe_fairseq.distributed.logs import with_same_keys

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    logs = [
        [{"a": 1, "x": torch.ones(2, 3)}, {"a": 2, "y": torch.ones(2)}],
        [{"z": torch.tensor(4.0), "a": 5}],
    ][rank]
    device = torch.device("cpu")
    logs = with_same_keys(logs, device)
    assert [list(log) for log in logs] == [["a", "x", "y", "z"], ["a", "y"]][: len(logs)]
    data = {k: sum(log[k] for log in logs if k in log) for k in logs[0]}
    total = all_reduce_dict(data, device=device, group=dist.group.WORLD)
    assert float(total["a"]) == 8 and float(total["z"]) == 4
    assert total["x"].tolist() == [[1, 1, 1]] * 2 and total["y"].tolist() == [1, 1]


def test_logs_with_other_keys_are_summed(ranks, tmp_path):
    ranks.start(tmp_path, 2, function=sums).finish()
