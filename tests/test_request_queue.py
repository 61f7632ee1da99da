"""The queue before the model: what becomes a batch, what is refused, what is dropped."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from programs import HANGS

from smoe_fairseq.serve.engine import QueueClosed, QueueFull, RequestQueue


class Model:
    """Notes its batches; waits at the first one until it is let go."""

    def __init__(self):
        self.batches = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def translate(self, texts, kind):
        self.batches.append((kind, texts))
        if self.batches[-1][1] == ["first"]:
            self.begun.set()
            assert self.go_on.wait(HANGS)
        if "bad" in texts:
            raise ValueError("bad")
        return [f"{kind} {text}" for text in texts]


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def queue(model):
    queue = RequestQueue(model.translate, max_batch=3, max_waiting=8, linger=0.0)
    queue.submit(["first"], "x")
    assert model.begun.wait(HANGS)
    yield queue
    model.go_on.set()
    queue.close()


def results(futures):
    return [future.result(HANGS) for future in futures]


def test_batches_are_of_one_kind_in_the_order_of_arrival(queue, model):
    a, b, c = queue.submit(["1", "2"], "a"), queue.submit(["3"], "b"), queue.submit(["4", "5"], "a")
    model.go_on.set()
    assert results(a + b + c) == ["a 1", "a 2", "b 3", "a 4", "a 5"]
    assert model.batches[1:] == [("a", ["1", "2", "4"]), ("b", ["3"]), ("a", ["5"])]
    assert queue.translated == 6 and queue.batches == 4 and queue.translating == 0


def test_a_request_is_taken_whole_or_not(queue, model):
    queue.submit("123456", "a")
    with pytest.raises(QueueFull):
        queue.submit("789", "a")
    assert queue.waiting == 6
    last = queue.submit("78", "a")
    model.go_on.set()
    assert results(last) == ["a 7", "a 8"]


def test_what_nobody_waits_for_is_dropped_and_makes_room(queue, model):
    given_up, kept = queue.submit("1234", "a"), queue.submit("5678", "a")
    for future in given_up:
        assert future.cancel()
    more = queue.submit("9", "a")
    model.go_on.set()
    assert results(kept + more) == ["a 5", "a 6", "a 7", "a 8", "a 9"]
    assert not {"1", "2", "3", "4"} & {text for _, texts in model.batches for text in texts}
    with pytest.raises(CancelledError):
        given_up[0].result(HANGS)


def test_a_text_that_fails_takes_no_other_with_it(queue, model):
    futures = queue.submit(["1", "bad", "3"], "a")
    model.go_on.set()
    assert results(futures[::2]) == ["a 1", "a 3"]
    with pytest.raises(ValueError, match="bad"):
        futures[1].result(HANGS)


def test_the_first_waits_for_others_to_come():
    model = Model()
    queue = RequestQueue(model.translate, max_batch=3, max_waiting=8, linger=30.0)
    futures = [queue.submit([text], "a")[0] for text in "123"]  # full: it waits no longer
    assert results(futures) == ["a 1", "a 2", "a 3"]
    assert model.batches == [("a", ["1", "2", "3"])]
    queue.close(30)


def test_it_goes_on_when_the_texts_it_waits_with_are_cancelled():
    """Only texts of another kind are left then, which are not of its batch."""
    model = Model()
    queue = RequestQueue(model.translate, max_batch=3, max_waiting=8, linger=0.5)
    (first,) = queue.submit(["1"], "a")
    time.sleep(0.1)  # it waits for others of this kind
    assert first.cancel()
    assert results(queue.submit(["2"], "b")) == ["b 2"]
    queue.close(30)


def test_closing_refuses_what_waits_and_what_comes(queue, model):
    waiting = queue.submit(["1"], "a")
    closing = threading.Thread(target=queue.close)
    closing.start()
    with pytest.raises(QueueClosed):
        waiting[0].result(HANGS)
    with pytest.raises(QueueClosed):
        queue.submit(["2"], "a")
    model.go_on.set()
    closing.join(HANGS)
    assert not closing.is_alive() and model.batches == [("x", ["first"])]
