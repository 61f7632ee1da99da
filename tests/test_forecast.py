"""What training takes of memory, foretold: beside what real trainers allocate, and beside sums by hand."""

import gc
import json
import random
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import preprocess, smoe
from fairseq.modules import SinusoidalPositionalEmbedding
from sampling import soak
from test_lock import GLOO
from test_recipes import ROOT, recipe, write_dataset

import smoe_fairseq
from smoe_fairseq.analysis.cost import build_meta_model, parse_run
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.memory import Forecast, Run, forecast, shapes_only, tokens_that_fit
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.recipes.training.batch import longest_sentence

LENGTH = 32
# Large enough that Python's and torch's own small tensors do not count.
MODEL = "--arch smoe_transformer_tiny --encoder-embed-dim 256 --encoder-ffn-embed-dim 1024".split()
TRAINING = """--criterion smoe_label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --lr 0.001
    --max-tokens 1024 --cpu --no-save --disable-validation""".split()
DENSE, SMOE = ["--moe-freq", "0"], ["--smoe-strata", "4-4"]


def test_models_that_other_threads_load_meanwhile_have_their_positions():
    expected = SinusoidalPositionalEmbedding.get_embedding(9, 8, 1)
    with shapes_only(), ThreadPoolExecutor() as pool:
        found = pool.submit(SinusoidalPositionalEmbedding.get_embedding, 9, 8, 1).result()
    assert torch.equal(found, expected)


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

    sys.path.insert(0, str(ROOT))
    from benchmarks.timing import _cpu_peak

    def train(cfg):
        torch.manual_seed(1)
        if cfg.model.expert_parallel:  # else chance decides what a process has to do
            TopKGate.select = choose_evenly
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
        peak = before + _cpu_peak(lambda: trainer.train_step(updates[1]))
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


def choose_evenly(gate, probs_TE, active_T, first_T1):
    """One expert after the other, in the place of ``TopKGate.select``."""
    tokens, number = probs_TE.shape
    return (torch.arange(2 * tokens) % number).view(tokens, 2)


def alive() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and not x.is_meta]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def run_of(words, vocabulary, *others) -> Run:
    flags = parse_run(words)
    return Run(build_meta_model(flags, vocabulary), flags, *others)


GATES = [["--smoe-strata", "8", "--moe-gate", gate] for gate in ("base", "expert-choice", "hash")]
ALONE = [DENSE, [*SMOE, "--update-freq", "2"], *GATES]
OF_TWO = [[*SMOE, "--expert-parallel"], [*SMOE, "--zero-sharding", "os"]]


@pytest.mark.parametrize(
    "flags, processes",
    [(SMOE, 1), *(soak(flags, 1) for flags in ALONE), *(soak(flags, 2) for flags in OF_TWO)],
    ids=str,
)
def test_a_real_trainers_peak(ranks, data, tmp_path, flags, processes):
    """Of two, the last one: all gates see its experts. ZeRO's buffers may share their memory."""
    plugin, file = ["--user-dir", smoe_fairseq.__path__[0]], tmp_path / "measured.json"
    words = [*plugin, *MODEL, *TRAINING, *flags, *(GLOO if processes > 1 else ())]
    how = {"function": measure, "one": processes == 1}
    ranks.train(tmp_path, processes, str(data), str(file), *words, **how)
    measured = json.loads(file.read_text())
    foretold = forecast(run_of(words, measured["vocabulary"], processes, LENGTH))
    assert 0.8 < foretold.peak / measured["peak"] < (1.3 if "os" in flags else 1.2)
    assert processes > 1 or foretold.optimizer == measured["optimizer"]


VOCABULARY = 100
LANGUAGE_MODEL = "--arch smoe_transformer_lm_tiny --smoe-strata 2-2 --max-tokens 64".split()
TINY = "--arch smoe_transformer_tiny --smoe-strata 2-2 --max-tokens 64".split()
EXPERTS = 2 * 4 * (2 * 128 * 256 + 256 + 128)  # parameters of two layers
LARGEST = 4 * 256 * 128  # one of a layer's experts


def foretell(*flags: str, processes: int = 1) -> Forecast:
    return forecast(run_of([*TINY, *flags], VOCABULARY, processes, 8))


