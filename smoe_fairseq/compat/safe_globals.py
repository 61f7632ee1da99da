"""Lets torch load fairseq checkpoints with ``weights_only=True``.

For fairseq 0.12.2 on torch 2.6 and later. There ``torch.load`` builds tensors, plain containers and
only those other types that have been named as safe, and fairseq calls it without choosing. Its
checkpoints also hold the command line (``argparse.Namespace``) and, in their meters, numpy arrays
and scalars (``--eval-bleu`` logs counts as arrays), for which builders of our own stand. Building these
runs no code from the file; every other type stays refused.
"""

import argparse
from types import ModuleType


def allow_checkpoint_types(serialization: ModuleType) -> None:
    from .plain_arrays import Array, Kind, reconstruct, scalar

    serialization.add_safe_globals(
        [
            argparse.Namespace,
            (Array, "numpy.ndarray"),
            (Kind, "numpy.dtype"),
            # numpy 2 and, in older files, numpy 1.
            *(
                (function, f"numpy.{core}.multiarray.{name}")
                for core in ("_core", "core")
                for name, function in (("_reconstruct", reconstruct), ("scalar", scalar))
            ),
        ]
    )
