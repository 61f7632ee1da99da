"""torchrun with a one-line error for a rank that was killed; recipes start it in place of torchrun."""

import logging
import os
import signal

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from smoe_fairseq.training import screen


def run() -> None:
    """Exits with status 1 when a rank failed, or 128 + the number of the signal that ended torchrun."""
    if screen.VARIABLE in os.environ:
        logging.disable(logging.ERROR)
    try:
        main()
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        # torchrun ends the other ranks by SIGTERM. A rank that failed by itself has printed the reason.
        for rank, failure in sorted(failed.failures.items()):
            code = failure.exitcode  # above 128 if a shell started the program
            number = -code if code < 0 else code - 128
            if number in {*signal.Signals} - {signal.SIGTERM}:
                name = signal.Signals(number).name
                why = ", as the system does when memory runs out" * (name == "SIGKILL")
                killed = f"rank {rank} (process {failure.pid}) was killed by {name}{why}"
                raise SystemExit(f"error: {killed}") from None
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
