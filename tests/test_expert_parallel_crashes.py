"""Whenever a run is killed, it resumes from its newest complete set, and ends as if nothing had been."""

import random
import re
import shutil
import time

import pytest
from programs import wait_until
from ranks import Ranks
from test_expert_parallel import checkpoint, flags, furthest, whole

from smoe_fairseq.checkpoints.reading import Record, open_checkpoint
from smoe_fairseq.checkpoints.sets import Shards
from smoe_fairseq.compat.checkpoint_names import pending, rank_file
from smoe_fairseq.errors import UsageError

KILLS = 6
UPDATES = 6
ZERO = ("--zero-sharding", "os")  # changes no bit of what is trained and saved


def saving_flags(data, folder, *more):
    """Saves after every update; dropout and sampled experts, which have to be drawn again the same."""
    return [
        *flags(data, folder, "--expert-parallel", "--max-update", UPDATES, "--dropout", 0.1),
        *("--moe-second-expert-policy", "sampling", "--save-interval-updates", 1),
        *("--keep-interval-updates", 2, *more),
    ]


def wait_for_training(run):
    wait_until(lambda: "Start iterating" in run.output(0) or 1 in run.statuses())
    assert 1 not in run.statuses(), run.output()[-3000:]


def saves(folder, name):
    """What the files of a set hold, those that wait for their name among them: a set of saves per rank."""
    found = []
    for rank in (0, 1):
        file, own = rank_file(folder / name, rank), set()
        for path in (file, pending(file)):
            try:
                record = Record.of(open_checkpoint(path))
                own.add((record.num_updates, record.save))
            except UsageError:
                pass  # not there, or not complete
        found.append(own)
    return found


def newest_complete(folder, name="checkpoint_last.pt"):
    """Updates of the newest set of this name that all ranks have saved."""
    one, other = saves(folder, name)
    return max((updates for updates, _ in one & other), default=0)


def resume(ranks: Ranks, data, folder, uninterrupted, *more):
    name, first = "checkpoint_last.pt", folder / "checkpoint_1_1.pt"
    if rank_file(first, 0).exists() and not list(folder.glob("checkpoint_last*")):
        # Killed just before the first one: do as the refusal of a new training advises.
        name, more = first.name, (*more, "--restore-file", first)
    expected = newest_complete(folder, name)
    run = ranks.train(folder, 2, *saving_flags(data, folder, *more))
    loaded = re.search(r"Loaded checkpoint .* @ (\d+) updates", run.output(0))
    assert (int(loaded[1]) if loaded else 0) == expected
    assert checkpoint(folder).record.num_updates == UPDATES
    assert furthest(whole(folder), whole(uninterrupted)) == 0
    assert furthest(whole(folder, "optimizer"), whole(uninterrupted, "optimizer")) == 0
    assert not list(folder.glob("*.pending*")) and not list(folder.glob("*.tmp"))
    return expected


@pytest.mark.soak
def test_killed_at_random_moments(ranks, small_corpus, tmp_path):
    """Between the renamings of two ranks: test_expert_parallel_recovery.py."""
    reference = tmp_path / "uninterrupted"
    run = ranks.start(reference, 2, *saving_flags(small_corpus, reference))
    wait_for_training(run)
    start = time.monotonic()
    run.finish()
    seconds, chance = time.monotonic() - start, random.Random(7)
    resumed_from = set()
    for number in range(KILLS):
        folder = tmp_path / str(number)
        more = ZERO if number % 2 else ()
        run = ranks.start(folder, 2, *saving_flags(small_corpus, folder, *more))
        wait_for_training(run)
        time.sleep(chance.uniform(0, seconds))
        run.kill()
        run.wait()
        resumed_from.add(resume(ranks, small_corpus, folder, reference, *more))
        shutil.rmtree(folder)
    assert len(resumed_from) > 2  # the moments were spread over the run


def test_the_files_of_a_diverged_update_are_one_set(ranks, small_corpus, tmp_path):
    arguments = flags(small_corpus, tmp_path, "--expert-parallel", "--lr", 1e30)
    run = ranks.start(tmp_path, 2, *arguments)
    assert run.wait() == [1, 1], run.output()
    shards = Shards.open(tmp_path / "crash.pt")
    assert len(shards.files) == 2 and shards.record.num_updates > 0
