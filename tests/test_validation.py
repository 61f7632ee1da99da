"""Validation by translations: scores in the log, the best checkpoint by them, early stopping that resumes."""

import importlib.util
import json

import handmade
import pytest
import torch
from commands import PLUGIN, WITH_PLUGIN, hypotheses, load, run, run_python, succeeded
from sacrebleu.metrics import BLEU, CHRF
from sampling import soak

from smoe_fairseq.training import translations

BY_CHRF = ("--best-checkpoint-metric", "chrf", "--maximize-best-checkpoint-metric")
JAPANESE = "ja-mecab" if importlib.util.find_spec("MeCab") else "char"
SIZES = """--arch smoe_transformer_tiny --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 32 --smoe-strata 2-2 --criterion smoe_label_smoothed_cross_entropy
    --optimizer adam --lr 0.01 --max-tokens 400 --no-epoch-checkpoints --num-workers 0 --cpu
    --log-format json --log-interval 10 --no-share-all-embeddings""".split()


def bilingual(data, folder, *flags, check=True):
    words = ["--user-dir", PLUGIN, *SIZES, "--save-dir", folder, *flags]
    return run("fairseq-train", data, *words, check=check)


def validations(output: str) -> list[dict]:
    found = (line[line.index("{") :] for line in output.splitlines() if '"valid_loss": ' in line)
    return [json.loads(line) for line in found]


@pytest.mark.parametrize("language, tokenizer", [("tgt", "13a"), ("th", "char"), ("ja", JAPANESE)])
def test_tokens_of_a_language_without_spaces(language, tokenizer):
    """As of any text into the language, but without MeCab by letters."""
    bleu = translations._metrics(language)["bleu"]
    bleu.corpus_score(["a b"], [["a b"]])
    assert f"tok:{tokenizer}" in bleu.get_signature().format()


def test_scores_are_those_of_fairseqs_own_translations(corpus, tmp_path):
    trained = bilingual(corpus, tmp_path, "--max-update", 20, "--validate-sentences", 9, *BY_CHRF)
    last = validations(trained.stdout)[-1]
    words = ["--path", tmp_path / "checkpoint_last.pt", "--user-dir", PLUGIN, "--cpu", "--beam", 1]
    said = run("fairseq-generate", corpus, *words, "--gen-subset", "valid").stdout
    references = dict(line[2:].split("\t") for line in said.splitlines() if line.startswith("T-"))
    found = hypotheses(said)
    texts = [found[i][1] for i in range(9)]
    references = [references[str(i)] for i in range(9)]
    chrf = CHRF(word_order=2).corpus_score(texts, [references]).score
    assert float(last["valid_chrf"]) == pytest.approx(chrf, abs=2e-3)
    bleu = BLEU().corpus_score(texts, [references]).score
    assert float(last["valid_bleu"]) == pytest.approx(bleu, abs=2e-3)
    best = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    scores = [float(each["valid_chrf"]) for each in validations(trained.stdout)]
    assert best["extra_state"]["best"] == pytest.approx(max(scores), abs=2e-3)


@pytest.mark.parametrize("more", [BY_CHRF, ["--lang-tok-replacing-bos-eos"]])
def test_scores_of_all_directions(three_languages, tmp_path, more):
    flags = (*handmade.MULTILINGUAL, "--decoder-langtok", "--validate-sentences", 3, *more)
    handmade.train(three_languages, tmp_path, *flags)
    found = validations((tmp_path / "train.log").read_text())
    assert found and all(0 <= float(each["valid_chrf"]) <= 100 for each in found)
    assert (tmp_path / "checkpoint_best.pt").exists()


@pytest.mark.soak
def test_early_stopping_ends_a_run_and_goes_on_counting(corpus, tmp_path):
    """The rate is 0 after the first epoch, so that nothing gets better."""
    flags = ["--validate-sentences", 4, *BY_CHRF, "--patience", 3]
    flags += ["--lr", 1e-9, "--max-epoch", 20, "--save-interval-updates", 100]
    whole = bilingual(corpus, tmp_path / "whole", *flags)
    assert "early stop since valid performance hasn't improved for last 3 runs" in whole.stdout
    assert len(validations(whole.stdout)) == 4
    first = bilingual(corpus, tmp_path / "parts", *flags, "--max-epoch", 2)
    assert len(validations(first.stdout)) == 2
    rest = bilingual(corpus, tmp_path / "parts", *flags)
    assert "early stop" in rest.stdout and len(validations(rest.stdout)) == 2
    again = bilingual(corpus, tmp_path / "parts", *flags)
    assert "--patience 3: nothing" in again.stdout and not validations(again.stdout)


