"""Lets torch load fairseq checkpoints with ``weights_only=True``.

For fairseq 0.12.2 on torch 2.6 and later. There ``torch.load`` builds tensors, plain containers and
only those other types that have been named as safe, and fairseq calls it without choosing. Its
checkpoints also hold the command line (``argparse.Namespace``) and, in their meters, numpy arrays
and scalars (``--eval-bleu`` logs counts as arrays), for which builders of our own stand. Building these
runs no code from the file; every other type stays refused.
"""

import argparse
import functools
from types import ModuleType


def allow_checkpoint_types(serialization: ModuleType) -> None:
    from .plain_arrays import Array, Kind, reconstruct, scalar

    ours = {"numpy.ndarray": Array, "numpy.dtype": Kind}
    for core in ("_core", "core"):  # numpy 2 and, in older files, numpy 1
        ours[f"numpy.{core}.multiarray._reconstruct"] = reconstruct
        ours[f"numpy.{core}.multiarray.scalar"] = scalar
    serialization.add_safe_globals(
        [argparse.Namespace, *((stand_in, name) for name, stand_in in ours.items())]
    )
    _prefer(ours)


def _prefer(ours: dict[str, object]) -> None:
    """Whoever else names numpy's own types as safe here: which of both torch takes would be chance."""
    from torch import _weights_only_unpickler as unpickler

    allowed = unpickler._get_user_allowed_globals

    @functools.wraps(allowed)
    def with_ours() -> dict[str, object]:
        return {**allowed(), **ours}

    unpickler._get_user_allowed_globals = with_ours
