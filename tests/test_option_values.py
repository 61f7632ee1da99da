"""fairseq's own options with values that it takes unseen, and data that is not what its index says."""

import logging
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import PLUGIN, TINY, generation, refused, run, sentence_of
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils
from sampling import soak
from test_criterion import make_criterion

import smoe_fairseq.training.launch  # noqa: F401  (as --user-dir does)

CHRF = "--best-checkpoint-metric chrf"
SAMPLED = (
    "--task translation_multi_simple_epoch --langs src,tgt --lang-pairs src-tgt "
    "--sampling-method temperature"
)
BEFORE_THE_DATA = f"""
    --batch-size 9223372036854775808
    --seed 4294967296
    --num-workers -1
    --log-interval 0
    --adam-betas (1,2)
    --adam-betas x
    --update-freq 1,-1
    --update-freq []
    --lr []
    --optimizer adamax --adamax-betas 5
    --optimizer-overrides 3
    --optimizer-overrides {{a:1}}
    --optimizer-overrides {{1:0.1}}
    --eval-bleu-args [1]
    --distributed-world-size 0
    --max-tokens -1
    --validate-interval 0
    --save-interval 0
    --clip-norm nan
    --warmup-updates -5
    --warmup-updates 0
    --restore-file none/nope.pt
    --restore-file .
    --finetune-from-model .
    --best-checkpoint-metric bleu
    {SAMPLED} --maximize-best-checkpoint-metric --best-checkpoint-metric bleu
    {SAMPLED} --sampling-temperature -1
"""  # the last flag is named
BAD = {line.strip(): [line.split()[-2]] for line in BEFORE_THE_DATA.strip().splitlines()}
if not torch.cuda.device_count():  # of which fairseq starts a process each
    BAD["--distributed-init-method tcp://127.0.0.1:1"] = ["--distributed-init-method"]
    BAD["--distributed-world-size 9000"] = ["--distributed-world-size"]
    BAD["--distributed-world-size 2 --distributed-port 99"] = ["--distributed-port"]
BAD["--cpu --fp16"] = ["--fp16"]
BAD["--save-dir="] = ["--save-dir"]  # of an unset variable
BAD["--valid-subset valid,train --combine-valid-subsets"] = ["--valid-subset valid,train"]
BAD["--write-checkpoints-asynchronously"] = ["iopath"]  # fairseq would train nothing, with success
BAD[f"{CHRF} --maximize-best-checkpoint-metric"] = [CHRF, "--validate-sentences"]
BAD["--report-accuracy --best-checkpoint-metric accuracy"] = ["--maximize-best-checkpoint-metric"]

OTHER_CRITERION = "--arch smoe_transformer_tiny --no-share-all-embeddings --smoe-strata 4-4"
CRITERION = "--criterion smoe_label_smoothed_cross_entropy"
OURS = f"{OTHER_CRITERION} {CRITERION}"
SHARDED = "--ddp-backend fully_sharded"
BAD |= {  # with another criterion
    f"{OTHER_CRITERION} --criterion masked_lm": ["--criterion masked_lm", CRITERION],
    f"{OTHER_CRITERION} --moe-balance bias": ["--moe-balance bias", CRITERION],
    f"{OTHER_CRITERION} --moe-gate threshold": ["--moe-gate threshold", CRITERION],
    f"{OTHER_CRITERION} --moe-balance-over update": ["--moe-balance-over update", CRITERION],
    f"{OTHER_CRITERION} --smoe-capacity-budget 1.5": ["--smoe-capacity-budget", CRITERION],
}
BAD |= {  # weights of losses that the model does not have
    f"{OURS} --moe-entropy-loss-wt 1.0": ["--moe-entropy-loss-wt 1.0", "--moe-gate top-p"],
    f"{OURS} --cmr-gate-loss-p 0.2": ["--cmr-gate-loss-p 0.2", "--moe-cmr"],
    f"{OURS} --cmr-gate-loss-wt 0.2": ["--cmr-gate-loss-wt 0.2", "--moe-cmr"],
    f"{OURS} --smoe-capacity-budget-wt 9.0": ["--smoe-capacity-budget-wt 9.0"],
    f"{OURS} --validate-sentences 5 {CHRF}": [CHRF, "--maximize-best-checkpoint-metric"],
    f"{OURS} {SHARDED}": [SHARDED],
    f"{OURS} --moe-freq 0 --decoder-moe-freq 2 {SHARDED}": [SHARDED],
}