def parameters(processes: int = 1) -> int:
    """Of one process with its share of the experts."""
    return foretell("--expert-parallel", processes=processes).weights // 4


BYTES = {  # of a weight, its gradient, what the optimizer has of it; and of the largest one in a step
    "": (4, 4, 8, 4),
    "--fp16": (2, 2, 16, 4),  # of all in one
    "--fp16 --fp16-no-flatten-grads": (2, 2, 16, 4),
    "--memory-efficient-fp16": (2, 2, 8, 12),
    "--optimizer sgd": (4, 4, 0, 0),
    "--optimizer sgd --momentum 0.9": (4, 4, 4, 0),
    "--optimizer nag": (4, 4, 4, 0),
    "--optimizer adagrad": (4, 4, 4, 4),
    "--optimizer adamax": (4, 4, 8, 4),
    "--optimizer adadelta": (4, 4, 8, 8),
    "--optimizer adafactor": (4, 4, 0, 8),
}


@pytest.mark.parametrize("flags", BYTES)
def test_what_is_held_in_each_precision(flags):
    held = foretell(*flags.split(), "--max-tokens", "1")
    total = parameters()
    *numbers, in_step = BYTES[flags]
    expected = tuple(total * number for number in numbers)
    assert (held.weights, held.gradients, held.optimizer) == expected
    largest = total if flags == "--fp16" else LARGEST
    assert held.memory == sum(expected) < held.peak
    assert held.peak - held.memory == pytest.approx(in_step * largest, abs=10**5)


def test_sharded_experts_are_one_processs_share():
    shared = parameters() - EXPERTS
    for processes, share in ((2, 2), (4, 4), (8, 4)):
        assert parameters(processes) == shared + EXPERTS // share


@pytest.mark.parametrize("flags", ["", "--expert-parallel"])
def test_zero_leaves_a_process_its_part_of_the_moments(flags):
    """Of shared parameters; the largest part is at most one parameter above the mean of all."""
    whole, zero = (
        foretell(*flags.split(), *more, "--ddp-backend", "legacy_ddp", processes=2)
        for more in ((), ("--zero-sharding", "os"))
    )
    spread = parameters() - (EXPERTS if flags else 0)
    own = EXPERTS // 2 if flags else 0
    assert 8 * (spread / 2 + own) <= zero.optimizer <= 8 * (spread / 2 + own + LARGEST)
    assert zero.optimizer < whole.optimizer == 2 * whole.weights
    assert (zero.weights, zero.gradients) == (whole.weights, whole.gradients)


def test_gradients_of_several_processes_are_gathered_in_a_buffer():
    assert foretell().exchange == 0
    assert foretell(processes=2).exchange == foretell().gradients


def test_activations_grow_with_tokens_and_shrink_with_checkpoints():
    one, two = (foretell("--max-tokens", n).activations for n in ("64", "128"))
    assert two == pytest.approx(2 * one, rel=0.01)
    for flag in ("--checkpoint-activations", "--offload-activations"):
        assert foretell(flag).activations < one / 2
    words = [*TINY, "--max-tokens", "64", "--attention-dropout", "0.1", "--cpu"]
    short, long = (forecast(run_of(words, VOCABULARY, 1, length)) for length in (8, 64))
    assert long.activations > short.activations  # attention of all to all


@pytest.mark.parametrize(
    "gate, device", [("depths", []), ("depths", ["--cpu"]), ("relu", []), ("top-p", [])]
)
def test_rows_are_those_of_the_experts_that_take_the_token(gate, device):
    kinds = ["--moe-gate", gate], ["--moe-top-k", "8"]
    found, of_all = (foretell("--smoe-strata", "8", *flags, *device) for flags in kinds)
    assert found.activations < of_all.activations


def test_an_update_of_several_batches_keeps_gradients_all_the_time():
    one = foretell("--max-tokens", "1024")
    many = foretell("--max-tokens", "1024", "--update-freq", "4")
    assert one.peak < many.peak <= one.peak + one.gradients


