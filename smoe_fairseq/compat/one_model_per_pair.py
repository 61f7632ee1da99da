"""One sentence where ``--task multilingual_translation`` is given a model that is not one per language pair.

For fairseq 0.12.2 on any Python. The task reads its own options among the model's, where they are not for a
model whose options are a dataclass (most), and ends in a stack trace about a key of its config.
"""

import functools
from types import ModuleType

from smoe_fairseq.system.errors import UsageError


def name_other_models(multilingual_translation: ModuleType) -> None:
    task = multilingual_translation.MultilingualTranslationTask
    original = task.build_model

    @functools.wraps(original)
    def build_model(self, args, from_checkpoint=False):
        if not hasattr(args, "lang_pairs"):
            raise UsageError(
                f"--arch {getattr(args, '_name', None)} with --task multilingual_translation: expected a "
                "model per language pair, smoe_multilingual_transformer or multilingual_transformer, or "
                "--task translation_multi_simple_epoch"
            )
        return original(self, args, from_checkpoint)

    task.build_model = build_model
