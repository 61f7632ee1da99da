"""A run goes on as what it was started as, or not at all."""

import json
import os
from pathlib import Path

import pytest
from commands import contents, touch_binarised
from programs import path_with
from test_lock import holder
from test_recipes import recipe, refusal

from smoe_fairseq import locks
from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.training import identity

WORDS = """data/x/bin --user-dir smoe_fairseq --task translation --arch smoe_transformer_tiny --lr 0.002
    --fp16 --seed 1 --max-tokens 4000 --update-freq 2 --max-update 10""".split()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Starts a run, or goes on: ``run("--flag", ..., method=, processes=)``; a sentence, or None."""
    monkeypatch.setattr(identity, "joined", set())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dict.en.txt").write_text("a 2\nb 1\n")

    def claim(*extra, method="moe", processes=1, words=WORDS, force=False, left=True) -> str | None:
        words = [*words, "--save-dir", str(tmp_path / "runs/x/moe"), *extra]
        try:
            assert identity.claim(method, tmp_path / "bin", words, processes, force) == left
        except UsageError as error:
            return str(error)
        finally:
            locks.release_all(os.getpid())

    yield claim


@pytest.fixture
def started(run, tmp_path) -> Path:
    """The folder of a run that has saved a checkpoint."""
    assert run() is None
    (tmp_path / "runs/x/moe/checkpoint_last.pt").touch()
    return tmp_path / "runs/x/moe"


def save(folder: Path) -> None:
    """Training does, after updates."""
    (folder / "checkpoint_last.pt").write_text("more")


def test_a_run_that_does_not_say_what_it_is_is_resumed_with_a_word(run, started, capsys):
    (started / "identity.json").unlink()
    assert run(method="switch") is None and "identity.json is missing" in capsys.readouterr().err
    assert "as switch, not as moe" in run()


CHANGES = {  # a flag that is given now, and what the sentence names of the start
    "--seed 2": "--seed 1",
    "--seed=2": "--seed 1",
    "--lr 0.003": "--lr 0.002",
    "--moe-cmr": "--moe-cmr",
    "--label-smoothing 0.2": "--label-smoothing 0.2",
    "-a smoe_transformer": "--arch smoe_transformer_tiny",
    "--max-tokens 2000": "= 8000",
    "--weight-decay -1": "--weight-decay -1",
}


@pytest.mark.parametrize("flags", CHANGES)
def test_another_flag_is_refused(run, started, flags):
    before = contents(started)
    sentence = run(*flags.split())
    named = (started, CHANGES[flags], "--run-dir", "--force-resume")
    assert all(str(each) in sentence for each in named)
    assert contents(started) == before


def test_another_flag_may_be_forced(run, started, capsys):
    """And is what the run was started with from then on."""
    assert run("--lr", "0.003", force=True) is None
    said = f"warning: {started} was started with --lr 0.002, not with --lr 0.003; --force-resume"
    assert said in capsys.readouterr().err
    assert "--lr 0.002, not with --lr 0.003" in run("--lr", "0.003")  # no update was made so far
    os.utime(started / "checkpoint_last.pt", (1, 1))  # a copy without its times
    assert run() is None
    save(started)
    assert run() is None  # it went on as it was started
    assert run("--lr", "0.003", force=True) is None
    (started / "checkpoint_last.pt").write_text("even more")
    assert run("--lr", "0.003") is None
    assert "--lr 0.003, not with --lr 0.002" in run()


def test_what_is_forced_on_a_finished_run_is_not_recorded(run, started):
    identity.finish([*WORDS, "--save-dir", str(started)])
    before = (started / identity.FILE).read_bytes()
    assert run("--lr", "0.003", force=True, left=False) is None  # nothing is trained
    assert (started / identity.FILE).read_bytes() == before
    assert run("--lr", "0.003", "--max-update", "20", force=True) is None
    save(started)
    assert "--lr 0.003, not with --lr 0.002" in run()


def test_another_method_or_dictionary_may_not_be_forced(run, started, tmp_path):
    assert "was started as moe, not as dense, which --force-resume is not for" in run(
        "--lr", "1", method="dense", force=True
    )
    assert "--force-resume" not in run(method="dense")
    (tmp_path / "bin/dict.en.txt").write_text("b 1\na 2\n")
    assert "other dictionaries" in run(force=True) and "--force-resume" not in run()


def test_another_order_of_languages_may_not_be_forced(run, tmp_path):
    """It is that of the dictionary's language tokens."""
    assert run("--langs", "a,b") is None
    save(tmp_path / "runs/x/moe")
    for force in (False, True):
        said = run("--langs", "b,a", "--lr", "1", force=force)
        assert "--langs a,b, not with --langs b,a" in said and "or add --force-resume" not in said


