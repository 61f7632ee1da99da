"""Folders, launchers and options as clusters bring them about: half-saved sets, spawned processes."""

import random
import re
import shutil
import time

import pytest
import torch
from commands import contents, load, run
from programs import wait_until
from ranks import Ranks, free_port
from test_expert_parallel import checkpoint, flags, furthest, whole
from test_expert_parallel_checkpoints import call, refusal

from smoe_fairseq.checkpoints.reading import record_of
from smoe_fairseq.checkpoints.sets import Shards
from smoe_fairseq.compat.checkpoint_names import pending, rank_file

LAST = "checkpoint_last.pt"


@pytest.fixture(scope="module")
def saves(ranks, small_corpus, tmp_path_factory):
    """Folders with the sets of 2 ranks after 2 and after 3 updates, of one run."""
    folders = {updates: tmp_path_factory.mktemp(f"updates-{updates}") for updates in (2, 3)}
    arguments = flags(small_corpus, folders[3], "--expert-parallel", "--max-update", 3)
    ranks.train(folders[3], 2, *arguments, "--save-interval-updates", 1)
    for rank in range(2):
        saved = rank_file(folders[3] / "checkpoint_1_2.pt", rank)
        shutil.copy(saved, rank_file(folders[2] / LAST, rank))
    return folders


def half_published(saves, folder):
    """As a kill leaves it: the older set, of which rank 0 has the newer file in place."""
    folder.mkdir()
    newer, older = (rank_file(saves[3] / LAST, 1), rank_file(saves[2] / LAST, 1))
    shutil.copy(rank_file(saves[3] / LAST, 0), folder)
    shutil.copy(older, folder)
    shutil.copy(newer, pending(folder / older.name))
    return contents(folder)


def test_a_larger_number_of_ranks_touches_nothing(ranks, small_corpus, saves, tmp_path):
    """A smaller one is in test_expert_parallel_checkpoints.py."""
    before = half_published(saves, tmp_path / "run")
    arguments = flags(small_corpus, tmp_path / "run", "--expert-parallel", "--max-update", 5)
    ranks.start(tmp_path / "logs", 4, *arguments).refused("is of a set for 2 ranks")
    assert contents(tmp_path / "run") == before


def test_advice_for_a_process_without_sharded_experts_works(ranks, small_corpus, saves, tmp_path):
    shutil.copytree(saves[3], tmp_path / "run")
    run = ranks.start(tmp_path / "logs", 1, *flags(small_corpus, tmp_path / "run"), one=True)
    command = run.refused().partition(" with smoe ")[2]
    call(*command.replace("another/folder", str(tmp_path / "new")).split())
    assert (tmp_path / "new" / LAST).exists()


def test_a_half_published_set_is_read_as_it_was_meant(saves, tmp_path, capsys):
    """Without touching it: machines may be gone, and `smoe reshard` is what helps then."""
    before = half_published(saves, tmp_path / "run")
    assert Shards.open(tmp_path / "run" / LAST).record.num_updates == 3
    for command in (["consolidate"], ["reshard", "--world-size", 2]):
        call(*command, tmp_path / "run" / LAST, "--output", tmp_path / command[0] / LAST)
        assert "update 3" in capsys.readouterr().out
    assert furthest(whole(tmp_path / "reshard"), whole(saves[3])) == 0
    assert contents(tmp_path / "run") == before


def test_a_half_published_set_is_completed_by_the_run_that_resumes(
    ranks, small_corpus, saves, tmp_path
):
    half_published(saves, tmp_path / "run")
    arguments = flags(small_corpus, tmp_path / "run", "--expert-parallel", "--max-update", 3)
    ranks.train(tmp_path / "logs", 2, *arguments)
    names = [rank_file(LAST, rank).name for rank in range(2)]
    assert contents(tmp_path / "run") == {name: (saves[3] / name).read_bytes() for name in names}


