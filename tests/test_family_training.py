"""The wider family under ``fairseq-train``: several processes, resuming, checkpoints, the bias."""

import re
import shutil
from collections import Counter

import handmade
import pytest
import torch
from commands import PLUGIN, changed, config_of, generate
from family import FAMILY
from sampling import soak, some
from test_compat import run_without
from test_expert_parallel import averages, checkpoint, compare, flags, furthest, whole
from test_expert_parallel_hangs import train_until
from test_several_processes import LAST, assert_same_bits, content

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.inputs import capacities_of
from smoe_fairseq.modules.gates.threshold import RunningThreshold

STEPS = re.compile(r"(encoder|decoder)\.layers\.1\.moe\.gates\.\d\.(bias|coefficient)\.steps")


def member_flags(member, data, folder, *more) -> list:
    return flags(data, folder, *FAMILY[member].split(), "--max-update", 3, *more)


def steps_of(model: dict) -> dict:
    return {name: value.tolist() for name, value in model.items() if STEPS.fullmatch(name)}


def thresholds_of(model: dict) -> dict:
    return {name: value for name, value in model.items() if name.endswith(".threshold.steps")}


ALONE = (
    "top-3 null simple top-p relu threshold depths hash residual shared bias layers chain".split()
)


@pytest.mark.soak
@pytest.mark.parametrize("member", some(sorted({*FAMILY} - {*ALONE} | {"bias"}), "bias"))
def test_sharded_experts_train_as_replicated_ones(ranks, small_corpus, tmp_path, member):
    """On two processes, each of which balances its own tokens where that is done by tokens."""
    folders = {way: tmp_path / way for way in ("replicated", "sharded")}
    for way, folder in folders.items():
        own = ["--expert-parallel"] if way == "sharded" else []
        ranks.train(folder, 2, *member_flags(member, small_corpus, folder, "--batch-size", 3, *own))
    sharded = checkpoint(folders["sharded"])
    replicated = content(folders["replicated"])["model"]
    same = {name: replicated[name] for name in sharded.record.parameters}
    assert furthest(whole(folders["sharded"]), same) < 2e-5
    one, other = (averages(folder) for folder in folders.values())
    for name in ("loss", "moe_gate_loss", "experts_per_token"):
        assert one[name] == pytest.approx(other[name], rel=1e-5), name
    held = [state["model"]["encoder.layers.1.moe.experts.w1"].shape[0] for state in sharded.states]
    assert held == [4, 4]
    steps = [steps_of(state["model"]) for state in sharded.states]
    assert steps[0] == steps[1] == steps_of(replicated)


