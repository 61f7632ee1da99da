"""Processes of one run that were started with other flags or data: named at the start, no hang."""

import os
import shutil

import pytest
from commands import preprocess
from ranks import fairseq_train
from test_dictionaries import data
from test_lock import GLOO, SMALL

assert data  # a fixture

FLAGS = [*SMALL, *GLOO, "--max-update", "4"]


def train(data: list[str], flags: list[str], of_second: list[str]) -> None:
    """On both ranks: with a folder of data each, and flags that only the second one is given."""
    rank = int(os.environ["RANK"])
    fairseq_train([data[rank], *flags, *(of_second if rank else [])])


def check_refusal(ranks, folder, data, flags, of_second, sentence) -> None:
    flags = [*flags, "--save-dir", folder / "run"]
    run = ranks.start(folder, 2, data, flags, of_second, function=train)
    assert run.wait() == [1, 1], run.output()
    for rank in (0, 1):
        assert f"error: rank 1 has {sentence}" in run.output(rank)
        assert "Traceback" not in run.output(rank)


def test_another_flag(ranks, small_corpus, tmp_path):
    sentence = "--update-freq [2], and rank 0 with [1]"
    check_refusal(ranks, tmp_path, [small_corpus] * 2, FLAGS, ["--update-freq", "2"], sentence)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_other_data(ranks, raw_corpus, data, tmp_path, split):
    """One sentence less, the same dictionary."""
    raw, less = shutil.copytree(raw_corpus, tmp_path / "raw"), tmp_path / "less"
    for side in ("src", "tgt"):
        lines = (raw / f"{split}.{side}").read_text().splitlines()[:-1]
        (raw / f"{split}.{side}").write_text("\n".join(lines) + "\n")
    preprocess(raw, less, "--joined-dictionary", "--srcdict", data[0] / "dict.src.txt")
    flags = [flag for flag in FLAGS if flag != "--disable-validation"]
    check_refusal(ranks, tmp_path, [data[0], less], flags, [], f"the data of {split} ")


def test_another_dictionary_of_the_same_size(ranks, data, tmp_path):
    check_refusal(ranks, tmp_path, data, FLAGS, [], "the source dictionary ")
