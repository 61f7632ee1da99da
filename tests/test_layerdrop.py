"""LayerDrop over several processes, each of which leaves out other layers."""

import json
import re

import pytest
from sampling import soak
from test_lock import SMALL

FLAGS = """--moe-freq 1 --smoe-strata 2-2 --encoder-layerdrop 0.7 --decoder-layerdrop 0.7
    --update-freq 2 --max-update 4 --no-save
    --log-interval 1 --log-format json""".split()


@pytest.mark.parametrize("backend", [soak("legacy_ddp"), "pytorch_ddp"])
def test_layer_drop_over_processes(ranks, small_corpus, tmp_path, backend):
    small = [flag for flag in SMALL if flag != "--disable-validation"]
    more = ["--ddp-backend", backend, "--save-dir", tmp_path / "run"]  # with gloo, as --cpu implies
    run = ranks.train(tmp_path, 2, small_corpus, *small, *FLAGS, *more)
    logs = [json.loads(x) for x in re.findall(r"train_inner \| (\{.*\})", run.output(0))]
    assert len(logs) == 4
    assert all("loss" in log and "gnorm" in log for log in logs)
    assert all("requested_capacity" in log for log in logs)
    *_, valid = [json.loads(x) for x in re.findall(r"valid \| (\{.*\})", run.output(0))]
    assert {"valid_requested_capacity", "valid_overflow_expert1"} <= valid.keys()
