"""A language model by the commands as a user types them, on English sentences."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import PLUGIN, load, refused, run, run_python, smoe
from handmade import read
from test_compat import run_without
from test_cost import cost
from test_expert_parallel import compare
from test_lock import GLOO
from test_multilingual_transformer import built
from test_training import log_lines

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models import SMoETransformerLanguageModel, SMoETransformerModel

UPDATES = 60
SIZES = "--decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --smoe-strata 2-2 --tokens-per-sample 48"
LAST = "checkpoint_last.pt"


def flags(data, save_dir, *more) -> list:
    return [
        *(data, "--task", "language_modeling", "--user-dir", PLUGIN, "--cpu", "--num-workers", 0),
        *("--arch", "smoe_transformer_lm_tiny", *SIZES.split(), "--max-tokens", 400),
        *("--criterion", "smoe_label_smoothed_cross_entropy", "--optimizer", "adam", "--lr", 0.01),
        *("--max-update", UPDATES, "--no-epoch-checkpoints", "--save-dir", save_dir),
        *("--log-format", "json", "--log-interval", 1, *more),
    ]


@pytest.fixture(scope="module")
def trained(english, tmp_path_factory) -> SimpleNamespace:
    """A run, what it logged, and what fairseq-eval-lm says of it."""
    folder = tmp_path_factory.mktemp("trained")
    process = run("fairseq-train", *flags(english, folder))
    losses = [float(line["nll_loss"]) for line in log_lines(process)]
    valid, scored = log_lines(process, "valid")[-1], eval_lm(english, folder / LAST)
    return SimpleNamespace(checkpoint=folder / LAST, losses=losses, valid=valid, scored=scored)


def of_eval_lm(data, checkpoint) -> list:
    words = [data, "--user-dir", PLUGIN, "--path", checkpoint, "--cpu", "--gen-subset", "valid"]
    return [*words, "--tokens-per-sample", 48, "--num-workers", 0]


def eval_lm(data, checkpoint, *more) -> tuple[float, float, int]:
    """Loss, perplexity and number of tokens."""
    return evaluated(run("fairseq-eval-lm", *of_eval_lm(data, checkpoint), *more).stdout)


def evaluated(output: str) -> tuple[float, float, int]:
    found = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", output)
    tokens = int(re.search(r"Evaluated (\d+) tokens", output)[1])
    return float(found[1]), float(found[2]), tokens


def test_it_learns_and_eval_lm_agrees_with_validation(english, trained):
    """An even guess of 400 and more words is above 8.6 bits."""
    assert trained.losses[0] > 8.5 and trained.losses[-1] < 5.5
    loss, perplexity, tokens = trained.scored
    assert perplexity == pytest.approx(float(trained.valid["valid_ppl"]), abs=0.011)
    assert loss == pytest.approx(float(trained.valid["valid_nll_loss"]), abs=0.0011)
    assert tokens == len(valid_tokens(english))
    assert 1 <= float(trained.valid["valid_requested_capacity"]) <= 2
    assert "valid_decoder.layer.1/requested_capacity" in trained.valid


def test_the_first_of_several_ranks_evaluates_the_whole_text(ranks, english, trained, tmp_path):
    words = of_eval_lm(english, trained.checkpoint)
    of_two = ranks.start(tmp_path, 2, *words, command="fairseq-eval-lm").finish()
    assert evaluated(of_two.output(0)) == trained.scored


@pytest.mark.parametrize(
    "sizes, flag",
    [
        (("--tokens-per-sample", 512), "--tokens-per-sample 512"),
        (("--tokens-per-sample", 48, "--context-window", 48), "--context-window 48"),
    ],
)
def test_eval_lm_scores_the_whole_text_or_nothing(english, trained, sizes, flag):
    command = ["fairseq-eval-lm", english, "--user-dir", PLUGIN, "--cpu", "--num-workers", 0]
    refused(run(*command, "--path", trained.checkpoint, *sizes, check=False), flag)


@pytest.mark.soak
def test_a_program_that_calls_eval_lm_is_warned(english, trained):
    words = [english, "--path", trained.checkpoint, "--tokens-per-sample", 512, "--cpu"]
    words += ["--user-dir", PLUGIN]
    program = f"""
