"""Who asks for fairseq's trainer gets ours, whatever the command; who asks for another gets that one."""

import pytest
import torch
from commands import SCRIPTS, run, run_python
from sampling import soak
from test_lock import SMALL

OURS = "smoe_experts"  # what only our trainer writes into a checkpoint
MOE = [*SMALL, "--moe-freq", 2, "--smoe-strata", "2", "--max-update", 1]
GLOO = ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")

COMMANDS = {
    "fairseq-train": ("fairseq-train",),
    "module": ("python", "-m", "fairseq_cli.train"),
    "torchrun": (
        *("torchrun", "--standalone", "--nproc-per-node", 2, "--no-python"),
        SCRIPTS / "fairseq-train",
    ),
}


@pytest.mark.parametrize("name", ["fairseq-train", soak("module"), soak("torchrun")])
def test_every_command_trains_with_ours(small_corpus, tmp_path, name):
    """fairseq-hydra-train too, which test_training.py runs."""
    flags = GLOO if name == "torchrun" else ()
    run(*COMMANDS[name], small_corpus, "--save-dir", tmp_path, *MOE, *flags, fresh=True)
    assert OURS in torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)


@pytest.mark.parametrize("first", ["fairseq_cli.train", "smoe_fairseq"])
def test_subclasses_stay_what_they_are(first):
    program = f"""
import {first}, fairseq_cli.train, smoe_fairseq
from fairseq_cli.train import MegatronTrainer, Trainer
from smoe_fairseq.distributed.trainer import SMoETrainer
assert type(Trainer.__new__(Trainer, 1, task=2)) is SMoETrainer
assert type(MegatronTrainer.__new__(MegatronTrainer)) is MegatronTrainer
assert issubclass(SMoETrainer, Trainer)
"""
    result = run_python(program)
    assert result.returncode == 0, result.stdout


def test_without_the_plugin_the_trainer_is_fairseqs():
    program = "from fairseq.trainer import Trainer as T; assert type(T.__new__(T)) is T"
    assert run_python(program).returncode == 0
