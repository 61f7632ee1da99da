"""The folder that a run saves in is its own, whatever the number of its processes."""

from pathlib import Path

import torch.distributed as dist

from smoe_fairseq.distributed.agree import from_first, several
from smoe_fairseq.system import lock
from smoe_fairseq.system.errors import UsageError, UsageErrorOfAll


def hold_folder(checkpoint) -> None:
    """Raise UsageErrorOfAll, on all processes, where another run saves in ``--save-dir``.

    The first process holds it, for all: on machines with disks of their own it is the one that saves.
    A run with ``--no-save`` needs none.

    Args:
        checkpoint: fairseq's ``CheckpointConfig``.
    """
    refusal = None
    folder = Path(checkpoint.save_dir)
    # fairseq has made the folder; where it has not, nothing is going to be saved.
    if not (several() and dist.get_rank()) and not checkpoint.no_save and folder.is_dir():
        try:
            lock.take(folder)
        except UsageError as error:
            refusal = str(error)
    if several():
        refusal = from_first(refusal)
    if refusal:
        raise UsageErrorOfAll(refusal)