def test_finetuning_beside_an_incomplete_set(ranks, small_corpus, saves, tmp_path):
    """fairseq decides on every rank by itself whether this is the first launch; all have to agree."""
    consolidated = tmp_path / "whole.pt"
    call("consolidate", saves[3] / LAST, "--output", consolidated)
    shutil.copytree(saves[2], tmp_path / "run")
    missing = rank_file(tmp_path / "run" / LAST, 1)
    missing.unlink()
    arguments = flags(small_corpus, tmp_path / "run", "--expert-parallel")
    run = ranks.start(tmp_path / "logs", 2, *arguments, "--finetune-from-model", consolidated)
    run.refused(f"{missing} is missing")


@pytest.mark.parametrize("flag", ["--finetune-from-model", "--continue-once"])
def test_a_set_is_no_model_to_start_from(ranks, small_corpus, saves, tmp_path, flag):
    arguments = flags(small_corpus, tmp_path, "--expert-parallel", flag, saves[3] / LAST)
    run = ranks.start(tmp_path / "logs", 2, *arguments)
    assert run.wait() == [1, 1]
    assert "smoe consolidate" in run.output() or "does not exist" in run.output()


@pytest.mark.soak
def test_averaged_weights_are_part_of_a_set(ranks, small_corpus, tmp_path):
    options = ["--store-ema", "--ema-fp32", "--ema-decay", 0.5]
    ranks.train(tmp_path, 2, *flags(small_corpus, tmp_path, "--expert-parallel", *options))
    call("consolidate", tmp_path / LAST, "--output", tmp_path / "whole.pt")
    extra = load(tmp_path / "whole.pt")["extra_state"]
    w1 = "encoder.layers.1.moe.experts.w1"
    halves = [state["extra_state"]["ema"][w1] for state in checkpoint(tmp_path).states]
    assert torch.equal(extra["ema"][w1], torch.cat(halves))
    assert len(extra["ema_fp32_params"][w1]) == 8


def adafactor(data, folder, *more) -> list:
    arguments = flags(data, folder, "--optimizer", "adafactor", *more)
    position = arguments.index("--adam-eps")
    return [*arguments[:position], *arguments[position + 2 :]]


SPAWNED = """
import sys, time
import torch
import fairseq_cli.train
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils

def main(cfg):
    fairseq_cli.train.main(cfg)
    time.sleep(2 * cfg.distributed_training.distributed_rank)  # they do not end at once

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 2  # so many processes fairseq spawns
    parser = options.get_training_parser()
    utils.call_main(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser)), main)
"""


@pytest.mark.soak
def test_processes_that_fairseq_spawns_itself(small_corpus, tmp_path):
    """Without torchrun, on one machine with several GPUs; here they have none."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    arguments = flags(small_corpus, tmp_path / "run", "--expert-parallel", "--max-update", 2)
    arguments += ["--distributed-world-size", 2]
    address = f"tcp://127.0.0.1:{free_port()}"
    process = run(
        *("python", tmp_path / "spawned.py", *arguments),
        *("--distributed-init-method", address, "--distributed-num-procs", 2),
    )
    assert "error" not in process.stdout, process.stdout[-2000:]
    assert checkpoint(tmp_path / "run").record.world_size == 2


def test_an_optimizer_of_one_process_that_cannot_be_divided(ranks, small_corpus, tmp_path):
    ranks.train(tmp_path, 1, *adafactor(small_corpus, tmp_path, "--max-update", 1), one=True)
    command = ("reshard", tmp_path / LAST, "--world-size")
    said = refusal(*command, 2, "--output", tmp_path / "new" / LAST)
    assert "checkpoint_last.pt: " in said and " cannot be divided" in said
    assert not (tmp_path / "new").exists()
    call(*command, 1, "--output", tmp_path / "same.pt")


# Killed at any moment, a run resumes from its newest complete set, and ends as if nothing had been.

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


def newest_complete(folder, name):
    """Updates of the newest set that all ranks have saved, whether its files have their names or not."""
    found = []
    for rank in (0, 1):
        file = rank_file(folder / name, rank)
        records = filter(None, map(record_of, (file, pending(file))))
        found.append({(record.num_updates, record.save) for record in records})
    return max((updates for updates, _ in found[0] & found[1]), default=0)


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