def begin(folder: Path, *flags: str) -> None:
    """What ``fairseq-train`` does before it reads data, in this process."""
    words = ["data", "--save-dir", folder, *TINY, "--distributed-world-size", 1, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, words)))
    with mock.patch.object(logging.FileHandler, "handleError"):  # which it changes
        utils.call_main(convert_namespace_to_omegaconf(args), lambda cfg: None)


@pytest.mark.parametrize("given", BAD)
def test_a_bad_value_is_named_before_any_work(tmp_path, given):
    sentence = sentence_of(begin, tmp_path, *given.split())
    assert all(named in sentence for named in BAD[given])


@pytest.mark.parametrize("saved", ["checkpoint_last.pt", "checkpoint_last-rank-0.pt"])
def test_a_run_needs_what_it_began_with_only_once(tmp_path, saved):
    words = ("--continue-once", tmp_path / "gone.pt")
    assert "gone.pt" in sentence_of(begin, tmp_path, *words)
    (tmp_path / saved).touch()
    begin(tmp_path, *words)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"subword_sampling": 1.5}, "--subword-sampling 1.5"),
        ({"moe_losses": "moe_gate_loss=5"}, "--moe-gate-loss-wt"),
        ({"validate_sentences": -1}, "--validate-sentences -1"),
        ({"validate_beam": 0}, "--validate-beam 0"),
    ],
)
def test_a_bad_value_of_the_criterion_is_named(given, named):
    assert named in sentence_of(make_criterion, **given)


OF_COMMANDS = {  # what fairseq would ignore, or would end in an error of another kind
    "fairseq-generate": {
        "--shard-id 1": "--shard-id 1",
        "--constraints": "--constraints",
        "--print-step": "--print-step",
        "--score-reference --task multilingual_translation --lang-pairs src-tgt": "--score-reference",
        "--match-source-len --diversity-rate 0.5": "--match-source-len and --diversity-rate",
        "--max-source-positions 1 --skip-invalid-size-inputs-valid-test": "--gen-subset test",
    },
    "fairseq-interactive": {
        "--lm-path lm.pt": "--lm-path",
        "--bpe sentencepiece": "--sentencepiece-model",
    },
    "fairseq-train": {
        "--max-update -1": "--max-update",
        f"--user-dir {PLUGIN} {OURS} --max-tokens-valid 2": "--max-tokens-valid 2",
        f"--user-dir {PLUGIN} {OURS} --subword-sampling 0.1": "spm.model",
        f"{SAMPLED} --sampling-weights {{'src-tgt':1}}": "--sampling-weights",
        "--lr-scheduler polynomial_decay": "--total-num-update",
        "-a=smoe_transformer": "$(smoe path)",
        f"--user-dir {PLUGIN} --arch smoe_transformr": "smoe_transformer?",
    },
}
CASES = [(p, given, named) for p, each in OF_COMMANDS.items() for given, named in each.items()]
LONG = {
    **{"--arch transfomer": "--arch", "--arch transformer_lm": "--arch"},
    **{"--task multilingual_translation": "--task", "--finetune-from-model /none.pt": "/none.pt"},
    **{"--max-tokens 3": "--max-tokens 3", "--user-dir /none": "/none"},
    **{"--train-subset nope": "nope", "--log-file /proc/none/log": "/proc/none/log"},
    f"--quantization-config-path {__file__}": __file__,  # no YAML
}
if not torch.cuda.device_count():
    LONG["--profile"] = "--profile"
