"""Texts that wait for the model: those of one direction that come together are translated as one batch.

Threads alone, no asyncio: whoever waits holds a `concurrent.futures.Future`, and cancels it when nobody wants
the answer any more.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field


class QueueFull(Exception):
    """There is no room for so many texts now."""


class QueueClosed(Exception):
    """The server is stopping."""


@dataclass
class _Waiting:
    text: str
    kind: Hashable
    future: Future = field(default_factory=Future)


class RequestQueue:
    """A queue before one worker thread, the only one that calls the model.

    Args:
        translate: takes (texts, kind) and answers with a result for each text, in their order.
        max_batch: texts that are translated together, at most.
        max_waiting: texts in the queue, those that are being translated not counted.
        linger: seconds that the first text of a batch waits for others.
    """

    def __init__(
        self,
        translate: Callable[[list[str], Hashable], Sequence],
        max_batch: int,
        max_waiting: int,
        linger: float,
    ):
        self.translate = translate
        self.max_batch, self.max_waiting, self.linger = max_batch, max_waiting, linger
        self.batches = self.translated = 0  # so far
        self.translating = 0  # texts that are with the model
        self._waiting: deque[_Waiting] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name="model", daemon=True)
        self._worker.start()

    def submit(self, texts: Sequence[str], kind: Hashable) -> list[Future]:
        """A future of each text's result; texts of an equal ``kind`` may share a batch.

        Raises:
            QueueFull: not all of them have room; none was taken.
            QueueClosed: after `close`.
        """
        entries = [_Waiting(text, kind) for text in texts]
        with self._changed:
            if self._closed:
                raise QueueClosed
            if len(self._waiting) + len(entries) > self.max_waiting:
                self._drop_cancelled()
            if len(self._waiting) + len(entries) > self.max_waiting:
                raise QueueFull
            self._waiting.extend(entries)
            self._changed.notify()
        return [entry.future for entry in entries]

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return len(self._waiting)

    def close(self, timeout: float | None = None) -> None:
        """Refuses what waits with `QueueClosed`, and waits for the batch that is being translated."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for entry in left:
            if entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(QueueClosed())
        self._worker.join(timeout)

    def _work(self) -> None:
        while batch := self._next_batch():
            # From here on a future cannot be cancelled any more; those that were are dropped.
            batch = [entry for entry in batch if entry.future.set_running_or_notify_cancel()]
            self.translating = len(batch)
            if batch:
                self._translate(batch)
            self.translating = 0

    def _next_batch(self) -> list[_Waiting]:
        """The first text that waits and others of its kind, in their order; none: the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return []
            kind = self._waiting[0].kind
            end = time.monotonic() + self.linger
            while not self._closed and self._count(kind) < self.max_batch:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    break
            batch, others = [], deque()
            for entry in self._waiting:
                fits = entry.kind == kind and len(batch) < self.max_batch
                (batch if fits else others).append(entry)
            self._waiting = others
            return batch

    def _count(self, kind: Hashable) -> int:
        return sum(entry.kind == kind for entry in self._waiting)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry.future.cancelled())

    def _translate(self, batch: list[_Waiting]) -> None:
        try:
            results = self.translate([entry.text for entry in batch], batch[0].kind)
            answers = list(zip(batch, results, strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for entry in batch:  # the others are not to pay for it
                self._translate([entry])
            return
        self.batches += 1
        self.translated += len(batch)
        for entry, answer in answers:
            entry.future.set_result(answer)
