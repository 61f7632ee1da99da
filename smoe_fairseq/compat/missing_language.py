"""One sentence for a language that the data or ``--langs`` does not have, not a stack trace.

For fairseq 0.12.2 on any Python. The sentence names the language and those that there are, or the
dictionary that is not one.
"""

import functools
import re
from pathlib import Path
from types import ModuleType

from smoe_fairseq.system.errors import UsageError


def name_missing_dictionary(dictionary: ModuleType) -> None:
    original = dictionary.Dictionary.load.__func__

    @functools.wraps(original)
    def load(cls, f, *others, **options):
        try:
            return original(cls, f, *others, **options)
        except FileNotFoundError:
            path = Path(f)
            language = re.fullmatch(r"dict\.(.+)\.txt", path.name)
            if language is None:
                raise
            found = sorted(p.name[5:-4] for p in path.parent.glob("dict.*.txt"))
            raise UsageError(
                f"language {language[1]!r} is not in the data: {path} is missing; languages "
                f"there: {', '.join(found) or 'none'}"
            ) from None
        except ValueError as error:
            raise UsageError(f"{f}: {' '.join(str(error).split())}") from None

    dictionary.Dictionary.load = classmethod(load)


def name_unlisted_language(data_manager: ModuleType) -> None:
    manager = data_manager.MultilingualDatasetManager
    original = manager.prepare.__func__

    @functools.wraps(original)
    def prepare(cls, *others, **options):
        try:
            return original(cls, *others, **options)
        except ValueError as error:
            raise UsageError(f"--langs, --lang-pairs: {error}") from None

    manager.prepare = classmethod(prepare)