@pytest.mark.parametrize(
    "first, then, worse",
    [
        (("valid_chrf", *BY_CHRF), ("valid_bleu", "--best-checkpoint-metric", "bleu"), -1),
        soak(("valid_loss", "--label-smoothing", 0.9), ("valid_loss", "--label-smoothing", 0), 1),
    ],
)
def test_another_metric_forgets_the_best_number_of_the_first(corpus, tmp_path, first, then, worse):
    flags = ["--validate-sentences", 4, "--patience", 1, "--lr", 1e-9, *first[1:]]
    (before,) = validations(bilingual(corpus, tmp_path, *flags, "--max-epoch", 1).stdout)
    flags += ["--max-epoch", 2, *then[1:]]
    (found,) = validations(bilingual(corpus, tmp_path, *flags).stdout)
    assert worse * float(found[then[0]]) > worse * float(before[first[0]])
    best = load(tmp_path / "checkpoint_best.pt")["extra_state"]["best"]
    assert best == pytest.approx(float(found[then[0]]), abs=1e-2)


TWICE = """
import signal, sys
from fairseq_cli.train import cli_main
folder, *words = sys.argv[1:]
before = signal.getsignal(signal.SIGINT)
for rate in ("0.01", "1e-9"):
    sys.argv[1:] = [*words, "--lr", rate, "--save-dir", f"{folder}/{rate}"]
    cli_main()
    assert signal.getsignal(signal.SIGINT) is before
"""


def test_two_trainings_in_one_program_know_nothing_of_each_other(corpus, tmp_path):
    """The second has a best checkpoint, though the first had a lower loss; then Ctrl-C is the program's."""
    words = [corpus, "--user-dir", PLUGIN, *SIZES, "--max-epoch", 1]
    succeeded(run_python(TWICE, tmp_path, *words, server=WITH_PLUGIN))
    first, second = (
        load(tmp_path / rate / "checkpoint_best.pt")["extra_state"]["best"]
        for rate in ("0.01", "1e-9")
    )
    assert first < second - 0.1


@pytest.mark.soak
@pytest.mark.parametrize(
    "flag, others",
    [
        ("--finetune-from-model", ()),
        ("--restore-file", ("--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader")),
    ],
)
def test_early_stopping_counts_anew_where_training_begins_anew(corpus, tmp_path, flag, others):
    """As fairseq's best score does: the numbers before may be of other data."""
    flags = ["--validate-sentences", 4, *BY_CHRF, "--patience", 1, "--lr", 1e-9]
    flags += ["--max-epoch", 9]
    bilingual(corpus, tmp_path / "first", *flags)
    checkpoint = tmp_path / "first" / "checkpoint_last.pt"
    tuned = bilingual(corpus, tmp_path / "tuned", *flags, flag, checkpoint, *others)
    assert "early stop" in tuned.stdout and len(validations(tuned.stdout)) == 2


@pytest.mark.soak
@pytest.mark.parametrize("sharded", [False, True])
def test_several_ranks_have_the_scores_of_one(corpus, tmp_path, ranks, sharded):
    """The replicated ones share the sentences, the sharded ones all translate all of them."""
    flags = ["--validate-sentences", 9, "--max-update", 6]
    flags += ["--expert-parallel"] * sharded
    words = [corpus, "--user-dir", PLUGIN, *SIZES, "--ddp-backend", "legacy_ddp", *flags]
    words += ["--distributed-backend", "gloo", "--save-dir", tmp_path]
    (two,) = validations(ranks.train(tmp_path, 2, *words).output(0))[-1:]
    # The same weights in one process: nothing is trained, it only validates at the end.
    checkpoint = tmp_path / "checkpoint_last.pt"
    if sharded:
        whole = tmp_path / "whole.pt"
        run("smoe", "consolidate", checkpoint, "--output", whole)
        checkpoint = whole
    restart = ["--restore-file", checkpoint, "--reset-optimizer", "--reset-lr-scheduler"]
    restart += ["--reset-dataloader", "--reset-meters", "--lr", 1e-30, "--max-update", 1]
    one = bilingual(corpus, tmp_path / "one", "--validate-sentences", 9, *restart)
    (one,) = validations(one.stdout)[-1:]
    for name in ("valid_chrf", "valid_bleu"):
        assert float(two[name]) == pytest.approx(float(one[name]), abs=0.02)
