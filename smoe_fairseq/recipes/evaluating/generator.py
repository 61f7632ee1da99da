"""``fairseq-generate`` for one direction after another, with a model that is loaded once.

    python -m smoe_fairseq.recipes generator

Each line of standard input is a JSON list of the program's arguments. What it does with them is done by
fairseq's own function, so its files are the same to the byte; a line on standard output says that they are
complete. An empty line ends it; so does whatever would end the program, and the death of the process that
gives the lines.
"""

import functools
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TextIO

DONE = "done"


def serve() -> None:
    """Until there are no more lines."""
    # The pipes are for jobs and answers alone: all that is printed goes to the log, and the processes that
    # are forked to load data close standard input, which they could not do while a thread waits at it.
    lines, nowhere = os.fdopen(os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        jobs: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(lines, jobs), daemon=True).start()
        from fairseq import checkpoint_utils
        from fairseq_cli import generate

        checkpoint_utils.load_model_ensemble = _once(checkpoint_utils.load_model_ensemble)
        while (arguments := jobs.get()) is not None:
            sys.argv = ["fairseq-generate", *arguments]
            generate.cli_main()
            print(DONE, file=answers, flush=True)


def _receive(lines: TextIO, jobs: queue.SimpleQueue) -> None:
    for line in lines:
        if not line.strip():
            jobs.put(None)
            return
        jobs.put(json.loads(line))
    os._exit(1)  # Nobody is there to take what a long translation would end in.


def _once(load: Callable) -> Callable:
    """fairseq's ``load_model_ensemble``, which for the same files gives the same models again.

    What generation does to a model, half precision, the GPU, ``prepare_for_inference_``, it does once: a
    second time changes nothing. Of the task, which is new for every direction, loading sets the state.
    """
    loaded = {}

    @functools.wraps(load)
    def load_model_ensemble(filenames, arg_overrides=None, task=None, *more, **options):
        key = repr((filenames, arg_overrides, more, sorted(options.items())))
        if key not in loaded:
            found = load(filenames, arg_overrides, task, *more, **options)
            loaded[key] = (found, task and task.state_dict())
        found, state = loaded[key]
        if state:
            task.load_state_dict(state)
        return found

    return load_model_ensemble
