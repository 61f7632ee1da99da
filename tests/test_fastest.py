"""The choice among linear layers: by a clock that the layers move, remembered, and equal for any batch."""

import json
import threading

import pytest
import torch

from smoe_fairseq.translate import fastest
from smoe_fairseq.translate.packed import PackedLinear, PlainLinear, can_pack


class Clock:
    """Layers that take seconds of it; it counts their calls."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, 0
        monkeypatch.setattr(fastest.time, "thread_time", lambda: self.now)

    def kinds(self, **seconds: float) -> dict:
        def kind(weight, bias, took):
            def layer(x):
                self.now += took(len(x)) if callable(took) else took
                self.calls += 1

            return layer

        return {n: lambda *args, took=took: kind(*args, took) for n, took in seconds.items()}


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.setattr(fastest, "MEMORY", tmp_path / "new/products.json")
    fastest._remembered.cache_clear()
    yield Clock(monkeypatch)
    fastest._remembered.cache_clear()


WEIGHT = torch.ones(512, 256)


@pytest.mark.parametrize("second, chosen", [(0.5, "b"), (0.9, "a"), (2.0, "a")])
def test_the_choice_is_remembered(clock, second, chosen):
    assert fastest.fastest(clock.kinds(a=1.0, b=second), WEIGHT) == chosen
    calls = clock.calls
    fastest._remembered.cache_clear()  # as in another process
    assert fastest.fastest(clock.kinds(a=second, b=1.0), WEIGHT) == chosen
    assert calls and clock.calls == calls
    assert fastest.fastest(clock.kinds(c=1.0), WEIGHT) == "c"  # of a version without the others
    assert fastest.fastest(clock.kinds(a=1.0, b=0.1), WEIGHT[:2]) == "a"  # too small to be measured


def test_numbers_of_rows_count_equally(clock):
    kinds = clock.kinds(a=1.0, b=lambda rows: 0.5 if rows == 5 else 1.5)
    assert fastest.fastest(kinds, WEIGHT) == "b"
    assert fastest.fastest(kinds, torch.ones(512, 512), rows=(5, 40)) == "a"


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', None])
def test_a_file_that_cannot_be_used(clock, content):
    if content is None:
        fastest.MEMORY.parent.write_text("no folder")
    else:
        fastest.MEMORY.parent.mkdir()
        fastest.MEMORY.write_text(content)
    assert fastest.fastest(clock.kinds(a=1.0, b=0.5), WEIGHT) == "b"
    if content is not None:
        found = json.loads(fastest.MEMORY.read_text())
        assert [each for key, each in found.items() if key.endswith(": 512x256")] == ["b"]


def test_models_that_are_loaded_at_once_leave_torchs_threads(clock):
    """The second one begins within the first, and ends after it."""
    begun, ended, before, seen = threading.Event(), threading.Event(), torch.get_num_threads(), []

    def kind(said: threading.Event, awaited: threading.Event):
        return {"a": lambda *_: lambda x: (said.set(), awaited.wait(9)), "b": lambda *_: abs}

    def load(number: int, *events: threading.Event) -> None:
        fastest.fastest(kind(*events), torch.ones(512, 256 * number))
        seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        ready = threading.Event()
        second = threading.Thread(target=lambda: ready.wait(9) and load(2, begun, ended))
        second.start()
        load(1, ready, begun)
        ended.set()
        second.join()
        third = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        third.start()
        third.join()
        assert seen == [2, 2, 2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inputs", [256, 2048])
@pytest.mark.parametrize("kind", [PackedLinear, PlainLinear])
def test_a_row_does_not_depend_on_the_others(kind, inputs):
    if kind is PackedLinear and not can_pack():
        pytest.skip("this torch has no packed products for this CPU")
    torch.manual_seed(1)
    weight, bias, x_NI = torch.randn(512, inputs), torch.randn(512), torch.randn(40, inputs)
    layer = kind(weight, bias)
    expected = layer(x_NI)
    plain = torch.nn.functional.linear(x_NI, weight, bias)
    assert torch.allclose(expected, plain, atol=1e-4 * inputs / 256)  # as sums have more terms
    for number in (1, 2, 3, 5, 8, 15, 17):
        assert torch.equal(layer(x_NI[:number].unsqueeze(1)), expected[:number].unsqueeze(1))
