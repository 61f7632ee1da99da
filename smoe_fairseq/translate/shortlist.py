"""Choosing among the target tokens that a file of ``smoe shortlist`` lists, see `make_shortlist`.

Shapes: S source vocabulary, C candidates of each source token.
"""

import hashlib
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain
from smoe_fairseq.translate.directions import direction_of

SHORTLIST_HELP = (
    "choose among the target tokens that this file of smoe shortlist lists: faster, nearly the same "
    "translations"
)


class Shortlist:
    """The content of a file of ``smoe shortlist``.

    Raises:
        UsageError: it cannot be read, belongs to another dictionary, or has no direction of the task.
    """

    def __init__(self, file: Path | str, task):
        self.tables: dict[str, Tensor] = {}
        self.always: dict[str, Tensor] = {}
        flag = f"--shortlist {file}"
        dictionaries = _dictionaries(task)
        check_plain(file)
        try:
            with np.load(file, allow_pickle=False) as content:
                self._check(content, dictionaries, flag)
                directions = set(map(str, content["directions"]))
                for source, target in permutations(dictionaries, 2):
                    if (direction := f"{source}-{target}") in directions:
                        size = int(content[f"{target} size"])
                        arrays = content[direction], content[f"{direction} frequent"]
                        if not all(((0 <= ids) & (ids < size)).all() for ids in arrays):
                            raise ValueError("invalid token ids")
                        self.tables[direction], frequent = map(torch.from_numpy, arrays)
                        # The task appends tokens of languages to the dictionary.
                        special = [*range(4), *range(size, len(dictionaries[target]))]
                        self.always[direction] = torch.cat([frequent, torch.tensor(special)]).long()
        except OSError as error:
            raise UsageError(f"{flag}: {error.strerror or error}") from None
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise UsageError(f"{flag}: expected a file of smoe shortlist") from None
        if not self.tables:
            raise UsageError(f"{flag}: it has no direction of this model")

    @staticmethod
    def _check(content, dictionaries: dict[str, Dictionary], flag: str) -> None:
        for language, dictionary in dictionaries.items():
            if f"{language} size" not in content:
                continue
            size = int(content[f"{language} size"])
            if len(dictionary) < size or content[f"{language} digest"] != digest(dictionary, size):
                raise UsageError(
                    f"{flag}: it was made with another dictionary of {language}; make one with smoe shortlist"
                )

    def of(self, source: str, target: str) -> Callable[[Tensor], Tensor] | None:
        """The shortlist of a direction for `BeamSearch`; None if the file lacks the direction."""
        direction = f"{source}-{target}"
        if direction not in self.tables:
            return None
        return partial(self._candidates, self.tables[direction], self.always[direction])

    @staticmethod
    def _candidates(table_SC: Tensor, always: Tensor, source_BS: Tensor) -> Tensor:
        ids = source_BS.unique().cpu()
        listed = table_SC[ids[ids < len(table_SC)]].flatten()
        return torch.cat([listed.long(), always]).unique().to(source_BS.device)


def _dictionaries(task) -> dict[str, Dictionary]:
    if hasattr(task, "dicts"):
        return dict(task.dicts)
    source, target = direction_of(task)
    return {source: task.source_dictionary, target: task.target_dictionary}


def digest(dictionary: Dictionary, size: int) -> str:
    """A checksum of the first ``size`` entries of a dictionary."""
    return hashlib.sha256("\n".join(dictionary.symbols[:size]).encode()).hexdigest()
