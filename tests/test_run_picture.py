"""The picture that the recipes draw of a run when it ends."""

import pytest

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.training.picture import LOSS, RATE, SCORES, draw, read_curves
from smoe_fairseq.recipes.training.train import begin_log

LOGGED = (
    "2026-01-01 00:00:00 | INFO | train_inner | "
    "epoch 001: {0} / 9 loss=9.1, nll_loss={1}, wpb=10, lr={2}, num_updates={0}\n"
)
VALID = (
    "epoch 001 | valid on 'valid' subset | loss 7.2 | nll_loss {1} | chrf {2} | bleu 1.5 | "
    "num_updates {0}\n"
)
SIMPLE = (LOGGED, VALID, "epoch 001 | loss 9 | nll_loss 99 | num_updates 6\n")
JSON = (
    '{{"epoch": 1, "loss": "9.1", "nll_loss": "{1}", "wpb": "10", "lr": "{2}", "num_updates": "{0}"}}\n',
    '{{"epoch": 1, "valid_loss": "7.2", "valid_nll_loss": "{1}", "valid_chrf": "{2}", '
    '"valid_bleu": "1.5", "valid_num_updates": "{0}"}}\n',
    '{"epoch": 1, "train_loss": "9", "train_nll_loss": "99", "train_num_updates": "6"}\n',
)


@pytest.fixture(params=[SIMPLE, JSON], ids=["simple", "json"])
def log(tmp_path, request):
    logged, valid, epoch = request.param
    lines = [logged.format(i, 8 - i, i / 1000) for i in range(1, 7)]
    lines.insert(4, valid.format(4, 5.5, 20.25))
    lines.append(logged.format(6, 1.5, 0.006))  # made again after an interruption
    lines.append(epoch)  # its mean
    file = tmp_path / "train.log"
    file.write_bytes("".join(lines).encode() + b"epoch 005 | loss 2.3\0\xff\xfe half")  # a crash
    return file


def test_curves_are_those_of_the_log(log):
    found = read_curves(log)
    assert found[LOSS]["training"] == {1: 7.0, 2: 6.0, 3: 5.0, 4: 4.0, 5: 3.0, 6: 1.5}
    assert found[LOSS]["validation"] == {4: 5.5} and found[SCORES]["chrF++"] == {4: 20.25}
    assert found[SCORES]["BLEU"] == {4: 1.5} and found[RATE]["learning rate"][6] == 0.006


def test_a_run_that_begins_anew_has_a_log_of_its_own(tmp_path):
    """What an older one logged, whose checkpoints are gone, is no part of it."""
    log, old = tmp_path / "train.log", tmp_path / "train.log.old"
    for line in ("one", "two", "three"):
        begin_log(log, line)
        assert log.read_text() == f"$ {line}\n"
    assert old.read_text() == "$ one\n$ two\n"
    (tmp_path / "checkpoint_last.pt").touch()
    begin_log(log, "four")
    assert log.read_text() == "$ three\n$ four\n" and old.read_text() == "$ one\n$ two\n"


@pytest.mark.parametrize("names", [("test", "valid"), ("test",)])
@pytest.mark.parametrize("form", [SIMPLE, JSON], ids=["simple", "json"])
def test_of_several_validation_sets_it_shows_the_first(tmp_path, names, form):
    """By which fairseq chooses the best checkpoint."""
    lines = [f"$ fairseq-train data --valid-subset {','.join(names)} --seed 1\n"]
    for number, name in enumerate(names):
        line = form[1].format(4, 5.5 + number, 20.25)
        lines.append(line.replace("'valid'", f"'{name}'").replace('"valid_', f'"{name}_'))
    (tmp_path / "train.log").write_text("".join(lines))
    assert read_curves(tmp_path / "train.log")[LOSS]["validation"] == {4: 5.5}


@pytest.mark.parametrize("log", [SIMPLE], indirect=True)
def test_it_appears_beside_the_checkpoints(log, tmp_path):
    assert draw(tmp_path, log) == tmp_path / "training.png"
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_of_a_run_that_logged_little_there_is_none(log, tmp_path):
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    for missing, named in ((log, "--log-interval"), (tmp_path / "gone.log", "gone.log")):
        with pytest.raises(UsageError, match=named):
            draw(tmp_path, missing)
    assert [path.name for path in tmp_path.iterdir()] == ["train.log"]
