"""int8 on a CPU: products against plain loops, models against themselves in float32, and what is refused."""

import pytest
import torch
from commands import smoe
from sampling import some
from test_beam_search import SYSTEMS, batch, sharp
from test_model import make_task

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models import SMoETransformerModel
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.translate import int8, packed
from smoe_fairseq.translate.int8 import (
    FbgemmLinear,
    Int8Linear,
    check_int8,
    has_fbgemm,
    levels,
    quantize,
)
from smoe_fairseq.translate.search import BeamSearch, SearchOptions
from smoe_fairseq.translate.text import BatchTranslator, Options, device_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


@pytest.fixture(params=[Int8Linear, FbgemmLinear])
def linear(request):
    if request.param is FbgemmLinear and not has_fbgemm():
        pytest.skip("this torch lacks fbgemm's product for this CPU")
    return request.param


def rounded(x_NI, most: int):
    """Each row as whole numbers up to ``most``, and what they are multiplied with."""
    scale_N1 = x_NI.abs().amax(1, keepdim=True) / most
    return torch.where(scale_N1 > 0, x_NI / scale_N1, 0).round(), scale_N1


@pytest.mark.parametrize("most", [127, 63])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 40])
def test_a_linear_map_is_that_of_the_rounded_numbers(linear, monkeypatch, rows, most):
    if most > levels():
        pytest.skip("this CPU adds products in 16 bits, which saturate")
    monkeypatch.setattr(int8, "levels", lambda: most)
    x_NI, weight_OI, bias_O = torch.randn(rows, 50), torch.randn(33, 50), torch.randn(33)
    weight_OI[5] = 0
    x_NI[3:4] = 0
    (q_NI, scale_N1), (w_OI, scale_O1) = rounded(x_NI, most), rounded(weight_OI, 127)
    expected = scale_N1 * scale_O1.t() * (q_NI @ w_OI.t()) + bias_O
    found = linear(weight_OI, bias_O)(x_NI.unsqueeze(0)).squeeze(0)
    # A number half way between two may become either.
    assert torch.allclose(found, expected, atol=0.03) and (found - expected).abs().sum() < 0.1
    without = linear(weight_OI, None)(x_NI)
    assert torch.allclose(without, found - bias_O, atol=1e-5)
    if rows:
        rows = [linear(weight_OI, None)(x) for x in x_NI.split(1)]
        assert torch.equal(without, torch.cat(rows))


def test_levels_leave_room_for_the_largest_sums(linear):
    most = levels()
    weight_OI = torch.full((16, 512), 2.0)
    y_NO = linear(weight_OI, None)(torch.full((3, 512), -5.0))
    assert most in (63, 127) and torch.allclose(y_NO, torch.tensor(-5120.0))


@pytest.mark.parametrize("strata", ["8", "2-2-2-2"])
def test_experts_are_linear_maps_one_after_the_other(strata, linear, everything, monkeypatch):
    block = StratifiedMoE(24, 40, strata, top_k=2).eval()
    expected = [
        [linear(*each) for each in zip(*pair, strict=True)]
        for pair in ((block.experts.w1, block.experts.b1), (block.experts.w2, block.experts.b2))
    ]
    monkeypatch.setattr(int8, "fastest_int8", linear)
    model = torch.nn.Module()
    model.moe, model.other = block, torch.nn.Linear(3, 3)
    with torch.inference_mode():
        quantize(model)
        run, weights = block.execution(block.experts), block.experts.weights()
        x_ND, sizes = torch.randn(22, 24), [0, 5, 0, 1, 10, 6, 0, 0]
        rows = x_ND.split(sizes)
        found = dict(run.by_expert(x_ND, sizes, weights))
        assert found.keys() == {1, 3, 4, 5}
        for e, found_ND in found.items():
            y_ND = expected[1][e](expected[0][e](rows[e]).relu())
            assert torch.allclose(found_ND, y_ND, atol=1e-6)
        assert block(torch.randn(2, 3, 24), torch.ones(2, 3, dtype=torch.bool))[0].isfinite().all()
    assert not block.experts.w1.numel()  # memory is given back


