"""torchrun, which says in one sentence that a rank was killed; recipes start it in torchrun's place."""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

USUAL = {signal.SIGKILL: ", as the system does when memory runs out"}


def run() -> None:
    """Exits with status 1 when a rank failed, or 128 + the number of the signal that ended torchrun."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main()
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        # torchrun itself ends the other ranks by SIGTERM. A rank that failed otherwise said why.
        for rank, failure in sorted(failed.failures.items()):
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                by = signal.Signals(-failure.exitcode)
                said = f"rank {rank} (process {failure.pid}) was killed by {by.name}"
                raise SystemExit(f"error: {said}{USUAL.get(by, '')}") from None
        raise SystemExit(1) from None


if __name__ == "__main__":
    sys.exit(run())
