"""What training takes of memory, foretold: beside what real trainers allocate, and beside sums by hand."""

import gc
import json
import random
import sys

import pytest
import torch
from commands import preprocess, run

import smoe_fairseq
from smoe_fairseq.analysis.forecast import Forecast, Run, forecast
from smoe_fairseq.analysis.live_bytes import LiveBytes, TooMuch
from smoe_fairseq.analysis.remedy import first_that_fits
from smoe_fairseq.analysis.run_flags import parse_run

LENGTH = 32
# Large enough that Python's and torch's own small tensors do not count.
MODEL = "--arch smoe_transformer_tiny --encoder-embed-dim 256 --encoder-ffn-embed-dim 1024".split()
TRAINING = """--criterion smoe_label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --lr 0.001
    --max-tokens 1024 --cpu --no-save --disable-validation""".split()
GLOO = "--distributed-backend gloo --ddp-backend legacy_ddp".split()
DENSE, SMOE = ["--moe-freq", "0"], ["--smoe-strata", "4-4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sentences of one length, with the end of sentence `LENGTH`."""
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("bin")
    words = random.Random(1)
    for split, size in (("train", 256), ("valid", 8), ("test", 8)):
        for side in ("src", "tgt"):
            lines = [
                " ".join(f"w{words.randrange(3000)}" for _ in range(LENGTH - 1))
                for _ in range(size)
            ]
            (raw / f"{split}.{side}").write_text("\n".join(lines) + "\n")
    preprocess(raw, folder, "--joined-dictionary")
    return folder


def measure(data: str, file: str, *words: str) -> None:
    """Trains two updates and writes what the second one had allocated at most, and the vocabulary.

    What was there before it is counted tensor by tensor, what came by torch's profiler.
    """
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed import utils
    from fairseq.trainer import Trainer

    def train(cfg):
        task = tasks.setup_task(cfg.task)
        trainer = Trainer(
            cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        )
        batches = iter(trainer.get_train_iterator(1).next_epoch_itr(shuffle=False))
        updates = [
            [next(batches) for _ in range(cfg.optimization.update_freq[0])] for _ in range(2)
        ]
        trainer.lr_step_begin_epoch(1)
        trainer.train_step(updates[0])
        trainer.zero_grad()
        before = alive()
        peak = before + allocated(lambda: trainer.train_step(updates[1]))
        if trainer.data_parallel_rank == trainer.data_parallel_world_size - 1:
            state = trainer.optimizer.optimizer.state.values()
            numbers = [x.nbytes for each in state for x in each.values() if torch.is_tensor(x)]
            result = {"peak": peak, "optimizer": sum(numbers)}
            result["vocabulary"] = len(task.target_dictionary)
            with open(file, "w") as output:
                json.dump(result, output)

    sys.argv = ["fairseq-train", data, *words]
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser))
    utils.call_main(cfg, train)


def alive() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and not x.is_meta]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def allocated(step) -> int:
    """The most that ``step`` had allocated beyond what there was."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        step()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.fixture
def both(ranks, data, tmp_path):
    """Measured and foretold, of the same flags."""

    def both(flags: list[str], processes: int = 1) -> tuple[dict, Forecast]:
        plugin = ["--user-dir", smoe_fairseq.__path__[0]]
        words = [*plugin, *MODEL, *TRAINING, *flags, *(GLOO if processes > 1 else ())]
        file = tmp_path / "measured.json"
        ranks.start(
            *(tmp_path, processes, str(data), str(file), *words),
            **{"function": measure, "one": processes == 1},
        ).finish()
        measured = json.loads(file.read_text())
        run = Run(parse_run(words), measured["vocabulary"], processes, LENGTH)
        return measured, forecast(run)

    return both


@pytest.mark.parametrize("flags", [DENSE, SMOE, [*SMOE, "--update-freq", "2"]], ids=str)
def test_a_real_trainers_peak(both, flags):
    measured, foretold = both(flags)
    assert foretold.peak == pytest.approx(measured["peak"], rel=0.1)
    assert foretold.optimizer == measured["optimizer"]