@pytest.mark.parametrize(
    "system",
    some(SYSTEMS, "smoe", "dense", "cmr", "two matrices", "shared", first=1),
)
def test_every_system_translates_nearly_as_before(system, everything, monkeypatch):
    monkeypatch.setattr(int8, "levels", lambda: 63)  # of all processors: the same numbers on each
    model, task = sharp(*SYSTEMS[system].split()), make_task(96)
    search, sample = BeamSearch(task.target_dictionary, SearchOptions(max_len_b=20)), batch(task)
    before = search.generate([model], sample)
    quantize(model)
    after = search.generate([model], sample)
    pairs = [(a[0], b[0]) for a, b in zip(before, after, strict=True)]
    # In a random model, one expert chosen otherwise can change all tokens after it: most sentences count.
    assert any(a["tokens"].tolist() == b["tokens"].tolist() for a, b in pairs)
    scores = [(float(a["score"]), float(b["score"])) for a, b in pairs]
    off = sorted(abs(a - b) / max(1, -a) for a, b in scores)
    assert off[len(off) // 2] < 0.1, scores


def test_small_matrices_stay_as_they_are():
    model, task = sharp("--smoe-strata", "4-4"), make_task(96)
    search, sample = BeamSearch(task.target_dictionary, SearchOptions(max_len_b=20)), batch(task)
    before = search.generate([model], sample)
    quantize(model)
    assert not any(isinstance(each, Int8Linear) for each in model.modules())
    for a, b in zip(before, search.generate([model], sample), strict=True):
        assert [h["tokens"].tolist() for h in a] == [h["tokens"].tolist() for h in b]


TEXTS = [f"{' '.join(str(number))} is a number" for number in range(100, 112)]


@pytest.fixture
def everything(monkeypatch):
    """Matrices of any size become int8."""
    monkeypatch.setattr(packed, "MIN_WEIGHTS", 0)


def test_a_text_is_translated_alike_in_any_company(tiny_run, everything, monkeypatch):
    """One by one, all together, and with batches in several threads; the capacity is asked for as ever."""
    options = Options(beam=2, max_len_b=10, requested=True)

    def translations(max_tokens: int, threads: int) -> list:
        monkeypatch.setattr(BatchTranslator, "threads", threads)
        translator = SMoETransformerModel.from_pretrained(tiny_run)
        model = BatchTranslator(translator, max_tokens, int8=True)
        assert any(isinstance(each, Int8Linear) for each in translator.models[0].modules())
        blocks = moe_blocks(translator.models[0]).values()
        assert blocks and all(callable(block.execution) for block in blocks)
        return model.translate_batch(TEXTS, "en", "fr", options)

    expected = translations(10_000, 1)
    for max_tokens, threads in ((1, 1), (200, 3)):
        for a, b in zip(expected, translations(max_tokens, threads), strict=True):
            assert (a.requested, a.hypotheses[0].text) == (b.requested, b.hypotheses[0].text)
            assert b.requested and b.hypotheses[0].requested


def test_other_devices_are_refused():
    for command in ("translate", "serve"):
        said = smoe(command, "none", "--device", "meta", "--int8", check=False).stdout
        assert said.splitlines()[-1] == (
            "error: --int8 with --device meta: int8 is for a CPU; expected --device cpu"
        )


def test_another_text_of_a_batch_changes_nothing(linear):
    """However large its numbers are."""
    x_NI = torch.randn(5, 64)
    layer = linear(torch.randn(32, 64), None)
    expected = layer(x_NI)[:4]
    x_NI[4] *= 1e30
    assert torch.equal(layer(x_NI)[:4], expected)


@pytest.fixture
def unknown():
    """What the CPU can do is not known yet, and forgotten again."""
    levels.cache_clear()
    yield
    torch.set_default_dtype(torch.float32)
    levels.cache_clear()


def test_a_cpu_without_int8_products_is_named(unknown, monkeypatch):
    monkeypatch.setattr(int8, "_packed", lambda weight: torch.ops.onednn.no_such_operator)
    for call in (lambda: device_of("cpu", int8=True), lambda: check_int8(torch.device("cpu"))):
        with pytest.raises(UsageError, match="--int8: "):
            call()


def test_the_default_type_of_tensors_does_not_matter(unknown):
    before, has = levels(), has_fbgemm()
    torch.set_default_dtype(torch.float64)
    for each in (levels, has_fbgemm, int8._range):
        each.cache_clear()
    assert (levels(), has_fbgemm()) == (before, has)


def test_sums_that_saturate_are_noticed(unknown, monkeypatch):
    real = int8._product
    monkeypatch.setattr(int8, "_product", lambda *args: real(*args).clamp(max=2**15))
    assert levels() == 63


def test_fairseqs_own_models_are_refused(tiny_run):
    translator = SMoETransformerModel.from_pretrained(tiny_run)
    translator.models = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="expected a smoe_transformer"):
        BatchTranslator(translator, int8=True)