def test_what_is_trained_is_trained_again_only_to_go_further(run, started):
    folder = ["--save-dir", str(started)]
    identity.finish([*WORDS, *folder, "--stop-time-hours", "1"])  # stopped, not finished
    assert run() is None
    identity.finish([*WORDS, *folder])
    assert run(left=False) is None
    assert run("--log-interval", "5", left=False) is None
    assert run("--max-update", "20") is None
    assert run("--max-epoch", "3") is None
    assert "--seed 1, not with --seed 2" in run("--seed", "2")


def test_a_run_that_is_trained_further_has_not_ended(run, started):
    """But for one that has saved nothing of it, of which nothing is left to do."""

    def notes() -> list[str]:
        return identity.differing({started.name: identity.record(started)})

    identity.finish([*WORDS, "--save-dir", str(started)])
    assert not notes()
    assert run("--max-update", "20") is None
    assert not notes() and run(left=False) is None
    assert run("--max-update", "20") is None
    save(started)
    (note,) = notes()
    assert note == "the training of moe has not ended"
    assert run("--max-update", "20") is None
    identity.finish([*WORDS, "--save-dir", str(started), "--max-update", "20"])
    assert not notes() and run("--max-update", "20", left=False) is None


def test_a_checkpoint_that_is_restored_is_recorded_once_its_training_saves(run, started, tmp_path):
    for name in ("first", "second"):
        file = tmp_path / f"{name}.pt"
        file.write_text(name)
        assert run("--restore-file", str(file)) is None
        assert not identity.began_with(started, file)
        (started / "checkpoint_last.pt").write_text(f"after {name}")
        assert identity.began_with(started, file) and run() is None
    assert not identity.began_with(started, tmp_path / "first.pt")


