"""``--ddp-backend fully_sharded`` would flatten experts, and is refused."""

import pytest
from commands import refused, run
from test_expert_parallel import flags

FULLY_SHARDED = ("--ddp-backend", "fully_sharded")


@pytest.mark.parametrize("more", [(), ("--moe-freq", 0, "--decoder-moe-freq", 2)], ids=str)
def test_refused_with_experts(small_corpus, tmp_path, more):
    arguments = flags(small_corpus, tmp_path / "new", *FULLY_SHARDED, *more)
    refused(run("fairseq-train", *arguments, check=False), "--ddp-backend fully_sharded")
    assert not (tmp_path / "new").exists()
