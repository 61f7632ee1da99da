"""Where a study trains its runs, and what is noted of it."""

import json
import subprocess
from dataclasses import replace

import pytest

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.program_flags import flag_values
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.study import results as study_results
from smoe_fairseq.recipes.study import runs as study
from smoe_fairseq.recipes.training import identity
from smoe_fairseq.recipes.training.launcher import Launch, plan_launch
from smoe_fairseq.recipes.training.train import plan

TWO = {"GPUS": "0", "OMP_NUM_THREADS": "2"}


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(study, "plan_launch", lambda *_: Launch("plain", 1, 4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "visible, jobs, shares",
    [
        ("", "2", ["0,2", "1,3"]),
        ("4,5,6,7", "2", ["4,6", "5,7"]),
        ("GPU-a, GPU-b,GPU-c,GPU-d", "3", ["GPU-a,GPU-d", "GPU-b", "GPU-c"]),
        ("6,7,4,5", "6", ["6", "7", "4", "5", "6", "7"]),  # more runs than GPUs share them
    ],
)
def test_runs_share_the_gpus_that_are_visible(gpus, visible, jobs, shares):
    gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    places = study._slots(Settings({"JOBS": jobs})).values()
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == shares
    assert [int(place["GPUS"]) for place in places] == [share.count(",") + 1 for share in shares]


def test_one_run_at_a_time_has_all_gpus(gpus):
    assert study._slots(Settings()) == {0: {"GPUS": "4", "JOBS": ""}}


@pytest.mark.parametrize("threads", ["3", "3,1"])
def test_the_number_of_threads_may_be_given(gpus, threads):
    gpus.setenv("OMP_NUM_THREADS", threads)
    for given in ({"JOBS": "2"}, {"JOBS": "2", "GPUS": "0"}):
        gpus.setattr(study, "plan_launch", plan_launch if "GPUS" in given else study.plan_launch)
        places = study._slots(Settings.read(given)).values()
        assert [place["OMP_NUM_THREADS"] for place in places] == ["3", "3"]


def test_a_resumed_run_that_logs_its_settings_keeps_its_updates(tmp_path):
    run = study.Run(
        load_dataset("m4", Settings({"RUN_DIR": str(tmp_path)})), "moe", 1, (), 50, True
    )
    run.folder.mkdir(parents=True)
    log = run.folder / "train.log"
    assert run.done() == 0
    for line, updates in (
        ("num_updates=30", 30),
        ("a setting | " * 5_000, 30),
        ("num_updates=60", 50),
    ):
        log.write_text(f"{log.read_text() if log.exists() else ''}{line}\n")
        assert run.done() == updates


def test_all_starts_of_a_run_are_told(tmp_path, monkeypatch):
    """Begun by one commit and one machine, and finished by others; not those of an older run."""
    study_results.record_start(tmp_path, TWO | {"OMP_NUM_THREADS": "3"})
    study_results.record_start(tmp_path, TWO)
    (tmp_path / "checkpoint_last.pt").touch()
    study_results.record_start(tmp_path, TWO)
    study_results.record_start(tmp_path, TWO)
    (first,) = json.loads((tmp_path / study_results.STARTS_FILE).read_text())
    assert study_results.summarize_starts(tmp_path) == first
    one = study_results._machine({"GPUS": "0", "OMP_NUM_THREADS": "1"})
    assert " cores of " in one and first["machine"] == f"{one}, 2 threads"
    monkeypatch.setattr(study_results, "_commit", lambda: "abc")
    study_results.record_start(tmp_path, TWO)
    assert study_results.summarize_starts(tmp_path) == first | {"commit": f"{first['commit']}, abc"}
    monkeypatch.setattr(study_results, "_machine", lambda _: "another")
    study_results.record_start(tmp_path, TWO)
    told = study_results.summarize_starts(tmp_path)
    assert told["machine"] == f"{first['machine']}, then another"
    assert told["untimed"] == "of two machines"


def test_the_curve_of_a_run(tmp_path, monkeypatch):
    """Words and seconds are totals: each line of the log has the means since the one before."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/multi30k/moe"
    run.mkdir(parents=True)
    lines = [
        {"num_updates": 10, "nll_loss": 8.0, "wpb": 100, "wps": 50, "experts_per_token": 2},
        {"valid_nll_loss": 7.5, "valid_num_updates": 15},
        {"num_updates": 25, "nll_loss": 6.0, "wpb": 200, "wps": 100, "experts_per_token": 1.4},
        {"num_updates": 30, "wpb": 300, "wps": 9},  # of something else
    ]
    (run / "train.log").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    score = {"bleu": 30.0, "signature": "s", "sentences": 3}
    (run / "scores.json").write_text(json.dumps({"scores": {"en-de": score}}))
    study_results.save(load_dataset("multi30k", Settings()), "moe", "SEED=1 true")
    (result,) = study_results.read(load_dataset("multi30k", Settings()))
    numbers = [[row[name] for name in ("update", "words", "seconds")] for row in result.curve]
    assert numbers == [[10, 1000, 20], [15, 1000, 20], [25, 4000, 50]]
    assert [row["validation_nll"] for row in result.curve] == [None, 7.5, None]
    assert result.about["experts_per_token"] == pytest.approx((100 * 2 + 200 * 1.4) / 300, abs=1e-3)
    elsewhere = load_dataset("multi30k", Settings({"RUN_DIR": "/away", "RESULTS_DIR": "results"}))
    start = ["--finetune-from-model", "/away/multi30k/x.pt", "--max-update", "25"]
    about = tmp_path / "results/multi30k/moe/run.json"  # of a run there, with its own text
    about.write_text(json.dumps(result.about | {"flags": {start[0]: "runs/multi30k/x.pt"}}))
    narrow = replace(elsewhere, sacrebleu=elsewhere.sacrebleu | {"width": 1})
    assert study_results.are_saved(narrow, "moe", start, 1)
    written = {"sentences": 200, "metric": "chrf", "every": 9}  # with the defaults
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"settings": {"validate": written}})
    )
    assert study_results.are_saved(replace(narrow, validate={"every": 9}), "moe", start, 1)
    about.write_text(json.dumps(result.about | {"flags": {start[0]: "runs/multi30k/x.pt"}}))
    for other in ({"validate": {"metric": "chrf"}}, {"sacrebleu": {"tokenize": "char"}}):
        with pytest.raises(UsageError, match=f"`{min(other)}`"):
            study_results.are_saved(replace(elsewhere, **other), "moe", start, 1)
    monkeypatch.setattr(identity, "_text", lambda data: "this")
    for key, own, named in (
        ("flags", result.about["flags"] | {"--seed": "9"}, "seed"),
        ("text", "other", "text"),
        ("selection", {"--best-checkpoint-metric": "bleu"}, "--best-checkpoint-metric bleu"),
    ):
        about.write_text(json.dumps(result.about | {key: own}))
        with pytest.raises(UsageError, match=f"^{about.parent.relative_to(tmp_path)} .*{named}"):
            study_results.are_saved(elsewhere, "moe", start[2:], 1)
    assert result.about["updates"] == 25 and result.about["versions"].keys() >= {"torch", "fairseq"}


def test_routing_is_summed_up_by_text_alone(tmp_path):
    folder = tmp_path / study_results.ANALYSIS
    folder.mkdir()
    head = "kind,direction,side,layer,requested_capacity"
    row = "{},en-de,encoder,1,{}"
    blocks = [head, row.format("text", 1.5), row.format("tag", 3.0)]
    (folder / "blocks.csv").write_text("\n".join(blocks) + "\n")
    tokens = [f"{head},frequency_rank,occurrences"]
    tokens += [f"{row.format('text', 1 + rank / 9)},{rank},10" for rank in (1, 2, 3)]
    tokens += [f"{row.format('text', 1.0)},4,9", f"{row.format('tag', 1.0)},5,10"]
    (folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
    assert study_results.routing_summary(tmp_path) == {
        "requested_capacity": {"en-de": {"encoder.1": 1.5}},
        "rank_correlation": {"en-de": {"encoder.1": 1.0}},
    }


def test_a_run_without_a_validation_is_not_saved(tmp_path, monkeypatch):
    """Every later report would fail by it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/multi30k/moe"
    run.mkdir(parents=True)
    (run / "train.log").write_text("$ fairseq-train --disable-validation\n")
    with pytest.raises(UsageError, match="runs/multi30k/moe/train.log"):
        study_results.save(load_dataset("multi30k", Settings()), "moe", "SEED=1 true")
    assert not (tmp_path / "results").exists()
    line = {"valid_nll_loss": 7.5, "valid_num_updates": 15}  # of a training that was extended
    (run / "train.log").write_text(json.dumps(line))
    own = {"method": "moe", "dictionary": "", "flags": {}, "trained": {"--max-update": "10"}}
    (run / identity.FILE).write_text(json.dumps(own))
    with pytest.raises(UsageError, match="runs/multi30k/moe was trained for 15 updates"):
        study_results.save(load_dataset("multi30k", Settings()), "moe", "SEED=1 true")
    assert not (tmp_path / "results").exists()


def test_a_commit_with_changes_is_dirty(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(study_results.smoe_fairseq, "__file__", str(package / "__init__.py"))

    def git(*words) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        words = ["git", "-C", tmp_path, *identity, *words]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "m")
    commit = git("rev-parse", "--short", "HEAD")
    assert study_results._commit() == commit
    (tmp_path / "results").touch()  # beside the code
    assert study_results._commit() == commit
    (package / "__init__.py").write_text("changed")
    assert study_results._commit() == f"{commit}-dirty"


@pytest.mark.parametrize(
    "then, yaml, now, named",
    [  # flags typed for the run that is kept, changes of the data set since, flags typed for the study
        ("", {}, "--max-update 2500 --log-interval 5", None),
        ("--bf16 --seed 1", {}, "--seed 2", None),
        ("--dropout 0.5", {"dropout": 0.5}, "", None),
        ("", {}, "--max-update 4000", "--max-update 2500"),
        ("--patience 3", {}, "", "--patience 3"),
        ("", {}, "--lr 0.003", "--lr 0.006"),
        ("", {"max-tokens": 8192}, "", "8192"),
        ("--batch-size 8", {}, "--batch-size 2", "--batch-size"),
    ],
)
def test_settings_that_a_kept_run_was_not_made_with(tmp_path, monkeypatch, then, yaml, now, named):
    """How long is trained is one of them, though a run may go on with another."""
    monkeypatch.chdir(tmp_path)
    binary = tmp_path / "data/multi30k/bin"
    binary.mkdir(parents=True)
    (binary / "dict.txt").write_text("a 1\n")
    dataset = load_dataset("multi30k", Settings({"GPUS": "0"}))
    _, words, _ = plan(dataset, "moe", then.split())
    own = identity.of("moe", binary, words, 1)
    about = {"command": f"SEED=1 train {then}", "commit": "1", "machine": "m", "versions": {}}
    about |= {"updates": int(flag_values(words)["--max-update"]), "flags": own["flags"]}
    more = {"dictionary": own["dictionary"], "limits": identity.limits(flag_values(words))}
    changed = replace(dataset, train=dataset.train | yaml)
    _, words, _ = plan(changed, "moe", now.split())
    kept = tmp_path / "results/multi30k/moe" / study_results.FILE
    kept.parent.mkdir(parents=True)
    # Earlier versions kept the updates alone.
    for content in (about | more, about) if "patience" not in then + now else (about | more,):
        kept.write_text(json.dumps(content))
        if named is None:
            assert study_results.are_saved(changed, "moe", words, 1)
            assert not study_results.are_saved(changed, "dense", words, 1)
            continue
        with pytest.raises(UsageError, match="--results-dir") as error:
            study_results.are_saved(changed, "moe", words, 1)
        assert named in str(error.value) and str(kept.parent.name) in str(error.value)
    kept.write_text(json.dumps(about | more))
    (binary / "dict.txt").write_text("b 1\n")
    with pytest.raises(UsageError, match="dictionaries"):
        study_results.are_saved(changed, "moe", words, 1)


def test_a_pair_without_test_text_is_not_analysed(tmp_path):
    """It is trained and not scored; the commands after training ask for the others alone."""
    dataset = load_dataset("multi30k", Settings({"DATA_DIR": str(tmp_path)}))
    raw = tmp_path / "multi30k/raw"
    raw.mkdir(parents=True)
    for language in ("en", "fr"):
        (raw / f"test.en-fr.{language}").touch()
    (line,) = study_results.commands(dataset, tmp_path / "run", True, False)[1:]
    assert flag_values(line.split())["--lang-pairs"] == "fr-en,en-fr"
