"""Checkpoints whose config would run a program: every command refuses, and nothing of it is run."""

import ast
import importlib
from argparse import Namespace
from pathlib import Path

import fairseq
import pytest
import torch
from commands import SCRIPTS, TINY, generation, run
from fairseq import checkpoint_utils, tasks
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.tasks.translation import TranslationTask
from test_compat import run_without

from smoe_fairseq.compat.literal_eval import EVALUATING, LONGEST, evaluate

FAIRSEQ = Path(fairseq.__file__).parent


@pytest.fixture
def trace(tmp_path) -> Path:
    """A file that is there once a program has been run."""
    return tmp_path / "trace"


def program(trace: Path) -> str:
    """An expression with a side effect, whose value would do as well as any."""
    return f"[__import__('pathlib').Path({str(trace)!r}).touch(), 1][1:]"


def config(state: dict, arch: str, **settings) -> dict:
    """The checkpoint with another architecture in its config, of default options but for ``settings``."""
    positions = ("max_source_positions", "max_target_positions", "tokens_per_sample")
    model = Namespace(**dict.fromkeys(positions, 64), **{"criterion": "cross_entropy"} | settings)
    ARCH_CONFIG_REGISTRY[arch](model)
    return {**state, "cfg": {**state["cfg"], "model": vars(model) | {"_name": arch, "arch": arch}}}


def saved(state: dict, path: Path) -> Path:
    torch.save(state, path)
    return path


# All modules of fairseq, and the evaluator that takes the place of eval


def test_every_module_that_evaluates_is_known():
    """Those of ``examples``, which the user has to name by --user-dir, are programs of their own."""
    found = set()
    for file in [*FAIRSEQ.rglob("*.py"), *(FAIRSEQ.parent / "fairseq_cli").glob("*.py")]:
        parts = file.relative_to(FAIRSEQ.parent).with_suffix("").parts
        if parts[:2] == ("fairseq", "examples"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name) and node.id in ("eval", "exec", "compile", "__import__"):
                found.add((".".join(parts), node.id))
            if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
                found.add((".".join(parts), node.arg))
    evaluating = {(module, "eval") for module in EVALUATING}
    assert found == evaluating | {("fairseq.data.fasta_dataset", "shell")}
    assert all(importlib.import_module(module).eval is evaluate for module in EVALUATING)


@pytest.mark.parametrize(
    "literal",
    [
        *("0.5", "-1", "False", "None", " (0.9, 0.999) ", "{'a': [1, 'b']}", "'word'", "1,2"),
        *("[(512, 3)] * 20", "[(512, 10, 5)] + [(512, 3, 2)] * 4 + [(512, 2, 2)] * 2", "2 * [1]"),
    ],
)
def test_literals_are_what_they_were(literal):
    assert evaluate(literal) == eval(literal.strip())


@pytest.mark.parametrize(
    "source",
    [
        *("open('x', 'w')", "[1 for _ in 'ab']", "(lambda: 1)()", "x", "1 if 2 else 3", "f'{1}'"),
        *("[0] * 10**9", f"[0] * {LONGEST} * 2", "[" * 5000, "", "\0", "[x] * 2", "'a' * 10**9"),
    ],
)
def test_all_else_is_refused(source):
    with pytest.raises(SystemExit, match="expected a literal, such as"):
        evaluate(source)


def test_what_is_no_string_is_refused_as_by_eval():
    with pytest.raises(TypeError):
        evaluate(b"1")
    assert fairseq.utils.eval_bool(None, default=True) and not fairseq.utils.eval_bool("False")


def test_a_flag_is_named(capsys):
    from fairseq import options

    words = ["data", "--arch", "lightconv", "--encoder-kernel-size-list", "open('x')"]
    with pytest.raises(SystemExit, match="error: --encoder-kernel-size-list is .open"):
        options.parse_args_and_arch(options.get_training_parser(), words)


# Each kind of setting, by loading the model as all commands do

LAYERS = {"conv_feature_layers": "[(8, 3, 2)]", "conv_aggregator_layers": "[(8, 3, 2)]"}
KINDS = [
    *(("fconv", s) for s in ("encoder_layers", "decoder_layers", "decoder_attention")),
    *(
        ("fconv_self_att", s)
        for s in (
            *("encoder_layers", "decoder_layers", "encoder_attention", "decoder_attention"),
            *("pretrained", "self_attention", "project_input", "gated_attention", "downsample"),
        )
    ),
    *(("fconv_lm", s) for s in ("decoder_layers", "decoder_attention", "adaptive_softmax_cutoff")),
    *(("lightconv_lm", s) for s in ("character_filters", "adaptive_input_cutoff")),
    *(("transformer_lm", s) for s in ("character_filters", "adaptive_input_cutoff")),
    ("transformer", "adaptive_softmax_cutoff"),
    ("lstm", "adaptive_softmax_cutoff"),
    ("lightconv", "adaptive_softmax_cutoff"),
    ("wav2vec2", "conv_feature_layers"),
    ("hubert", "conv_feature_layers"),
    *(("wav2vec", s) for s in LAYERS),
]
# What brings a model to the setting.
WITH = {
    "character_filters": {"character_embeddings": True, "character_embedding_dim": 4},
    "lightconv": {"encoder_conv_type": "lightweight", "decoder_conv_type": "lightweight"}
    | {"weight_softmax": True},
    "lightconv_lm": {"attention_dropout": 0.0},
    "lstm": {"criterion": "adaptive_loss"},
    "fconv_lm": {"criterion": "adaptive_loss"},
    "adaptive_input_cutoff": {"adaptive_input": True},
    "conv_aggregator_layers": {"aggregator": "cnn", "conv_feature_layers": "[(8, 3, 2)]"},
}
# What the tasks of speech and language models have.
TASK = {"dictionaries": [], "dictionary": TranslationTask.source_dictionary}


@pytest.mark.parametrize("arch, setting", KINDS, ids=["-".join(kind) for kind in KINDS])
def test_settings_of_models(post_norm, tmp_path, trace, monkeypatch, arch, setting):
    settings = {**WITH.get(arch, {}), **WITH.get(setting, {}), setting: program(trace)}
    for name, value in TASK.items():
        monkeypatch.setattr(TranslationTask, name, value, raising=False)
    file = saved(config(torch.load(post_norm), arch, **settings), tmp_path / "checkpoint.pt")

    def load():
        checkpoint_utils.load_model_ensemble_and_task([str(file)])

    with pytest.raises(SystemExit, match=rf"^error: the setting '{setting}' of the checkpoint"):
        load()
    assert not trace.exists()
    for module in EVALUATING:
        monkeypatch.delattr(f"{module}.eval")
    with pytest.raises((Exception, SystemExit)):
        load()
    assert trace.exists()
