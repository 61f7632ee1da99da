"""One sentence for a batch that the longest sentence does not fit into, where fairseq ends in a stack trace.

For fairseq 0.12.2 on any Python. Its own words, of an assertion, name neither the flag nor the length.
"""

import functools
from types import ModuleType

from smoe_fairseq.system.errors import UsageError


def name_too_small_batches(data_utils: ModuleType) -> None:
    original = data_utils.batch_by_size

    @functools.wraps(original)
    def batch_by_size(
        indices, num_tokens_fn, num_tokens_vec=None, max_tokens=None, max_sentences=None, **options
    ):
        if max_tokens is not None and max_tokens < 1 and max_sentences is None:  # no batch at all
            raise UsageError(
                f"--max-tokens {max_tokens} (--max-tokens-valid in validation): expected a whole number "
                "of at least 1"
            )
        try:
            return original(
                indices, num_tokens_fn, num_tokens_vec, max_tokens, max_sentences, **options
            )
        except AssertionError as error:
            if "max_tokens" not in str(error):
                raise
            lengths = map(num_tokens_fn, indices) if num_tokens_vec is None else num_tokens_vec
            raise UsageError(
                f"--max-tokens {max_tokens} (--max-tokens-valid in validation): the longest "
                f"sentence has {max(lengths)} tokens; expected at least as many"
            ) from None

    data_utils.batch_by_size = batch_by_size