def test_flag_that_is_missing_is_refused(run, started):
    words = [word for word in WORDS if word != "--fp16"]
    assert "was started with --fp16, which is not given now" in run(words=words)


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-update", "99", "--max-epoch", "3", "--patience", "2", "--log-interval", "1"],
        ["--keep-last-epochs", "2", "--save-interval-updates", "5", "--validate-interval", "2"],
        ["--num-workers", "3", "--cpu", "--tensorboard-logdir", "logs", "--wandb-project", "x"],
        ["--max-tokens", "2000", "--update-freq", "4"],
        ["--lr", "2e-3", "--learning-rate", "0.002"],
        ["--restore-file", "checkpoint_2.pt", "--reset-optimizer", "--min-loss-scale", "1e-6"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_does_not_change_the_training_may_differ(run, started, flags):
    assert run(*flags) is None


def test_files_of_the_model_that_it_began_from_may_have_moved(run, tmp_path):
    """Its fingerprint and the dictionaries are compared."""
    folder = tmp_path / "runs/x/moe"
    for place, start, differs in (("a", "1", False), ("b", "1", False), ("b", "2", True)):
        flags = (
            "--fixed-dictionary",
            f"{place}/dict.txt",
            "--finetune-from-model",
            f"{place}/x.pt",
        )
        assert bool(run(*flags, "--pretrained", start)) == differs
        (folder / "checkpoint_last.pt").touch()


def test_other_numbers_of_processes_with_the_batch_kept(run, started):
    assert run("--update-freq", "1", processes=2) is None
    assert run("--update-freq", "1", "--max-tokens", "2667", processes=3) is None
    assert "= 16000" in run(processes=2)


@pytest.mark.parametrize("sizes", [("5", "2"), ("33", "16"), ("1", "1")])
def test_other_ranks_round_the_sentences_of_a_batch_of_tokens(run, started, sizes):
    one, two = (["--batch-size", size] for size in sizes)
    own = identity.of("moe", started.parents[2] / "bin", [*WORDS, *one], 1)
    (started / identity.FILE).write_text(json.dumps(own))
    four = ("--update-freq", "1", "--max-tokens", "2000")
    assert run(*four, *two, processes=4) is None
    for other in ([], ["--batch-size", "99"]):
        assert "--batch-size" in run(*four, *other, processes=4)
    assert "--batch-size" in run("--batch-size", "4")
    (started / identity.FILE).write_text(json.dumps(own | {"flags": {}}))
    assert "--max-tokens" in run(*four, *two, processes=4)


def test_other_training_text_is_refused_where_it_is_recorded(run, started, tmp_path, capsys):
    """Not another test set; runs of earlier versions do not say with which they began."""
    record = tmp_path / "bin/preparation.json"
    texts = {"train.en-fr.en": "1", "train.en-fr.fr": "2", "test.en-fr.fr": "3"}

    def prepare(**changed: str) -> None:
        content = texts | {name.replace("_", "."): value for name, value in changed.items()}
        content = {name.replace("en.fr", "en-fr"): value for name, value in content.items()}
        record.write_text(json.dumps({"settings": {}, "content": {"raw/": content}}))

    prepare()
    assert run() is None  # an earlier version's
    (started / "checkpoint_last.pt").unlink()
    assert run() is None
    save(started)
    for changed, differs in (({"test_en_fr_fr": "4"}, False), ({"train_en_fr_fr": "4"}, True)):
        prepare(**changed)
        sentence = run()
        assert bool(sentence) == differs
    assert "training text" in sentence and str(tmp_path / "bin") in sentence
    assert run(force=True) is None and "training text" in capsys.readouterr().err
    save(started)
    (started / "checkpoint_last.pt").write_text("even more")
    assert run() is None
    record.unlink()
    assert run() is None


def test_run_that_has_saved_nothing_starts_anew(run, started):
    (started / "checkpoint_last.pt").unlink()
    assert run("--seed", "2") is None
    (started / "checkpoint_last-rank-0.pt").touch()
    assert "--seed 2, not with --seed 1" in run()


@pytest.mark.parametrize("content", ["", '{"method": "moe"}'])
def test_unreadable_identity_is_named(run, started, content):
    (started / identity.FILE).write_text(content)
    sentence = run()
    assert f"{started}/{identity.FILE}" in sentence and "--run-dir" in sentence
    assert (started / identity.FILE).read_text() == content


def test_through_the_recipe(tmp_path):
    """Another start while the first one runs, and another flag when it has been stopped."""
    touch_binarised(tmp_path, "m15")
    folder = tmp_path / "runs/m15/moe"
    folder.mkdir(parents=True)
    given = {
        "GPUS": "1",
        "LAUNCHER": "slurm",
        "PATH": path_with(tmp_path / "bin", {"srun": "exit 9"}),
    }
    first = holder(folder, locks.RECIPE)
    sentence = refusal(recipe(tmp_path, "train", "m15", "moe", **given))
    assert f"runs/m15/moe is in use by another run (process {first.pid} on " in sentence
    first.communicate()
    assert recipe(tmp_path, "train", "m15", "moe", **given).returncode
    assert sorted(path.name for path in folder.iterdir()) == [identity.FILE, "train.log"]
    (folder / "checkpoint_last.pt").touch()
    sentence = refusal(recipe(tmp_path, "train", "m15", "moe", "--dropout", "0.7", **given))
    assert "runs/m15/moe was started with" in sentence and "--dropout 0.7" in sentence
    sentence = refusal(recipe(tmp_path, "train", "m15", "moe", "--dropuot", "0.7", **given))
    assert "--dropuot" in sentence and "--dropout" in sentence and "runs/m15" not in sentence


def test_another_machine_of_the_run_joins_it(started, tmp_path, monkeypatch):
    """As long as it is given the same; what an older run has left says nothing of this one."""
    monkeypatch.setattr(identity, "TIMEOUT_SECONDS", 0.3)
    first = holder(started, locks.RECIPE)
    own = ("moe", tmp_path / "bin", [*WORDS, "--save-dir", str(started)])
    with pytest.raises(UsageError, match="is in use by another run"):
        identity.claim(*own, 1)
    assert identity.claim(*own, 1, machines=2)
    noted = (started / identity.FILE).read_text()
    identity.finish(own[2])
    assert (started / identity.FILE).read_text() == noted  # by the first alone
    with pytest.raises(
        UsageError, match="in use by another machine, and was started with --seed 1"
    ):
        identity.claim(own[0], own[1], [*own[2], "--seed", "2"], 1, machines=2)
    trained = json.loads(noted) | {"trained": {"--max-update": "10"}}
    (started / identity.FILE).write_text(json.dumps(trained))
    assert not identity.claim(*own, 1, machines=2)
    (started / "checkpoint_last.pt").unlink()
    assert identity.claim(*own, 1, machines=2)
    first.communicate()


def test_where_there_are_no_locks_it_is_noted_all_the_same(run, started, monkeypatch):
    monkeypatch.setattr(locks, "_lock", lambda file: None)
    assert run() is None
    identity.finish([*WORDS, "--save-dir", str(started)])
    assert run(left=False) is None
