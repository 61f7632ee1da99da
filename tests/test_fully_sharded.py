"""``--ddp-backend fully_sharded`` would flatten experts, and is refused."""

import pytest
from commands import run
from test_expert_parallel import flags

FULLY_SHARDED = ("--ddp-backend", "fully_sharded")


@pytest.mark.parametrize(
    "more, sentence",
    [
        ((), "--ddp-backend fully_sharded does not go with experts"),
        (("--moe-freq", 0, "--decoder-moe-freq", 2), "does not go with experts"),
    ],
    ids=str,
)
def test_refused_with_experts(small_corpus, tmp_path, more, sentence):
    arguments = flags(small_corpus, tmp_path / "new", *FULLY_SHARDED, *more)
    refused = run("fairseq-train", *arguments, check=False)
    last = refused.stdout.splitlines()[-1]
    assert refused.returncode == 1 and last.startswith("error: ") and sentence in last
    assert "Traceback" not in refused.stdout and not (tmp_path / "new").exists()
