"""Experts spread over processes: the same training as in one process, whatever their number."""

import copy
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, sentence_of
from fairseq.dataclass.configs import FairseqConfig
from ranks import fairseq_train

from smoe_fairseq.checkpoints.sets import Shards
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.training.launch import check_options

UPDATES = 3


def flags(data, save_dir, *more):
    """A tiny SMoE in which nothing is drawn by chance and nothing dropped; later flags win."""
    return [
        *(data, "--user-dir", PLUGIN, "--cpu", "--num-workers", 0),
        *("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"),
        *("--arch", "smoe_transformer_tiny", "--encoder-embed-dim", 32),
        *("--encoder-ffn-embed-dim", 48, "--smoe-strata", "2-2-2-2", "--dropout", 0),
        *("--moe-capacity-factor", 0, "--moe-second-expert-policy", "all"),
        *("--criterion", "smoe_label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--optimizer", "adam", "--adam-eps", 1e-4, "--lr", 0.01, "--batch-size", 1),
        *("--max-update", UPDATES, "--disable-validation", "--no-epoch-checkpoints"),
        *("--save-dir", save_dir, "--log-format", "json", "--log-interval", 1, *more),
    ]


def checkpoint(folder) -> Shards:
    return Shards.open(Path(folder) / "checkpoint_last.pt")


def whole(folder, part="model") -> dict[str, torch.Tensor]:
    """All parameters of a run, or the state of its optimizer, experts of all ranks together."""
    shards = checkpoint(folder)
    state = shards.state_for(world_size=1)
    names = shards.record.parameters
    if part == "model":
        return {name: state["model"][name] for name in names}
    moments = state["last_optimizer_state"]["state"]
    return {
        f"{names[i]} {key}": value
        for i, values in moments.items()
        for key, value in values.items()
        if torch.is_tensor(value)
    }


def averages(folder) -> dict[str, float]:
    """Means over all updates of what training logs, with all their digits."""
    state = checkpoint(folder).states[0]["extra_state"]["metrics"]["train"]
    meters = {key: meter for _, key, kind, meter in state if kind == "AverageMeter"}
    return {key: float(m["sum"] / m["count"]) for key, m in meters.items() if m["count"]}


def furthest(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one)


SETTINGS = {
    "plain": [],
    "accumulated-clipped": ["--update-freq", 2, "--clip-norm", 0.5],
    "released": ["--smoe-norm", "released"],
}


def with_setting(setting: str, more: int) -> list:
    """Flags of a setting, with a batch ``more`` times as large by accumulation."""
    given = SETTINGS[setting]
    factor = 2 if "--update-freq" in given else 1
    return [*given, "--update-freq", factor * more]


def compare(one: Path, other: Path, logged: float, parameters: float) -> None:
    ours, theirs = averages(one), averages(other)
    for name in ("loss", "nll_loss", "moe_gate_loss", "requested_capacity", "gnorm"):
        assert ours[name] == pytest.approx(theirs[name], rel=logged), name
    assert furthest(whole(one), whole(other)) < parameters


def test_equals_one_process(ranks, small_corpus, tmp_path):
    """Sharded, and with all experts on each rank by any back end; the soak has doubles."""
    alone, each = (with_setting("accumulated-clipped", more) for more in (2, 1))
    ranks.train(tmp_path, 1, *flags(small_corpus, tmp_path / "one", *alone), one=True)
    for words in ("--expert-parallel", "--ddp-backend legacy_ddp", "--ddp-backend pytorch_ddp"):
        folder = tmp_path / words
        ranks.train(tmp_path, 2, *flags(small_corpus, folder, *each, *words.split()))
        compare(folder, tmp_path / "one", logged=1e-5, parameters=2e-5)
    shards = checkpoint(tmp_path / "--expert-parallel")
    assert shards.record.world_size == 2
    held = [len(s["model"]["encoder.layers.1.moe.experts.w1"]) for s in shards.states]
    assert held == [4, 4]
    assert averages(tmp_path / "--expert-parallel")["clip"] == 100  # percent of updates


def in_double(arguments):
    """``fairseq-train`` in double precision, which it has no flag for."""
    from fairseq import utils

    torch.set_default_dtype(torch.float64)
    utils.log_softmax = lambda x, dim, onnx_trace=False: x.log_softmax(dim)
    if "--expert-parallel" not in arguments:  # the norm of stock fairseq is in single precision
        utils.clip_grad_norm_ = lambda parameters, max_norm, _=None: torch.nn.utils.clip_grad_norm_(
            parameters, max_norm or float("inf")
        )
    fairseq_train(arguments)


