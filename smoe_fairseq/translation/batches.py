"""Texts of about the same length together."""

from collections.abc import Iterator, Sequence


def by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of all texts, the longest first, in batches of at most ``max_tokens``, padding included.

    One that is longer is a batch by itself.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
