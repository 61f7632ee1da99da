"""Who asks for fairseq's trainer gets ours, whatever the command; who asks for another gets that one."""

import pytest
import torch
from commands import PLUGIN, SCRIPTS, TINY, run, run_python
from sampling import soak
from test_lock import SMALL

from smoe_fairseq.modules import StratifiedMoE

OURS = "smoe_experts"  # what only our trainer writes into a checkpoint
MOE = [*SMALL, "--moe-freq", 2, "--smoe-strata", "2", "--max-update", 1]
GLOO = ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")

COMMANDS = {
    "module": ("python", "-m", "fairseq_cli.train"),
    "torchrun": (
        *("torchrun", "--standalone", "--nproc-per-node", 2, "--no-python"),
        SCRIPTS / "fairseq-train",
    ),
}

RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", ["fairseq-train", *map(soak, COMMANDS)])
def test_every_command_trains_with_ours(small_corpus, tmp_path, name):
    """fairseq-hydra-train too, which test_training.py runs."""
    flags = GLOO if name == "torchrun" else ()
    words = (small_corpus, "--save-dir", tmp_path, *MOE, *flags)
    if name == "fairseq-train":  # from a process that has imported nothing of fairseq
        assert run_python(RUN, SCRIPTS / name, *words).returncode == 0
    else:
        run(*COMMANDS[name], *words, fresh=True)
    assert OURS in torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)


@pytest.mark.parametrize("first", ["fairseq_cli.train", "smoe_fairseq"])
def test_subclasses_stay_what_they_are(first):
    program = f"""
import {first}, fairseq_cli.train, smoe_fairseq
from fairseq_cli.train import MegatronTrainer, Trainer
from smoe_fairseq.training.trainer import SMoETrainer
assert type(Trainer.__new__(Trainer, 1, task=2)) is SMoETrainer
assert type(MegatronTrainer.__new__(MegatronTrainer)) is MegatronTrainer
assert issubclass(SMoETrainer, Trainer)
"""
    result = run_python(program)
    assert result.returncode == 0, result.stdout


BIAS = ("--moe-balance", "bias", "--moe-second-expert-policy", "all")
SUBCLASS = """
import sys, fairseq_cli.train
from fairseq.trainer import Trainer
fairseq_cli.train.Trainer = type("Own", (Trainer,), {})
sys.argv = sys.argv[1:]
fairseq_cli.train.cli_main()
"""


@pytest.mark.parametrize(
    "program, words",
    [
        (SUBCLASS, ("--moe-balance bias", "SMoETrainer")),
        (RUN, ("--moe-balance bias", "--use-bmuf")),
    ],
    ids=["subclass", "bmuf"],
)
def test_gates_that_only_our_updates_teach(small_corpus, tmp_path, program, words):
    """A bias would stay 0 for ever, or drift apart: refused in one sentence, and fine without it."""
    bmuf = ["--use-bmuf"] if program == RUN else []
    flags = (SCRIPTS / "fairseq-train", small_corpus, "--save-dir", tmp_path, *MOE, *bmuf)
    result = run_python(program, *flags, *BIAS)
    assert result.returncode == 1 and all(word in result.stdout for word in words), result.stdout
    assert not list(tmp_path.glob("checkpoint*"))
    if not bmuf:
        assert run_python(program, *flags).returncode == 0


def test_without_the_plugin_the_trainer_is_fairseqs():
    program = "from fairseq.trainer import Trainer as T; assert type(T.__new__(T)) is T"
    assert run_python(program).returncode == 0


# A first update whose gradients overflow, as the loss scaler of a GPU reports it: the step is skipped.
OVERFLOW = """
import sys, torch
import fairseq_cli.train
from fairseq.optim.amp_optimizer import AMPOptimizer
clip, calls = AMPOptimizer.clip_grad_norm, []
def overflow_once(self, *arguments, **options):
    calls.append(1)
    if len(calls) > 1:
        return clip(self, *arguments, **options)
    self.fp32_optimizer.zero_grad()
    return torch.tensor(float("inf"))
AMPOptimizer.clip_grad_norm = overflow_once
sys.argv = sys.argv[1:]
fairseq_cli.train.cli_main()
print("calls", len(calls))
"""


@pytest.mark.parametrize("flags", [MOE, [*TINY, "--user-dir", PLUGIN]], ids=["moe", "stock"])
def test_amp_repeats_a_batch_that_overflows(small_corpus, tmp_path, flags):
    """fairseq's `train_step` then calls itself, inside of what ours has entered."""
    more = ["--save-dir", tmp_path, "--amp", "--max-update", 2, "--disable-validation"]
    result = run_python(OVERFLOW, "fairseq-train", small_corpus, *flags, *more)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "calls 3" in result.stdout.splitlines()


def test_a_fault_of_ours_is_not_blamed_on_the_checkpoint():
    """`load_checkpoint` says that --reset-optimizer helps, which costs its state, only where it may."""
    import fairseq.trainer  # noqa: F401  (which ours takes the place of, and so comes first)

    from smoe_fairseq.training.trainer import _is_fault_of_ours

    for fault, ours in (
        (lambda: StratifiedMoE(8, 8, no_such=1), True),
        (lambda: torch.ones("x"), False),
    ):
        with pytest.raises(TypeError) as end:
            fault()
        assert _is_fault_of_ours(end.value) == ours
