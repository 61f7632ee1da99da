"""A model per language pair, on fairseq's task ``multilingual_translation``."""

import functools
import re
import shutil

import pytest
import torch
from commands import PLUGIN, load, refused, run, smoe
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from handmade import LENGTHS
from sampling import soak
from test_several_processes import content
from test_training import log_lines

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models import SMoETransformerModel

PAIRS = ("aa-bb", "aa-cc", "bb-aa")
TASK = ("--task", "multilingual_translation", "--lang-pairs", ",".join(PAIRS), "--user-dir", PLUGIN)
TOKENS = ("--encoder-langtok", "tgt", "--decoder-langtok")
SHARED = ("--share-encoders", "--share-decoders", *TOKENS)
LAST = "checkpoint_last.pt"


def flags(data, save_dir, *more) -> list:
    return [
        *(data, *TASK, "--cpu", "--num-workers", 0, "--max-tokens", 400, "--dropout", 0),
        *("--arch", "smoe_multilingual_transformer_tiny", "--smoe-strata", "2-2"),
        *("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
        *("--moe-capacity-factor", 0, "--moe-second-expert-policy", "all"),
        *("--criterion", "smoe_label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--optimizer", "adam", "--adam-eps", 1e-4, "--lr", 0.01, "--max-update", 4),
        *("--no-epoch-checkpoints", "--save-dir", save_dir, "--log-format", "json"),
        *("--log-interval", 1, *more),
    ]


@pytest.fixture(scope="module")
def trained(three_languages, tmp_path_factory):
    """(process, checkpoint) of all parts by language, or of shared ones."""

    @functools.cache
    def get(*more):
        folder = tmp_path_factory.mktemp("pairs")
        return run("fairseq-train", *flags(three_languages, folder, *more)), folder / LAST

    return get


def languages_of(state: dict, side: str) -> dict:
    """By pair, the bits of a side's expert weights."""
    return {
        pair: state[f"models.{pair}.{side}.layers.1.moe.experts.w1"].numpy().tobytes()
        for pair in PAIRS
    }


def test_each_language_has_its_own(trained):
    process, checkpoint = trained()
    state = load(checkpoint)["model"]
    encoders, decoders = (languages_of(state, side) for side in ("encoder", "decoder"))
    assert encoders["aa-bb"] == encoders["aa-cc"] != encoders["bb-aa"]
    assert len(set(decoders.values())) == 3
    losses = [float(line["nll_loss"]) for line in log_lines(process)]
    assert losses[-1] < losses[0] - 0.3
    valid = log_lines(process, "valid")[-1]
    assert 1 <= float(valid["valid_decoder.layer.1/requested_capacity"]) <= 2
    assert float(valid["valid_moe_gate_loss"]) >= 0.9


def test_the_loss_is_the_sum_over_the_pairs(three_languages, trained):
    """Of validation, by a translation model of fairseq's own task for each pair, with the same weights."""
    process, checkpoint = trained()
    valid = log_lines(process, "valid")[-1]
    state = load(checkpoint)
    nats = tokens = gates = 0.0
    for pair in PAIRS:
        model, sentences = pair_model(three_languages, state, pair)
        for sample in sentences:
            with torch.no_grad():
                logits, extra = model(**sample["net_input"])
            target = sample["target"].view(-1)
            sums = torch.nn.functional.cross_entropy(
                logits.view(len(target), -1), target, ignore_index=1, reduction="sum"
            )
            nats, tokens = nats + float(sums), tokens + sample["ntokens"]
            balance = sum(float(stats.balance_loss) for stats in extra["moe_stats"]) / 2
            gates += sample["ntokens"] * balance
    assert tokens == float(valid["valid_ntokens"])
    bits = nats / tokens / torch.log(torch.tensor(2.0))
    assert float(bits) == pytest.approx(float(valid["valid_nll_loss"]), abs=1.1e-3)
    assert gates / tokens == pytest.approx(float(valid["valid_moe_gate_loss"]), abs=1.1e-3)


def built(arguments):
    """Task and model of these words of ``fairseq-train``."""
    parser, words = options.get_training_parser(), list(map(str, arguments))
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
    task = tasks.setup_task(cfg.task)
    return task, task.build_model(cfg.model)


def on_pair(arguments, pair: str) -> list:
    """The words for fairseq's task of one pair."""
    source, target = pair.split("-")
    at = arguments.index("--task")
    return [
        *(*arguments[:at], "--task", "translation", "-s", source, "-t", target),
        *arguments[at + 4 :],
    ]


def pair_model(data, state, pair):
    """``--arch smoe_transformer_tiny`` with the weights of one pair, and the validation in one batch."""
    task, model = built(on_pair(flags(data, "none", "--arch", "smoe_transformer_tiny"), pair))
    prefix = f"models.{pair}."
    own = {n.removeprefix(prefix): t for n, t in state["model"].items() if n.startswith(prefix)}
    model.eval().load_state_dict(own)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    return model, [dataset.collater([dataset[i] for i in range(len(dataset))])]


@pytest.mark.parametrize("more", [(), soak(SHARED)], ids=["own", "shared"])
def test_it_translates_each_pair(three_languages, trained, more):
    _, checkpoint = trained(*more)
    tokens = TOKENS if more else ()
    of_run = (three_languages, *TASK, *tokens, "--path", checkpoint, "--cpu")
    search = ("--num-workers", 0, "--gen-subset", "valid", "--beam", 2, "--max-len-b", 8)
    output = run("fairseq-generate", *of_run, "-s", "aa", "-t", "cc", *search).stdout
    assert len(re.findall(r"^H-\d+\t", output, re.MULTILINE)) == len(LENGTHS)
    told = run(
        *("fairseq-interactive", *of_run, "-s", "bb", "-t", "aa"),
        stdin="bb1 bb2\n",
    ).stdout
    assert re.search(r"^H-0\t", told, re.MULTILINE)


@pytest.mark.soak
def test_two_processes_equal_one(ranks, three_languages, tmp_path):
    """Each batch of two sentences in one process, or a sentence each."""
    one, two = tmp_path / "one", tmp_path / "two"
    more = ("--batch-size", 1, "--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo")
    more += ("--disable-validation", *SHARED)
    ranks.train(one, 1, *flags(three_languages, one, *more, "--update-freq", 2), one=True)
    ranks.train(two, 2, *flags(three_languages, two, *more))
    alone, both = content(one)["model"], content(two)["model"]
    assert alone.keys() == both.keys()
    for name, tensor in alone.items():
        assert torch.allclose(tensor, both[name], atol=2e-5), name


@pytest.mark.parametrize(
    "more",
    [
        *("--moe-balance-over update", "--moe-balance bias", "--expert-parallel"),
        "--freeze encodr",
    ],
)
def test_what_does_not_go_together_is_one_sentence(three_languages, more):
    with pytest.raises(UsageError, match=more):
        built(flags(three_languages, "none", *more.split()))


def test_frozen_parts_and_offloaded_activations(three_languages):
    more = ("--freeze", "encoder,embeddings", "--offload-activations")
    _, model = built(flags(three_languages, "none", *more))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    layers = [layer for part in model.models.values() for layer in part.decoder.layers]
    assert trained and all(".decoder.layer" in name for name in trained)
    assert all(hasattr(layer, "precheckpoint_forward") for layer in layers)


def test_another_model_on_its_task_is_refused(three_languages, tmp_path):
    arguments = flags(three_languages, tmp_path, "--arch", "smoe_transformer_tiny")
    refused(run("fairseq-train", *arguments, check=False), "--task multilingual_translation")


def test_on_another_task_it_is_refused(three_languages):
    with pytest.raises(UsageError, match="--arch smoe_multilingual_transformer"):
        built(on_pair(flags(three_languages, "none"), "aa-bb"))


def test_dictionaries_that_differ_share_nothing(three_languages, tmp_path):
    data = shutil.copytree(three_languages, tmp_path / "data")
    with open(data / "dict.cc.txt", "a") as file:
        file.write("more 1\n")
    with pytest.raises(UsageError, match="--share-all-embeddings: .* aa and cc"):
        built(flags(data, "none"))
    gate = ("--no-share-all-embeddings", "--smoe-strata", "4", "--moe-gate", "hash")
    state = built(flags(data, "none", *gate))[1].state_dict()
    sizes = {
        lang: len(state[f"models.{pair}.decoder.layers.1.moe.gates.0.table"])
        for pair, lang in (("aa-bb", "bb"), ("aa-cc", "cc"))
    }
    assert sizes["cc"] == sizes["bb"] + 1  # each by its own words


def test_what_needs_one_model_says_so(three_languages, trained, tmp_path):
    _, checkpoint = trained()
    with pytest.raises(UsageError, match="has a model per language pair"):
        SMoETransformerModel.from_pretrained(checkpoint, data_name_or_path=three_languages)
    command = ("analyze", three_languages, "--path", checkpoint, "--cpu", "--output")
    refused(smoe(*command, tmp_path / "new", check=False), checkpoint)


def test_a_back_end_that_would_not_sum_gradients_is_refused(ranks, three_languages, tmp_path):
    """It is fairseq's default, and on a CPU each process would train a model of its own without a word."""
    arguments = flags(three_languages, tmp_path / "run", "--distributed-backend", "gloo")
    said = "--ddp-backend pytorch_ddp with a model per language pair: "
    ranks.start(tmp_path, 2, *arguments).refused(said)


@pytest.mark.soak
def test_resuming_goes_on(three_languages, trained, tmp_path):
    for updates in (2, 4):
        run("fairseq-train", *flags(three_languages, tmp_path, "--max-update", updates))
    whole, parts = (content(folder)["model"] for folder in (trained()[1].parent, tmp_path))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
