"""One sentence for a checkpoint whose model fairseq does not have, as without ``--user-dir``.

For fairseq 0.12.2 on any Python. It ends in ``KeyError: '_name'`` while it puts its own message together, or,
where training is to go on from the checkpoint with a model of its own, tells of architectures that differ.
"""

import argparse
import functools
import sys
from types import ModuleType

from smoe_fairseq.system.errors import UsageError

from .saved_names import saved_name

_OURS = "smoe_transformer"
_DIFFERS = "Cannot load model parameters from checkpoint"


def name_unknown_model(models: ModuleType) -> None:
    """Of commands that build the checkpoint's model."""
    original = models.build_model

    @functools.wraps(original)
    def build_model(cfg, *others, **options):
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        if sentence := _problem(models, name):
            raise UsageError(sentence)
        return original(cfg, *others, **options)

    models.build_model = build_model


def name_unknown_model_to_train(options: ModuleType) -> None:
    """Of ``fairseq-train --arch``, whose own answer is a list of some two hundred."""
    original = options.get_training_parser

    @functools.wraps(original)
    def get_training_parser(*arguments, **more):
        parser = original(*arguments, **more)  # which imports --user-dir
        from fairseq import models

        words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        words.add_argument("--arch", "-a", default="")
        name = words.parse_known_args(sys.argv[1:])[0].arch
        if name.startswith("smoe_") and (sentence := _problem(models, name)):
            raise UsageError(f"--arch {name}: {sentence}")
        return parser

    options.get_training_parser = get_training_parser


def name_unknown_model_to_resume(trainer: ModuleType) -> None:
    """Of ``fairseq-train --restore-file`` and ``--finetune-from-model``."""
    original = trainer.Trainer.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self, filename, *others, **options):
        try:
            return original(self, filename, *others, **options)
        except Exception as error:
            if not str(error).startswith(_DIFFERS):
                raise
            from fairseq import models

            if (sentence := _problem(models, saved_name(filename, "model", "arch"))) is None:
                raise
            raise UsageError(f"{filename}: {sentence}") from None

    trainer.Trainer.load_checkpoint = load_checkpoint


def _problem(models: ModuleType, name: str | None) -> str | None:
    if not name or name in models.ARCH_MODEL_REGISTRY or name in models.MODEL_DATACLASS_REGISTRY:
        return None
    where = "$(smoe path)" if str(name).startswith(_OURS) else "the plugin that it is from"
    return (
        f"--user-dir is missing or another: the model is a {name}, which fairseq itself does not have; "
        f"expected --user-dir {where}"
    )
