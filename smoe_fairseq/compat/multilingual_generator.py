"""A model of ``translation_multi_simple_epoch`` translates by fairseq's interface for Python, too.

For fairseq 0.12.2 on any Python. ``GeneratorHubInterface`` gives every task's ``build_generator`` an argument
that this one's does not have (``prefix_allowed_tokens_fn``), so any translation ends in a TypeError. All that
the argument does is to say which tokens may follow; it is None unless it is asked for.
"""

import functools
from types import ModuleType


def take_prefix_function(task: ModuleType) -> None:
    original = task.TranslationMultiSimpleEpochTask.build_generator

    @functools.wraps(original)
    def build_generator(self, *others, prefix_allowed_tokens_fn=None, **options):
        if prefix_allowed_tokens_fn is not None:
            raise NotImplementedError(
                "prefix_allowed_tokens_fn with the multilingual_translation task is not supported"
            )
        return original(self, *others, **options)

    task.TranslationMultiSimpleEpochTask.build_generator = build_generator
