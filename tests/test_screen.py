"""What training shows where a recipe runs it: few lines, of which the first comes at once."""

import logging

import pytest
from commands import refused, touch_binarised
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from test_recipes import TRAIN, recipe, write_dataset

from smoe_fairseq.progress import duration
from smoe_fairseq.training import screen


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_with_the_first_update_the_last_and_every_so_often(clock, capsys):
    shown = screen.Screen(seconds=30, max_update=20)
    for update in range(1, 21):
        shown.update(update, 10 - update / 4, words=500)
        clock[0] += 10
    first, *later = capsys.readouterr().out.splitlines()
    assert first == "  update 1 of 20 | loss 9.750"
    assert later[0] == "  update 4 of 20 | loss 9.000 | 50 words/s | 2 min 40 s left"
    assert [line.split()[1] for line in later] == ["4", "7", "10", "13", "16", "19", "20"]
    assert later[-1] == "  update 20 of 20 | loss 5.000 | 50 words/s"


def test_a_validation_is_no_time_of_training(clock, capsys):
    shown = screen.Screen(seconds=10, max_update=0)
    for update in (1, 2, 3):
        shown.update(update, None, words=500)
        shown.validating(update)
        clock[0] += 1000
        shown.saved(update, 4.5, 4.5)
        clock[0] += 10
    assert capsys.readouterr().out.count("| 50 words/s") == 2


def test_a_checkpoint_is_shown_with_its_validation_loss(capsys):
    shown = screen.Screen(seconds=30, max_update=0)
    shown.update(1_000, None, words=0)
    shown.validating(1_000)
    shown.saved(1_000, 4.5, 4.5)
    shown.saved(2_000, 5.5, 4.5)
    shown.saved(2_250, 4.5, 4.5)
    shown.saved(2_500, None, None)
    assert capsys.readouterr().out.splitlines() == [
        "  update 1,000",
        "  update 1,000 | validation begins",
        "  update 1,000 | validation loss 4.500 (best) | saved",
        "  update 2,000 | validation loss 5.500 | saved",
        "  update 2,250 | validation loss 4.500 (equal to the best) | saved",
        "  update 2,500 | saved",
    ]


def test_the_metric_of_validation_has_its_name_and_the_end_its_reason(
    tmp_path, monkeypatch, capsys
):
    log = tmp_path / "train.log"
    words = ["data", "--arch", "transformer", "--log-file", str(log)]
    words += ["--best-checkpoint-metric", "chrf", "--maximize-best-checkpoint-metric"]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    monkeypatch.setenv(screen.VARIABLE, "30")
    monkeypatch.setattr(screen, "_screen", None)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    training = logging.getLogger("fairseq_cli.train")
    monkeypatch.setattr(training, "handlers", [])
    screen.begin(convert_namespace_to_omegaconf(args))
    screen.after_save(10, {"val_loss": 21.5, "best": 21.5})
    training.info("epoch 001 | loss 5")
    training.info("early stop since valid performance hasn't improved for last 2 runs")
    first, last = capsys.readouterr().out.splitlines()
    assert first == "  update 10 | validation chrf 21.500 (best) | saved"
    assert last.endswith("for last 2 runs")


def test_a_terminal_has_one_line_that_is_written_over(clock, capsys, monkeypatch):
    monkeypatch.setattr(screen.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(screen.atexit, "register", lambda *_: None)
    shown = screen.Screen(seconds=1, max_update=9)
    for update in (1, 2):
        shown.update(update, 3.0, words=1)
        clock[0] += 1
    shown.saved(2, None, None)
    *overwritten, last = capsys.readouterr().out.split(screen.CLEAR)
    assert [line.split(" |")[0] for line in overwritten] == [
        "",
        "  update 1 of 9",
        "  update 2 of 9",
    ]
    assert last == "  update 2 of 9 | saved\n"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 01 s"), (3599.9, "1 h 00 min"), (18420, "5 h 07 min")],
)
def test_duration(seconds, said):
    assert duration(seconds) == said


KILLED = "error: fairseq-train was stopped by SIGKILL; the same command "
EARLY = "warning: training has ended early; once the cause is fixed, the same command "


@pytest.mark.parametrize(
    "ending, begun, saved, said",
    [
        ("kill -9 $$", False, "checkpoint_last.pt", f"{KILLED}resumes from {{}}"),
        ("kill -9 $$", True, "", f"{KILLED}begins again, as {{}}checkpoint_last.pt is missing"),
        # Not by a signal: the same would come again.
        ("exit 1", True, "checkpoint_1_5.pt", f"{EARLY}resumes from {{}}"),
        ("exit 1", False, "checkpoint_last.pt", ""),  # as at a flag that fairseq-train refuses
    ],
)
def test_the_last_line_says_how_to_go_on(tmp_path, ending, begun, saved, said):
    given = write_dataset(tmp_path / "configs", "tiny", pairs=["en-fr"], raw={}, train=TRAIN)
    touch_binarised(tmp_path, "tiny", "en-fr")
    save = f"touch runs/tiny/smoe-2-2/{saved}; " if saved else ""
    save += "echo Start iterating over samples >> runs/tiny/smoe-2-2/train.log; " * begun
    given |= {"BASH_FUNC_fairseq-train%%": f"() {{ {save}{ending}; }}", "GPUS": "0"}
    result = recipe(tmp_path, "train", "tiny", "smoe-2-2", **given)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1] if said else result.stderr
    assert last == said.format(f"runs/tiny/smoe-2-2/{saved}")


def test_a_training_without_a_checkpoint_has_failed(tmp_path):
    """As with --stop-min-lr above the first learning rate."""
    given = write_dataset(tmp_path / "configs", "tiny", pairs=["en-fr"], raw={}, train=TRAIN)
    touch_binarised(tmp_path, "tiny", "en-fr")
    given |= {"BASH_FUNC_fairseq-train%%": "() { true; }", "GPUS": "0"}
    refused(recipe(tmp_path, "train", "tiny", "smoe-2-2", **given), "smoe-2-2/train.log")


def test_a_log_that_cannot_be_written_is_told_once(monkeypatch, capfd):
    monkeypatch.setattr(logging.FileHandler, "handleError", logging.Handler.handleError)
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(
            options.get_training_parser(), ["data", "--arch", "transformer"]
        )
    )
    screen.begin(cfg)
    handler = logging.FileHandler("/dev/full")
    for number in range(3):
        handler.emit(logging.makeLogRecord({"msg": f"line {number}", "args": ()}))
    assert capfd.readouterr().err.count("/dev/full") == 1
