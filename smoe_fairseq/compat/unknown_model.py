"""One sentence for a checkpoint whose model fairseq does not have, as without ``--user-dir``.

For fairseq 0.12.2 on any Python, which ends in ``KeyError: '_name'`` while it puts its own message together.
"""

import functools
from types import ModuleType

from smoe_fairseq.system.errors import UsageError

_OURS = "smoe_transformer"


def name_unknown_model(models: ModuleType) -> None:
    original = models.build_model

    @functools.wraps(original)
    def build_model(cfg, *others, **options):
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        if name and not (
            name in models.ARCH_MODEL_REGISTRY or name in models.MODEL_DATACLASS_REGISTRY
        ):
            where = "$(smoe path)" if str(name).startswith(_OURS) else "the plugin that it is from"
            raise UsageError(
                f"--user-dir is missing or another: the model is a {name}, which fairseq itself does not "
                f"have; expected --user-dir {where}"
            )
        return original(cfg, *others, **options)

    models.build_model = build_model