@pytest.mark.soak
@pytest.mark.parametrize("member", some(sorted(ALONE), "bias", first=1))
def test_two_processes_equal_one(ranks, small_corpus, tmp_path, member):
    """Those whose tokens do not ask what others do: with the batches of both in one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    # So that rounding moves no score over a threshold.
    seed = ("--seed", 2 if member == "depths" else 1)
    alone = member_flags(member, small_corpus, one, "--update-freq", 2, *seed)
    ranks.train(one, 1, *alone, one=True)
    ranks.train(two, 2, *member_flags(member, small_corpus, two, "--expert-parallel", *seed))
    compare(two, one, logged=1e-5, parameters=2e-5)
    steps = steps_of(checkpoint(one).states[0]["model"])
    assert steps == steps_of(checkpoint(two).states[0]["model"])
    assert bool(steps) == (member in ("bias", "relu"))
    found, others = (thresholds_of(checkpoint(folder).states[0]["model"]) for folder in (one, two))
    assert bool(found) == (member in ("threshold", "depths"))
    for name, steps_E in found.items():  # up to what a sum's order changes
        assert (steps_E - others[name]).abs().max() <= 2
        assert steps_E.min() > -(2**31) and steps_E.any()


@pytest.mark.soak
def test_the_bias_goes_on_once_per_update(ranks, small_corpus, tmp_path):
    """By one step at most, whatever the batches and how often they are computed; validation moves nothing."""
    found = []
    for more in ((), ("--checkpoint-activations",)):
        folder = tmp_path / str(len(more))
        arguments = member_flags("bias", small_corpus, folder, "--update-freq", 3, *more)
        if more:
            arguments.remove("--disable-validation")
        ranks.train(folder, 1, *arguments, one=True)
        found.append(steps_of(content(folder)["model"]))
    assert found[0] == found[1] and len(found[0]) == 4
    flat = [n for values in found[0].values() for n in values]
    assert max(map(abs, flat)) <= 3 and any(flat)


@pytest.mark.parametrize("member", some(["bias", "relu", "threshold", "depths"], "bias"))
def test_frozen_gates_do_not_learn_by_counts(ranks, small_corpus, tmp_path, member):
    arguments = member_flags(member, small_corpus, tmp_path, "--freeze", "encoder")
    ranks.train(tmp_path, 1, *arguments, one=True)
    steps = {"encoder": set(), "decoder": set()}
    for name, tensor in content(tmp_path)["model"].items():
        if name.endswith(".steps"):
            steps[name.partition(".")[0]] |= {*tensor.flatten().tolist()}
    initial = {0, RunningThreshold.UNSET}
    assert steps["encoder"] and steps["encoder"] <= initial and not steps["decoder"] <= initial


@pytest.mark.parametrize(
    "member",
    some(["bias", "update", "hash", "base", "null", "simple", "relu", "threshold"], "bias"),
)
def test_resuming_equals_never_having_stopped(ranks, small_corpus, tmp_path, member):
    more = ["--max-update", 4, "--update-freq", 2, "--save-interval-updates", 2]
    once, halves = tmp_path / "once", tmp_path / "halves"
    ranks.train(tmp_path, 1, *member_flags(member, small_corpus, once, *more), one=True)
    halves.mkdir()
    shutil.copy(once / "checkpoint_1_2.pt", halves / LAST)
    arguments = member_flags(member, small_corpus, halves, *more)
    assert "@ 2 updates" in ranks.train(tmp_path, 1, *arguments, one=True).output()
    assert_same_bits(content(once), content(halves))


def losses_over_processes(samples_seed: int):
    """Each of two processes has a batch; both use the first choices of both."""
    import torch.distributed as dist
    from test_criterion import balance_of, make_criterion, make_sample
    from test_model import tiny

    from smoe_fairseq.training.launch import all_gather

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = tiny(*FAMILY["update"].split(), "--moe-second-expert-policy", "all").train()
    criterion = make_criterion()
    criterion.train()
    samples = [make_sample(2, 4, samples_seed), make_sample(5, 9, samples_seed + 1)]
    sample = samples[dist.get_rank()]
    _, _, log = criterion(model, sample)
    stats = [model(**each["net_input"])[1]["moe_stats"] for each in samples]
    expected = balance_of(stats[dist.get_rank()], *stats)
    found = float(log["moe_gate_loss"]) / sample["ntokens"]
    assert abs(found - expected) < 1e-5, (found, expected)
    assert len(set(all_gather(found))) == 2  # p is each one's own


def test_balance_over_processes(ranks, tmp_path):
    ranks.train(tmp_path, 2, 1, function=losses_over_processes)


@pytest.mark.soak
def test_balance_over_an_update_with_uneven_processes(ranks, small_corpus, tmp_path):
    """17 batches of 50 sentences on two processes: the last update of an epoch has a dummy batch."""
    arguments = member_flags(
        "update", small_corpus, tmp_path, "--batch-size", 3, "--max-update", 10
    )
    run_ = ranks.train(tmp_path, 2, *arguments)
    assert len(re.findall(r'"num_updates": "\d+"', run_.output(0))) >= 10


PASSES = {"expert-choice": 1, "base": 1, "shared": 1, "chain": 3}  # else up to 2


@pytest.mark.soak
@pytest.mark.parametrize("member", some([*PASSES, "null", "layers"], "expert-choice", "layers"))
def test_analysis_counts_every_token(three_languages, tmp_path, member):
    """Each token of each layer has one first choice in every stratum where it stops."""
    more = ["--max-update", 1, "--encoder-ffn-embed-dim", 64, *FAMILY[member].split()]
    if member != "base":  # which refuses it: it would have no effect
        more += ["--moe-eval-capacity-factor", 1]
    handmade.train(three_languages, tmp_path, *handmade.MULTILINGUAL, *more)
    handmade.analyze(three_languages, tmp_path / "checkpoint_last.pt", tmp_path / "analysis")
    of_layer = Counter()
    for row in handmade.read(tmp_path / "analysis/load.csv"):
        of_layer[row["direction"], row["side"], row["layer"]] += int(row["first_choices"])
    model, _ = inputs.load(tmp_path / "checkpoint_last.pt", three_languages)
    assert all(capacity.eval_factor == 0 for capacity in capacities_of(model))
    assert len(of_layer) == 4 * 4
    for (_, side, _), choices in of_layer.items():
        tokens = sum(handmade.LENGTHS) + (16 if side == "encoder" else 8)  # </s>, and the language
        if member in PASSES:
            assert choices == PASSES[member] * tokens
        else:
            assert tokens <= choices <= 2 * tokens


@pytest.mark.soak
def test_an_average_of_parameters_has_the_bias_as_it_is(ranks, small_corpus, tmp_path):
    """Without the patch fairseq ends in a stack trace over whole numbers."""
    averaged = ["--store-ema", "--ema-decay", 0.5]
    arguments = member_flags("bias", small_corpus, tmp_path, *averaged)
    ranks.train(tmp_path, 1, *arguments, one=True)
    state = content(tmp_path)
    steps = steps_of(state["model"])
    averaged = steps_of(state["extra_state"]["ema"])  # as it was in the last update
    assert len(steps) == 4
    norms = {name for name in state["model"] if ".layer_norm." in name}
    assert norms and norms <= state["extra_state"]["ema"].keys()
    for name, values in averaged.items():
        assert any(values)
        assert all(abs(a - b) <= 1 for a, b in zip(values, steps[name], strict=True))
    for file in tmp_path.glob("*.pt"):
        file.unlink()
    failed = run_without("average_once", "fairseq-train", *map(str, arguments))
    assert failed.returncode != 0
    assert "can't be cast to the desired output type Long" in failed.stdout


@pytest.mark.soak
def test_a_checkpoint_loads_with_options_that_training_would_refuse(sparse, small_corpus, tmp_path):
    """Such as one from before they were refused (test_options.py)."""
    without_effect = {"moe_top_p": 0.3, "moe_hash_seed": 5}
    change = lambda state: config_of(state, "model").update(without_effect)  # noqa: E731
    path = changed(sparse, tmp_path / "old.pt", change)
    assert generate(small_corpus, path, "--user-dir", PLUGIN)


@pytest.mark.soak
@pytest.mark.parametrize("more", [[], soak(["--ema-fp32"])])
def test_an_average_begins_at_a_checkpoint_without_one(ranks, small_corpus, tmp_path, more):
    """Without the patch fairseq looks for parameters that it has removed."""
    ranks.train(tmp_path, 1, *flags(small_corpus, tmp_path, "--max-update", 2), one=True)
    before = content(tmp_path)["model"]
    averaged = ["--store-ema", "--ema-decay", 0.75, *more, "--lr", 0.1]
    arguments = flags(small_corpus, tmp_path, "--max-update", 3, *averaged)
    run_ = ranks.train(tmp_path, 1, *arguments, one=True)
    assert "has no average (--store-ema): it starts at its parameters" in run_.output()
    state = content(tmp_path)
    w1, embeddings = "encoder.layers.1.moe.experts.w1", "encoder.embed_tokens.weight"  # shared
    expected = {}
    for name in (w1, embeddings):
        assert not torch.equal(before[name], state["model"][name])
        expected[name] = 0.75 * before[name] + 0.25 * state["model"][name]
        assert torch.allclose(state["extra_state"]["ema"][name], expected[name], atol=1e-6)
    # And goes on with what it has saved.
    ranks.train(tmp_path, 1, *arguments, "--max-update", 4, one=True)
    state = content(tmp_path)
    for name, first in expected.items():
        second = 0.75 * first + 0.25 * state["model"][name]
        assert torch.allclose(state["extra_state"]["ema"][name], second, atol=1e-6)


def test_a_process_that_is_out_of_memory_skips_no_count(ranks, small_corpus, tmp_path):
    """The others would wait for its counts; so all end."""
    arguments = list(map(str, member_flags("update", small_corpus, tmp_path, "--batch-size", 3)))
    run_ = ranks.start(tmp_path, 2, "out of memory", arguments, function=train_until)
    assert run_.wait() == [1, 1]
    words = "out of memory with --moe-balance-over update: try --"
    assert words in run_.output(1)
