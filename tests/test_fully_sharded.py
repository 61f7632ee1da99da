"""``--ddp-backend fully_sharded``: where it leads nowhere, one sentence says what to use instead."""

import pytest
from commands import run
from test_compat import run_without
from test_expert_parallel import flags
from test_several_processes import stock

FULLY_SHARDED = ("--ddp-backend", "fully_sharded")
ON_CPU = (
    "error: --ddp-backend fully_sharded needs GPUs, and no --cpu; use --ddp-backend legacy_ddp, with "
    "--zero-sharding os where memory is short"
)

OPEN = """
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import fsdp_enable_wrap

with fsdp_enable_wrap(DistributedTrainingConfig(distributed_world_size=1)):
    print("open")
"""


@pytest.mark.soak
def test_the_group_of_one_process_is_found(tmp_path):
    """With a fairscale that keeps it elsewhere."""
    program = tmp_path / "program.py"
    program.write_text(OPEN)
    assert run("python", program).stdout.splitlines()[-1] == "open"
    without = run_without("find_group_of_one", program).stdout
    assert without.splitlines()[-1] == "ModuleNotFoundError: No module named 'fairscale.utils'"


@pytest.mark.parametrize("world_size", [1, 2])
def test_refused_on_a_cpu(ranks, small_corpus, tmp_path, world_size):
    arguments = stock(small_corpus, tmp_path / "new", *FULLY_SHARDED)
    started = ranks.start(tmp_path / "logs", world_size, *arguments, one=world_size == 1)
    assert started.wait(60) == [1] * world_size
    assert started.output(0).splitlines()[-1] == ON_CPU
    assert "Traceback" not in started.output() and not (tmp_path / "new").exists()
    if world_size == 1:
        without = run_without("refuse_fully_sharded_on_cpu", "fairseq-train", *arguments).stdout
        assert "Traceback" in without and ON_CPU not in without


@pytest.mark.parametrize(
    "more, sentence",
    [
        ((), "--ddp-backend fully_sharded does not go with experts"),
        (("--moe-freq", 0, "--decoder-moe-freq", 2), "does not go with experts"),
        (("--moe-freq", 0), ON_CPU),  # a dense model
    ],
    ids=str,
)
def test_refused_with_experts(small_corpus, tmp_path, more, sentence):
    arguments = flags(small_corpus, tmp_path / "new", *FULLY_SHARDED, *more)
    refused = run("fairseq-train", *arguments, check=False)
    last = refused.stdout.splitlines()[-1]
    assert refused.returncode == 1 and last.startswith("error: ") and sentence in last
    assert "Traceback" not in refused.stdout and not (tmp_path / "new").exists()