def test_a_language_model_is_forecast_too():
    found = forecast(run_of(LANGUAGE_MODEL, VOCABULARY, 1, 8))
    assert found.memory == 16 * (found.weights // 4) and found.peak > found.memory


def test_an_optimizer_that_is_not_known_is_named():
    with pytest.raises(UsageError, match="--optimizer lamb: "):
        foretell("--optimizer", "lamb")


@pytest.mark.parametrize("flags", ["--cpu", "--bf16", "--fp16 --checkpoint-activations"])
def test_what_is_said_to_fit_does(flags):
    """The most tokens of an update of two batches: no token more."""
    run = run_of([*TINY, *flags.split(), "--update-freq", "2"], VOCABULARY, 1, 1)
    room = 2 * forecast(run).peak
    fit = tokens_that_fit(run, room)
    below, above = (forecast(run.with_flags(max_tokens=fit + n)).peak for n in (0, 1))
    assert below <= room < above and fit > run.flags.max_tokens
    assert tokens_that_fit(run, forecast(run).memory) == 0


def test_more_memory_holds_more_tokens():
    command = ["cost", "--json", *TINY, "--vocab-size", "100", "--bf16", "--gpu-memory"]
    small, large = (json.loads(smoe(*command, size).stdout)["fits"] for size in (24, 80))
    assert small.keys() == {"replicated", "translation"}
    assert all(0 < small[name] < large[name] for name in small)
    assert not any(json.loads(smoe(*command, "0.001").stdout)["fits"].values())
    command.remove("--json")
    for more, names in (([], ["training"]), (["--world-size", 2], ["replicated", "sharded"])):
        table = smoe(*command, 24, *more).stdout.partition("tokens that fit")[2]
        rows = [line.split()[0] for line in table.partition("\n\n")[0].splitlines()[1:]]
        assert rows == [*names, "translation"]


# train.sh


def told(folder, *words, **environment):
    given = {"DRY_RUN": "1", "FORECAST": "1", "GPUS": "0"} | environment
    return recipe(folder, "train", "phrasebook", *words, **given)


def test_train_tells_what_it_takes_and_what_to_do(tmp_path):
    """However much memory there is: terabytes of tokens do not fit, and what is proposed does."""
    too_much = ["--max-tokens", str(2**27)]
    result = told(tmp_path, "smoe-4-4", *too_much)
    (warning,) = [x for x in result.stderr.splitlines() if x.startswith("warning: ")]
    assert "will not fit into this machine's memory" in warning
    words = re.search(r"with (--max-tokens \d+ --update-freq \d+) it fits", warning)[1]
    better = told(tmp_path, "smoe-4-4", *too_much, *words.split())
    assert "warning" not in better.stderr
    assert (
        shlex.split(better.stdout.splitlines()[-1])[0] == "fairseq-train"
        and list(tmp_path.iterdir()) == []
    )


def test_a_batch_of_sentences_is_as_many_of_the_longest(tmp_path):
    train = {"arch": "smoe_transformer_tiny", "lr": 0.1, "batch-size": 3, "max-update": 1}
    given = write_dataset(tmp_path / "c", "own", pairs=["en-fr"], raw={}, train=train)
    given |= {"DRY_RUN": "1", "FORECAST": "1", "GPUS": "0"}
    said = recipe(tmp_path, "train", "own", "dense", **given).stdout
    assert re.search(r"for ([\d,]+) tokens in sentences of 32 ", said)[1] == "96"


def test_what_cannot_be_foretold_is_a_comment(tmp_path):
    result = told(tmp_path, "dense", "--amp")
    assert result.returncode == 0 and result.stderr == ""
    (line,) = [x for x in result.stdout.splitlines() if "is not known" in x]
    assert line.startswith("# ") and "--amp" in line


def test_a_run_that_goes_on_is_not_told_of_again(tmp_path):
    (tmp_path / "runs/phrasebook/dense").mkdir(parents=True)
    (tmp_path / "runs/phrasebook/dense/checkpoint_last.pt").touch()
    for environment in ({}, {"RUN_DIR": "other", "FORECAST": "0"}):
        assert "at the peak" not in told(tmp_path, "dense", **environment).stdout


def test_the_longest_sentence_is_the_datas(data):
    assert longest_sentence(data) == LENGTH + 1  # with the language token
    assert longest_sentence(data / "nowhere") is None
