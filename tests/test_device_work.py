"""What a GPU would do and wait for, counted on a CPU: no value is read on the host, little is done twice."""

from collections import Counter

import pytest
import torch
from test_block_work import STRATA, Operations, make_block, needs_grouped_mm, run_block
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from smoe_fairseq.criterions.metrics import on_host
from smoe_fairseq.modules import StratifiedMoE, products
from smoe_fairseq.modules.experts import cast_once, why_per_expert
from smoe_fairseq.modules.per_expert import PerExpert

T, D = 96, 16
READING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero"}
TRANSFERS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"}
TRANSFERS |= {"nonzero"}
MADE_ON_HOST = {"tensor", "as_tensor", "new_tensor", "from_numpy"}


class HostReads(TorchFunctionMode):
    """Counts calls that read a value on the host, or make a tensor of the host's values."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in TRANSFERS | MADE_ON_HOST:
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))


def made(data, flags: str):
    """(config, task, model, criterion) of a training."""
    from commands import PLUGIN
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    words = f"{data} --user-dir {PLUGIN} --arch smoe_transformer_tiny --smoe-strata 2-2 --cpu "
    words += "--encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --max-tokens 100 "
    words += f"--criterion smoe_label_smoothed_cross_entropy {flags}"
    args = options.parse_args_and_arch(options.get_training_parser(), words.split())
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    return cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)


@pytest.fixture(scope="module")
def training(small_corpus):
    """(criterion, model, batch) of a training with padding."""
    flags = "--smoe-capacity-budget 1.5 --dropout 0.1 --label-smoothing 0.1"
    _, task, model, criterion = made(small_corpus, flags)
    dataset = task.dataset("train")
    for module in model.modules():
        if isinstance(module, StratifiedMoE):
            module.execution = "grouped"
    return criterion, model.train(), dataset.collater([dataset[i] for i in range(6)])


@needs_grouped_mm
def test_grouped_training_reads_nothing(training, monkeypatch):
    # As for a GPU's tensors.
    monkeypatch.setattr("smoe_fairseq.models.transformer.may_have_padding", lambda mask: True)
    criterion, model, sample = training
    criterion(model, sample)  # what is made once, as the mask of the future
    with HostReads() as calls, Operations() as operations:
        loss, _, _ = criterion(model, sample)
        loss.backward()
    assert operations.called["_grouped_mm"] >= 12
    # fairseq's two position embeddings ask three times each about a shape, which is on the host.
    assert calls.calls == {"__bool__": 2}
    assert [n for n in operations.called.elements() if n in READING] == ["_local_scalar_dense"] * 6


@pytest.mark.parametrize("strata", STRATA)
def test_a_product_per_expert_reads_once_per_stratum(strata):
    """The sizes of its experts; on a CPU, which need not wait, also where the tokens are."""
    block = make_block(strata)
    x = torch.randn(T, D, requires_grad=True)
    mask = torch.zeros(T, dtype=torch.bool)
    with HostReads() as calls, Operations() as operations:
        y, _ = block(x, mask)
        y.sum().backward()
    assert calls.calls == {"tolist": len(block.strata), "nonzero": len(block.strata)}
    assert operations.calls(READING) == len(block.strata)


class EvenSizes(PerExpert):
    """Reads no number: the first expert has all copies."""

    @staticmethod
    def sort_by_expert(copies):
        sizes = [copies.expert_TK.numel()] + [0] * (len(copies.kept_E) - 1)
        return torch.zeros_like(copies.expert_TK).flatten(), sizes


def fakes_cuda() -> bool:
    """Whether this torch makes weights of a CUDA device that is not there; 2.6 asks the driver to draw."""
    if torch.version.cuda is None:
        return False
    try:
        with FakeTensorMode(), torch.device("cuda"):
            torch.nn.Parameter(torch.empty(1)).data.uniform_(-1, 1)
        return True
    except RuntimeError:
        return False


@pytest.mark.skipif(not fakes_cuda(), reason="this torch fakes no CUDA device")
@pytest.mark.parametrize("strata", STRATA)
def test_a_product_per_expert_reads_nothing_but_sizes_on_a_gpu(strata):
    """Neither the number of tokens with padding, nor of those at a later stratum."""
    with FakeTensorMode(), torch.device("cuda"):
        block = make_block(strata)
        block.execution = EvenSizes
        y, _ = block(torch.randn(T, D), torch.zeros(T, dtype=torch.bool))  # a number would raise
        assert y.device.type == "cuda"


@pytest.mark.parametrize("strata", STRATA)
def test_first_choices_are_counted_once_per_stratum(strata):
    """For the balance loss, the log and a budget of strata."""
    block = make_block(strata, **({} if strata == "8" else {"capacity_budget": 1.5}))
    forward, _, _ = run_block(block, torch.randn(T, D, requires_grad=True))
    assert forward.called["scatter_add_"] == len(block.strata)


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
@pytest.mark.parametrize("strata", STRATA)
def test_one_sort_per_stratum_and_no_atomics(strata, capacity_factor, execution):
    block = make_block(strata, capacity_factor=capacity_factor, execution=execution)
    forward, backward, _ = run_block(block, torch.randn(T, D, requires_grad=True))
    assert forward.called["sort"] == len(block.strata) and not backward.called["sort"]
    for operations in (forward, backward):
        large = operations.as_large_as(T * D)
        assert not {"index_add_", "index_put_", "_index_put_impl_", "scatter_add_"} & large.keys()
        if execution == "grouped" or strata == "8":
            assert "index_add" not in large


TORCHS = [((major, 0), "bfloat16", 16, "grouped") for major in (9, 10)]
OURS = [((9, 0), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16"), ((7, 5), "float16")]
OURS = [(*case, 16, "ours") for case in OURS]
OURS += [((9, 0), "bfloat16", 12, "ours")]  # rows of 24 bytes
NEITHER = [((9, 0), "float32", 16, "per-expert"), ((7, 0), "float16", 16, "per-expert")]
NEITHER += [(None, "float32", 16, "per-expert")]  # another maker's device


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(
    "capability, dtype, width, expected",
    [pytest.param(*case, marks=needs_grouped_mm) for case in TORCHS] + OURS + NEITHER,
)
def test_execution_by_what_the_device_can_do(
    monkeypatch, capability, dtype, width, expected, has_triton, caplog
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(products, "kernels", lambda: products if has_triton else None)
    monkeypatch.setattr(products, "tile_of", lambda *_: 64)
    if ours := expected == "ours":
        expected = "grouped" if has_triton else "per-expert"
    weight = torch.empty(4, width, width, dtype=getattr(torch, dtype))
    monkeypatch.setattr(
        torch.Tensor, "device", torch.device(f"cuda:{capability[0]}" if capability else "mps")
    )
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert ("per-expert" if why_per_expert(weight) else "grouped") == expected
    assert ours == (type(products.products_of(weight)) is products.TritonProducts) or not ours
    assert sum(dtype in record.message for record in caplog.records) <= 1  # once in a process


def casts(operations, experts) -> int:
    """How often first or second weights of all experts were made anew in another type."""
    size = experts.w1.numel()
    return sum(operations.made.count((name, size)) for name in ("_to_copy", "to"))


HALF = {"device_type": "cpu", "dtype": torch.bfloat16}


def test_weights_are_cast_once_until_an_optimizers_step(execution):
    """fairseq's optimizers write ``p.data``, which does not change a parameter's version."""
    from fairseq.optim.adam import Adam

    block, x = make_block("4-4", execution=execution), torch.randn(T, D)
    optimizer = Adam(block.parameters(), lr=0.1)

    def batch():
        with Operations() as operations, torch.autocast(**HALF):
            y, _ = block(x)
        y.float().square().sum().backward()
        return casts(operations, block.experts), y

    assert batch()[0] == 2
    once = [p.grad.clone() for p in block.experts.parameters()]
    with cast_once():
        assert [batch()[0], batch()[0]] == [2, 0]
        for p, grad in zip(block.experts.parameters(), once, strict=True):
            torch.testing.assert_close(p.grad, 3 * grad)
        version = block.experts.w1._version
        optimizer.step()
        assert block.experts.w1._version == version
        number, y = batch()
        assert number == 2
        with torch.no_grad(), torch.autocast(**HALF):
            assert torch.equal(block(x)[0], y)
    number, again = batch()
    assert number == 2 and torch.equal(again, y)


def test_a_search_casts_weights_once(training):
    from smoe_fairseq.translate.search import BeamSearch, SearchOptions

    criterion, model, sample = training
    experts = [m.experts for m in model.modules() if isinstance(m, StratifiedMoE)]
    search = BeamSearch(criterion.task.target_dictionary, SearchOptions(max_len_b=5, min_len=4))
    with Operations() as operations, torch.autocast(**HALF):
        search.generate([model.eval()], sample)
    model.train()
    assert casts(operations, experts[0]) == 2 * len(experts)


def test_an_update_casts_weights_once(small_corpus, tmp_path, monkeypatch):
    """All of its batches, with an autocast for each of them as fairseq's of ``--amp``."""
    from fairseq.trainer import Trainer

    monkeypatch.setattr(torch.cuda.amp, "autocast", lambda enabled: torch.autocast(**HALF))
    flags = f"--update-freq 3 --lr 0.1 --optimizer adam --save-dir {tmp_path}"
    cfg, task, model, criterion = made(small_corpus, flags)
    trainer = Trainer(cfg, task, model, criterion)
    experts = [m.experts for m in model.modules() if isinstance(m, StratifiedMoE)]
    batches = iter(trainer.get_train_iterator(1).next_epoch_itr(shuffle=False))
    for _ in range(2):
        weights = experts[0].w1.detach().clone()
        with Operations() as operations:
            trainer.train_step([next(batches) for _ in range(3)])
        # Once forward, and the gradients of each batch back.
        assert casts(operations, experts[0]) == 2 * len(experts) * (1 + 3)
        assert not torch.equal(experts[0].w1, weights)


def test_logged_numbers_leave_in_one_transfer():
    logs = [
        {"loss": torch.tensor(1.5), "ntokens": 7, "moe_top2 a": torch.arange(6).view(2, 3)},
        {"loss": torch.tensor(2.5), "many": torch.tensor(2**40 + 1)},
    ]
    with HostReads() as calls:
        found = on_host(logs)
    assert calls.calls["cpu"] == 1 and set(calls.calls) <= {"cpu", "numpy"}
    assert found[0]["loss"] == 1.5 and found[0]["ntokens"] == 7
    assert found[0]["moe_top2 a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found[1] == {"loss": 2.5, "many": 2**40 + 1}


def test_numbers_of_two_devices_are_logged_together():
    """fairseq-train --cpu where there is a GPU: fairseq keeps the gradients' norm on the GPU."""
    here, there = torch.tensor(1.5), torch.tensor(2.5, device="meta")
    with HostReads() as calls, pytest.raises(NotImplementedError):  # meta has no numbers to read
        on_host([{"loss": here}, {"norm": there}])
    assert calls.calls["cpu"] == 2
