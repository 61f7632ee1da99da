"""Budget and exit bias on the built-in corpus, as a user trains and translates."""

import re
from pathlib import Path

import pytest
from commands import PLUGIN, run
from test_recipes import recipe

pytestmark = pytest.mark.soak
SMALL = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "64", "--max-tokens", "1000"),
    *("--max-update", "120", "--warmup-updates", "20"),
]
LANGUAGES = "eng,nso,msa,tgl,cat"


def trained(folder: Path, method: str, *flags) -> Path:
    """A checkpoint of the recipe; its log is beside it."""
    given = {"OMP_NUM_THREADS": "1", "GPUS": "0"}
    process = recipe(folder, "train", "phrasebook", method, *flags, **given)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return folder / "runs/phrasebook" / method / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def budgeted(phrasebook) -> Path:
    """A small model, shortly trained with a budget of 1.5 of four strata."""
    return trained(phrasebook, "smoe-2-2-2-2", *SMALL, "--smoe-capacity-budget", "1.5")


def requested_in_validation(checkpoint: Path) -> float:
    log = checkpoint.with_name("train.log").read_text()
    return float(re.findall(r"valid on.*? requested_capacity ([\d.]+)", log)[-1])


def test_budget_is_met_within_five_percent(budgeted):
    """Uniform routing would ask for 2.08 strata."""
    assert requested_in_validation(budgeted) == pytest.approx(1.5, rel=0.05)
    assert "smoe_budget_loss=" in budgeted.with_name("train.log").read_text()


@pytest.mark.parametrize("method, budget", [("smoe-2-2-2-2", "1.5")])
def test_budget_is_met_by_the_recipe_as_it_is(phrasebook, tmp_path, method, budget):
    for part in ("data", "runs"):
        (tmp_path / part).mkdir()
    (tmp_path / "data/phrasebook").symlink_to(phrasebook / "data/phrasebook")
    checkpoint = trained(tmp_path, method, "--smoe-capacity-budget", budget)
    assert requested_in_validation(checkpoint) == pytest.approx(float(budget), rel=0.05)


def generated(phrasebook, checkpoint, *more) -> list[str]:
    """What is translated of the validation set, score and words, in order of the sentences."""
    words = [phrasebook / "data/phrasebook/bin", "--user-dir", PLUGIN, "--path", checkpoint]
    words += ["--task", "translation_multi_simple_epoch", "--encoder-langtok", "tgt"]
    words += ["--langs", LANGUAGES, "--lang-pairs", "eng-cat", "-s", "eng", "-t", "cat", "--cpu"]
    words += ["--gen-subset", "valid", "--beam", 2, "--max-len-b", 20]
    words += ["--remove-bpe", "sentencepiece", *more]
    return sorted(re.findall(r"^H-.*", run("fairseq-generate", *words).stdout, re.MULTILINE))


def test_one_model_translates_with_any_bias(phrasebook, budgeted):
    """By --model-overrides: one line for each sentence, and 0 changes no score."""

    def with_bias(bias):
        return generated(
            *(phrasebook, budgeted, "--model-overrides", f"{{'smoe_exit_bias': {bias}}}")
        )

    plain = generated(phrasebook, budgeted)
    zero, large, most = map(with_bias, ("0", "5.0", "1e999"))
    assert plain == zero
    for lines in (plain, large, most):
        assert len({line.split("\t")[0] for line in lines}) == len(lines) == 100
    assert large != plain
