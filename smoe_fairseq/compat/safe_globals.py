"""Lets torch load fairseq checkpoints with ``weights_only=True``.

For fairseq 0.12.2 on torch 2.6 and later. There ``torch.load`` builds tensors, plain containers and
only those other types that have been named as safe, and fairseq calls it without choosing. Its
checkpoints also hold the command line (``argparse.Namespace``) and, in their meters, numpy arrays
and scalars (``--eval-bleu`` logs counts as arrays). Building these runs no code from the file;
every other type stays refused.
"""

import argparse
from types import ModuleType


def allow_checkpoint_types(serialization: ModuleType) -> None:
    import numpy
    from numpy._core import multiarray

    serialization.add_safe_globals(
        [
            argparse.Namespace,
            numpy.ndarray,
            numpy.dtype,
            *(type(numpy.dtype(code)) for code in "?bhilqBHILQefd"),
            multiarray._reconstruct,
            multiarray.scalar,
            # The same two in files written with numpy 1.
            (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
            (multiarray.scalar, "numpy.core.multiarray.scalar"),
        ]
    )