CASES += [soak("fairseq-train", given, named) for given, named in LONG.items()]


@pytest.mark.parametrize("program, given, named", CASES)
def test_a_bad_value_is_named(corpus, post_norm, tmp_path, program, given, named):
    words = [*generation(corpus, post_norm), "--user-dir", PLUGIN]
    if program == "fairseq-train":
        words = [corpus, "--save-dir", tmp_path / "run", *TINY]
    refused(run(program, *words, *given.split(), check=False, stdin="a b\n"), named)
    assert not list((tmp_path / "run").glob("*.pt"))


@pytest.mark.parametrize(
    "given, named",
    [
        ("--encoder-layer 1", "--encoder-layers"),
        ("--lr 0,002", "--lr 0,002"),
        ("--share-decoder-input-output-embed 0", "--share-decoder-input-output-embed 0"),
    ],
)
def test_a_flag_that_cannot_be_parsed_is_named(monkeypatch, capsys, given, named):
    words = ["data", *TINY, *given.split()]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
    with pytest.raises(SystemExit) as ended:
        options.parse_args_and_arch(options.get_training_parser(), words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and named in said.splitlines()[-1] and len(said) < 500


@pytest.mark.parametrize(
    "given, named",
    [
        ("{'smoe_exit_bais': 0.5}", "smoe_exit_bais"),
        ("{'moe_top_p': 0.5}", "moe_top_p"),
        ("not a dict", "not a dict"),
    ],
)
def test_overrides_that_change_nothing_are_named(corpus, post_norm, sparse, given, named):
    model = sparse if named == "moe_top_p" else post_norm
    words = [*generation(corpus, model), "--user-dir", PLUGIN, "--model-overrides", given]
    refused(run("fairseq-generate", *words, check=False), f"--model-overrides {named}")
    if named == "smoe_exit_bais":
        words = ["--path", post_norm, *words[words.index("--cpu") :], "--max-tokens", 300]
        refused(run("fairseq-validate", corpus, *words, check=False), f"--model-overrides {named}")


def test_validation_may_name_our_criterion(small_corpus, sparse):
    words = ["--path", sparse, "--user-dir", PLUGIN, "--cpu", "--max-tokens", 300]
    run(
        "fairseq-validate", small_corpus, *words, "--criterion", "smoe_label_smoothed_cross_entropy"
    )


def test_dropout_that_would_be_retained_in_part_is_refused(small_corpus, sparse):
    words = [*generation(small_corpus, sparse), "--user-dir", PLUGIN, "--retain-dropout"]
    refused(run("fairseq-generate", *words, check=False), "--retain-dropout: ")


def test_experts_without_a_balance_loss_are_told_of(tmp_path, caplog):
    for freq, count in (("0", 0), ("2", 1)):
        begin(tmp_path, *OTHER_CRITERION.split()[:3], "--moe-freq", freq)
        assert caplog.text.count("has no loss for load balance") == count


def test_a_weight_without_its_loss_is_told_of(tmp_path, caplog):
    for flag, more, is_told in (
        ("--moe-gate-loss-wt 0.3", "--moe-gate relu", True),
        ("--moe-gate-loss-wt 0.3", "--moe-gate topk", False),
        ("--moe-z-loss-wt 0.3", "--moe-gate hash", True),
        ("--moe-z-loss-wt 0.3", "--moe-gate relu", False),
        ("--moe-entropy-loss-wt 0.3", "--moe-freq 0", True),
    ):
        caplog.clear()
        begin(tmp_path, *OURS.split(), "--smoe-strata", "4", *flag.split(), *more.split())
        assert (f"{flag} has no effect" in caplog.text) == is_told, caplog.text


def test_a_stack_trace_can_be_asked_for(corpus, tmp_path):
    wrong = ("--encoder-attention-heads", 3)  # an assertion of fairseq
    command = ("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, *wrong)
    quiet = run(*command, check=False).stdout
    assert "Traceback" not in quiet and "SMOE_DEBUG=1" in quiet.splitlines()[-1]
    result = run(*command, check=False, SMOE_DEBUG="1")
    assert result.returncode == 1 and "Traceback (most recent call last)" in result.stdout
    assert result.stdout.splitlines()[-1] == quiet.splitlines()[-1]


@pytest.mark.parametrize("error", ["TypeError", "RuntimeError"])
def test_the_stack_trace_is_always_in_the_log(corpus, tmp_path, error):
    """Such as that of a criterion of the user's; only one of these kinds may be bad input."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text(f"""
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import *
@register_criterion("mine", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class Mine(LabelSmoothedCrossEntropyCriterion):
    def forward(self, *arguments, **options):
        raise {error}("mine")
""")
    log = tmp_path / "train.log"
    flags = ("--user-dir", tmp_path / "mine", "--criterion", "mine", "--log-file", log)
    result = run("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, *flags, check=False)
    assert result.returncode == 1 and f"{error}: mine" in result.stdout.splitlines()[-1]
    assert ("Traceback" in result.stdout) == (error == "RuntimeError")
    assert log.read_text().count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    "names, hint",
    [
        (("transformer", "transformer"), "new names"),
        (("smoe_transformer", "mine"), "import smoe_fairseq"),
    ],
)
def test_a_plugin_with_a_name_that_is_taken_or_missing_is_named(corpus, tmp_path, names, hint):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text(f"""
from fairseq.models import register_model_architecture
register_model_architecture{names}(print)
""")
    result = run("fairseq-train", corpus, "--user-dir", tmp_path / "mine", *TINY, check=False)
    refused(result, f"--user-dir {tmp_path / 'mine'}", hint)


def test_a_metric_that_no_log_has_is_not_the_end_of_a_run(corpus, tmp_path):
    flags = ("--best-checkpoint-metric", "none", "--max-epoch", 2)
    result = run("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, *flags)
    assert "--best-checkpoint-metric none: " in result.stdout
    assert [file.name for file in tmp_path.glob("*.pt")] == ["checkpoint_last.pt"]


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


FAULTS = {
    "idx cut off": (lambda d: cut(d / "train.src-tgt.src.idx", 40), "src.idx: "),
    "bin cut off": (lambda d: cut(d / "train.src-tgt.src.bin", 20), "train.src-tgt.src.bin"),
    "bin empty": (lambda d: cut(d / "train.src-tgt.src.bin", 0), "train.src-tgt.src.bin"),
    "dictionary": (lambda d: (d / "dict.src.txt").write_text("a b c\n"), "dict.src.txt: "),
    "word twice": (lambda d: (d / "dict.src.txt").write_text("a 1\na 1\n"), "dict.src.txt: "),
    "small dictionary": (lambda d: (d / "dict.src.txt").write_text("a 1\n"), ""),
}


ALL = [(f, p) for f in FAULTS for p in ("fairseq-train", "fairseq-generate")]


@pytest.mark.parametrize(
    "fault, program", [c if c == ("bin empty", "fairseq-train") else soak(*c) for c in ALL]
)
def test_data_that_is_not_whole_is_one_line(corpus, pre_norm, tmp_path, fault, program):
    break_it, words = FAULTS[fault]
    data = shutil.copytree(corpus, tmp_path / "data")
    break_it(data)
    save = ("--save-dir", tmp_path / "run")
    command = {
        "fairseq-train": ("fairseq-train", data, *save, *TINY),
        "fairseq-generate": ("fairseq-generate", data, "--path", pre_norm, "--gen-subset", "train"),
    }[program]
    last = refused(run(*command, check=False))
    if program == "fairseq-train":
        assert words in last
    elif fault == "small dictionary":  # the checkpoint is of another one
        assert str(pre_norm) in last