@pytest.mark.soak
@pytest.mark.parametrize(
    "strata, setting",
    [("8", "plain"), ("4-4", "accumulated-clipped"), ("2-2-2-2", "released")],
)
def test_equals_one_process_in_double_precision(ranks, small_corpus, tmp_path, strata, setting):
    for world_size in (1, 2, 4):
        folder = tmp_path / str(world_size)
        arguments = flags(
            *(small_corpus, folder, "--smoe-strata", strata),
            *with_setting(setting, 4 // world_size),
        )
        if world_size > 1:
            arguments += ["--expert-parallel"]
        words = list(map(str, arguments))
        ranks.train(folder, world_size, words, function=in_double, one=world_size == 1)
    for world_size in (2, 4):
        compare(tmp_path / str(world_size), tmp_path / "1", logged=1e-10, parameters=1e-10)


@pytest.mark.soak
def test_checkpointing_of_activations_changes_nothing(ranks, small_corpus, tmp_path):
    """Precisions beside sharded experts are those of test_zero.py."""
    for name, more in (("plain", ()), ("less", ("--checkpoint-activations",))):
        arguments = flags(small_corpus, tmp_path / name, "--expert-parallel", *more)
        ranks.train(tmp_path, 2, *arguments, "--max-update", 6, "--batch-size", 4)
    assert furthest(whole(tmp_path / "plain"), whole(tmp_path / "less")) < 1e-5


def norm_of_all(scale: float):
    """On each of two ranks with two experts each: the norm over shared parameters and all experts."""
    import torch.distributed as dist

    from smoe_fairseq.training.gradients import ExpertNorm
    from smoe_fairseq.training.launch import all_gather

    dist.init_process_group("gloo")
    norm = ExpertNorm(3 * [Placement(4, 2, dist.get_rank())])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        torch.manual_seed(1)
        shared = [scale * torch.randn(40, 30, dtype=dtype) for _ in range(5)]
        experts = [[scale * torch.randn(2, 30, dtype=dtype) for _ in range(3)] for _ in range(2)]
        everything = [*shared, *experts[0], *experts[1]]
        wanted = torch.cat([g.double().flatten() for g in everything]).norm()
        found = norm(shared, experts[dist.get_rank()])
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        tolerance = 1e-14 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=0)
        assert len(set(all_gather(found.item()))) == 1
        if dist.get_rank() == 1:
            experts[1][0].view(-1)[0] = float("inf")
        assert norm(shared, experts[dist.get_rank()]).isinf()


def test_the_norm_is_in_single_precision_at_least(ranks, tmp_path):
    """Of each gradient in half precision it is beyond what that can hold."""
    ranks.train(tmp_path, 2, 4000.0, function=norm_of_all)


def overflow_on_one_rank(arguments):
    """In the third update one rank's expert alone has a gradient that is not finite."""
    from fairseq.trainer import Trainer

    reduce = Trainer._sync_stats

    def poison(self):
        third = self.get_num_updates() == 2 and self.data_parallel_rank == 1
        if third and not hasattr(self, "bad"):
            self.bad = True
            parameters = self.get_model().named_parameters()
            next(p for n, p in parameters if n.endswith("experts.w1")).grad.fill_(float("inf"))
        return reduce(self)

    Trainer._sync_stats = poison
    torch.Tensor.cuda = lambda self, *_, **__: self  # which fairseq calls after an overflow
    fairseq_train(arguments)


def test_an_overflow_of_one_expert_skips_the_update_everywhere(ranks, small_corpus, tmp_path):
    more = ("--expert-parallel", "--fp16", "--fp16-no-flatten-grads")
    arguments = list(map(str, flags(small_corpus, tmp_path, *more)))
    run = ranks.train(tmp_path, 2, arguments, function=overflow_on_one_rank)
    assert "gradient overflow detected" in run.output(0)
    checkpoint(tmp_path).check_agreement()
    assert all(value.isfinite().all() for value in whole(tmp_path).values())


def test_only_the_embeddings_train(ranks, small_corpus, tmp_path):
    """No rank has an expert with a gradient."""
    frozen = ["--freeze", "encoder,decoder", "--clip-norm", 0.5, "--max-update", 1]
    ranks.train(tmp_path, 2, *flags(small_corpus, tmp_path, "--expert-parallel", *frozen))
    assert averages(tmp_path)["clip"] == 100


@pytest.mark.parametrize(
    "words", ["--ddp-backend pytorch_ddp", "--encoder-layerdrop 0.1", "--eval-bleu"]
)
def test_what_does_not_go_with_sharded_experts_is_refused(ranks, small_corpus, tmp_path, words):
    arguments = flags(small_corpus, tmp_path / "new", "--expert-parallel", *words.split())
    run = ranks.start(tmp_path, 2, *arguments)
    run.refused(words.split()[0])
    assert run.output(1).strip().splitlines()[-1].startswith("error: ")
    assert not list((tmp_path / "new").glob("*.pt"))


@pytest.mark.parametrize("flag", ["--fp16", "--amp", "--use-bmuf"])
def test_options_of_training_that_do_not_go_with_sharded_experts(flag):
    cfg = copy.deepcopy(FairseqConfig())
    cfg.distributed_training.ddp_backend = "legacy_ddp"
    part = cfg.optimization if flag == "--use-bmuf" else cfg.common
    setattr(part, flag.strip("-").replace("-", "_"), True)
    assert flag in sentence_of(check_options, cfg)