from fairseq import options
from fairseq_cli import eval_lm
words = {[str(word) for word in words]!r}
eval_lm.main(options.parse_args_and_arch(options.get_eval_lm_parser(), words))
"""
    result = run_python(program)
    assert result.returncode == 0 and "--tokens-per-sample 512" in result.stdout


def test_a_language_model_is_not_validated_by_translations(english, tmp_path):
    arguments = flags(english, tmp_path, "--validate-sentences", 5)
    refused(run("fairseq-train", *arguments, check=False), "--validate-sentences")


def valid_tokens(data) -> list[int]:
    from fairseq.data import data_utils

    sentences = data_utils.load_indexed_dataset(str(data / "valid"), None)
    return [token for i in range(len(sentences)) for token in sentences[i].tolist()]


def model_of(checkpoint, **overrides):
    return SMoETransformerLanguageModel.from_pretrained(checkpoint, **overrides)


def test_a_language_model_translates_nothing(trained):
    with pytest.raises(UsageError, match="SMoETransformerLanguageModel"):
        SMoETransformerModel.from_pretrained(trained.checkpoint)


def test_a_translation_model_is_no_language_model(two_updates):
    with pytest.raises(UsageError, match=f"{two_updates} is no language model"):
        model_of(two_updates)


TALK = ("--task", "language_modeling", "--user-dir", PLUGIN, "--cpu", "--beam", 1, "--nbest", 1)


@pytest.mark.soak
def test_sampling_by_interactive(english, trained):
    """The prompt is gone on with, the same way with the same seed."""
    command = ["fairseq-interactive", english, *TALK, "--path", trained.checkpoint]
    command += ["--sampling", "--sampling-topk", 8, "--max-len-b", 8]

    def said(seed):
        output = run(*command, "--seed", seed, stdin="The\nWill you\n").stdout
        return re.findall(r"^H-\d+\t\S+\t(.*)$", output, re.MULTILINE)

    first = said(1)
    assert [line.split()[0] for line in first] == ["The", "Will"]
    assert all(len(line.split()) > 2 for line in first)
    assert said(1) == first != said(2)


@pytest.mark.soak
def test_without_numpy_mend_one_sentence_per_sample_does_not_train(english, tmp_path):
    arguments = [*flags(english, tmp_path, "--sample-break-mode", "eos")]
    result = run_without("keep_long", "fairseq-train", *arguments)
    assert result.returncode and "np.compat" in result.stdout


@pytest.mark.soak
def test_sharded_experts_on_two_processes_equal_one(ranks, english, tmp_path):
    """And what is made of their checkpoints: one, means, costs, perplexity."""
    alone = ("--moe-capacity-factor", 0, "--moe-second-expert-policy", "all", "--dropout", 0)
    modes = ("--sample-break-mode", "eos")
    alone += ("--max-update", 4, "--adam-eps", 1e-4, *GLOO, "--disable-validation", *modes)
    # One sentence per batch: the balance loss is of each batch by itself.
    alone += ("--batch-size", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    ranks.train(one, 1, *flags(english, one, *alone, "--update-freq", 2), one=True)
    more = ("--save-interval-updates", 2)
    ranks.train(two, 2, *flags(english, two, *alone, *more, "--expert-parallel"))
    compare(two, one, logged=1e-5, parameters=2e-5)
    smoe("consolidate", two / LAST, "--output", tmp_path / "whole.pt")
    smoe("average", two, "--last", 2, "--output", tmp_path / "mean.pt")
    whole = load(tmp_path / "whole.pt")["model"]
    assert whole["decoder.layers.1.moe.experts.w1"].shape[0] == 4
    perplexities = [eval_lm(english, p, *modes)[1] for p in (tmp_path / "whole.pt", one / LAST)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)
    assert eval_lm(english, tmp_path / "mean.pt", *modes)[1] < 600
    found = cost("--path", tmp_path / "whole.pt")
    assert found["parameters"] == sum(
        t.numel()
        for n, t in whole.items()
        if not n.endswith(("version", "_float_tensor", "output_projection.weight"))
    )


@pytest.mark.parametrize("given", ["--past-target", "--output-dictionary-size 50"])
def test_bad_flags_end_before_training(english, given):
    with pytest.raises(UsageError, match=given):
        built(flags(english, "none", *given.split()))


def test_a_model_with_an_encoder_is_refused(english, tmp_path):
    arguments = flags(english, tmp_path / "new", "--arch", "smoe_transformer_tiny")
    refused(run("fairseq-train", *arguments, check=False), "--task language_modeling")


def test_fewer_words_to_predict_are_counted(english, tmp_path):
    """--decoder-embed-dim 32, of which the output projection has 50."""
    more = ("--output-dictionary-size", 50, "--no-share-decoder-input-output-embed")
    run("fairseq-train", *flags(english, tmp_path, *more, "--max-update", 1))
    state = load(tmp_path / LAST)["model"]
    words = len(state["decoder.embed_tokens.weight"])
    found = cost("--path", tmp_path / LAST)
    assert found["flops"]["output"] == 2 * 50 * 32 and found["flops"]["embedding"] == 2 * words * 32


# What the experts do


@pytest.fixture(scope="module")
def analysis(english, trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("analysis") / "results"
    command = ("smoe", "analyze", english, "--path", trained.checkpoint, "--cpu")
    run(*command, "--output", folder, "--min-count", 1)
    return folder


def test_analysis_counts_every_token(english, trained, analysis):
    """As often as it is given, and together as often as validation has logged it."""
    tokens, blocks = read(analysis / "tokens.csv"), read(analysis / "blocks.csv")
    assert {(row["direction"], row["side"], row["layer"]) for row in tokens} == {
        ("text", "decoder", "1")
    }
    from fairseq.data import Dictionary

    words = Dictionary.load(str(english / "dict.txt"))
    stream = valid_tokens(english)
    # A sample is given the token before it, the first one </s>, and not its own last one.
    given = Counter(words[token] for token in [words.eos(), *stream[:-1]])
    assert {row["token"]: int(row["occurrences"]) for row in tokens} == given
    stops = sum(int(row["stops"]) for row in blocks)
    logged = float(trained.valid["valid_requested_capacity"])
    assert stops / len(stream) == pytest.approx(logged, abs=1e-3)
    assert all(row["frequency_rank"] for row in tokens if row["kind"] == "text")


def test_what_has_no_languages_is_left_out_with_a_line(analysis):
    drawn = {path.stem for path in analysis.glob("*.png")}
    assert drawn == {"flow", "frequency", "load", "sentence"}  # one MoE layer, nothing dropped
    assert "the picture by direction: " in (analysis / "report.html").read_text()
    assert json.loads((analysis / "run.json").read_text())["sentences"] == {"text": 7}


@pytest.mark.parametrize(
    "more, named",
    [(["--lang-pairs", "a-b"], "--lang-pairs a-b"), (["--gen-subset", "valid9"], "valid9.bin")],
)
def test_what_does_not_apply_is_one_sentence(english, trained, tmp_path, more, named):
    command = ("analyze", english, "--path", trained.checkpoint, "--cpu", *more)
    refused(smoe(*command, "--output", tmp_path / "out", check=False), named)
    assert not (tmp_path / "out").exists()


def test_costs_by_hand():
    """Of 6 layers, 3 with 8 experts in two strata, of which a token uses 2 x 1.5."""
    found = cost("--arch", "smoe_transformer_lm_base", "--vocab-size", 9000)
    dim, ffn, words, layers = 512, 2048, 9000, 6
    assert found["flops"] == {
        "attention": 2 * layers * 4 * dim**2,
        "ffn": 2 * 3 * 2 * dim * ffn,
        "experts": 2 * 3 * 2 * 1.5 * 2 * dim * ffn,
        "embedding": 2 * words * dim,
        "output": 2 * words * dim,
        "context": layers * 2 * 512 * dim,
    }
    untied = ("--no-share-decoder-input-output-embed", "--world-size", 2)
    assert cost("--arch", "smoe_transformer_lm_tiny", *untied)["processes"]["sharded"]


def test_a_pruned_model_is_one_again(english, trained, tmp_path):
    """Its settings speak of no encoder, with which it could not be opened."""
    output = tmp_path / "pruned.pt"
    words = ("--keep", 0.5, "--sentences", 5, "--cpu", "--output", output)
    smoe("prune", trained.checkpoint, english, *words)
    command = ("fairseq-eval-lm", english, "--user-dir", PLUGIN, "--path", output, "--cpu")
    command += ("--tokens-per-sample", 48)
    assert "Perplexity" in run(*command).stdout
