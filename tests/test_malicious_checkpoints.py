"""Checkpoints whose config would run a program: every command refuses, and nothing of it is run."""

import ast
import importlib
from argparse import Namespace
from pathlib import Path

import fairseq
import pytest
import torch
from commands import TINY, generation, refused, run, smoe
from fairseq import checkpoint_utils, tasks
from test_compat import run_without
from test_refused_types import saved

from smoe_fairseq.compat.safe_load import MAX_ENTRIES, evaluate
from smoe_fairseq.errors import UsageError

FAIRSEQ = Path(fairseq.__file__).parent


@pytest.fixture
def trace(tmp_path) -> Path:
    """A file that is there once a program has been run."""
    return tmp_path / "trace"


def program(trace: Path) -> str:
    """An expression with a side effect, whose value would do as well as any."""
    return f"[__import__('pathlib').Path({str(trace)!r}).touch(), 1][1:]"


def run_by_model(state: dict, trace: Path) -> dict:
    """The checkpoint with an option of its model that is a program."""
    model = settings_of(state["cfg"]["model"]) | {"adaptive_softmax_cutoff": program(trace)}
    return {**state, "cfg": {**state["cfg"], "model": model}}


# All modules of fairseq, and the evaluator that takes the place of eval


@pytest.mark.soak
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
    evaluating = {module for module, name in found if name == "eval"}
    others = found - {(module, "eval") for module in evaluating}
    assert len(evaluating) > 9 and others == {("fairseq.data.fasta_dataset", "shell")}
    assert all(importlib.import_module(module).eval is evaluate for module in evaluating)


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
        *("[0] * 10**9", f"[0] * {MAX_ENTRIES} * 2", "[" * 5000, "", "\0", "[x] * 2"),
        "'a' * 10**9",
    ],
)
def test_all_else_is_refused(source):
    with pytest.raises(ValueError, match="expected a literal, such as"):
        evaluate(source)


def test_what_is_no_string_is_refused_as_by_eval():
    with pytest.raises(TypeError):
        evaluate(b"1")
    assert fairseq.utils.eval_bool(None, default=True) and not fairseq.utils.eval_bool("False")


# Loading the model, as all commands do


def settings_of(part) -> dict:
    """Of the parts of a config some are dictionaries, some objects, and one is a name."""
    return (
        {} if isinstance(part, str | int) else dict(part if isinstance(part, dict) else vars(part))
    )


def older(state: dict, **settings) -> dict:
    """The same checkpoint with a flat command line, ``args``, as fairseq wrote before it had ``cfg``."""
    parts = {name: settings_of(part) for name, part in state["cfg"].items() if part is not None}
    args = {name: value for part in parts.values() for name, value in part.items()}
    names = {name: parts[name]["_name"] for name in ("task", "criterion", "optimizer")}
    names["arch"] = parts["model"]["_name"]
    return {**state, "cfg": None, "args": Namespace(**args | names | settings)}


def test_older_checkpoints(post_norm, tmp_path, trace):
    state = torch.load(post_norm)
    model = {**vars(older(run_by_model(state, trace))["args"]), "user_dir": None}
    file = saved(older(state, **model), tmp_path / "checkpoint.pt")
    with pytest.raises((UsageError, ValueError), match="expected a literal"):
        checkpoint_utils.load_model_ensemble_and_task([str(file)])
    assert not trace.exists()


def test_settings_of_tasks_and_criterions(corpus, trace):
    """What fairseq-validate builds by the checkpoint's config beside the model."""
    from fairseq.criterions.ctc import CtcCriterion, CtcCriterionConfig
    from fairseq.tasks.multilingual_translation import MultilingualTranslationTask

    args = Namespace(
        data=str(corpus), lang_pairs="src-tgt", source_lang="src", left_pad_source=program(trace)
    )
    with pytest.raises(ValueError, match="expected a literal"):
        MultilingualTranslationTask.prepare(args)
    settings = CtcCriterionConfig(
        wer_args=program(trace), post_process="letter", zero_infinity=True
    )
    task = tasks.setup_task(Namespace(task="translation", data=str(corpus)))
    with pytest.raises(ValueError, match="expected a literal"):
        CtcCriterion(settings, task)
    assert not trace.exists()


# Each command


@pytest.mark.parametrize("name", ["generate", "cost"])
def test_commands_refuse(post_norm, corpus, tmp_path, trace, name):
    file = saved(run_by_model(torch.load(post_norm), trace), tmp_path / "checkpoint.pt")
    if name == "cost":
        refused(smoe("cost", "--path", file, corpus, check=False), file)
    else:
        result = run("fairseq-generate", *generation(corpus, file), check=False)
        refused(result, "expected a literal")
    assert not trace.exists()


@pytest.mark.soak
def test_without_its_patch_a_command_runs_the_program(post_norm, corpus, tmp_path, trace):
    file = saved(run_by_model(torch.load(post_norm), trace), tmp_path / "checkpoint.pt")
    run_without("evaluate_literals_only", "fairseq-generate", *generation(corpus, file))
    assert trace.exists()


def intruding(state: dict, trace: Path) -> dict:
    """With a plugin of its own (--user-dir), and with hydra's word for what to call."""
    folder = trace.parent / "intruder"
    folder.mkdir()
    (folder / "__init__.py").write_text(program(trace))
    call = {"_target_": "pathlib.Path.touch", "_args_": [str(trace)], "user_dir": str(folder)}
    cfg = state["cfg"]
    return {
        **state,
        "cfg": {**cfg, **{part: settings_of(cfg[part]) | call for part in ("common", "task")}},
    }


@pytest.mark.parametrize("age", ["cfg", "args"])
def test_plugins_named_by_a_checkpoint_are_not_imported(pre_norm, corpus, tmp_path, trace, age):
    state = intruding(torch.load(pre_norm), trace)
    file = saved(state if age == "cfg" else older(state), tmp_path / "checkpoint.pt")
    validation = (corpus, "--path", file, "--cpu", "--task", "translation", "--max-tokens", 300)
    commands = {
        "cfg": ("fairseq-generate", *generation(corpus, file)),
        "args": ("fairseq-validate", *validation),
    }
    result = run(*commands[age], check=False)
    assert not trace.exists(), result.stdout[-2000:]


@pytest.mark.parametrize("age", ["cfg", "args"])
def test_training_runs_nothing_of_what_it_resumes_from(pre_norm, corpus, tmp_path, trace, age):
    state = intruding(torch.load(pre_norm), trace)
    settings = {"adaptive_softmax_cutoff": program(trace), "adam_betas": program(trace)}
    cfg = state["cfg"]
    parts = ("model", "optimizer", "optimization")
    state = {**state, "cfg": {**cfg, **{p: settings_of(cfg[p]) | settings for p in parts}}}
    file = saved(state if age == "cfg" else older(state), tmp_path / "checkpoint.pt")
    flag = "--restore-file" if age == "cfg" else "--finetune-from-model"
    command = ("fairseq-train", corpus, "--save-dir", tmp_path / "new", *TINY, "--max-epoch", "3")
    norms = ("--encoder-normalize-before", "--decoder-normalize-before")
    result = run(*command, *norms, flag, file, check=False)
    assert not trace.exists(), result.stdout[-2000:]
    assert "done training" in result.stdout


def test_names_of_data_files_are_not_run(tmp_path, trace, monkeypatch):
    from fairseq.data.fasta_dataset import FastaDataset

    monkeypatch.chdir(tmp_path)  # a file's name holds no folders
    Path(f"x; touch {trace.name}; .fasta").write_text(">one\nAB\n")
    with pytest.raises(UsageError, match="fasta"):
        FastaDataset(f"x; touch {trace.name}; ")
    assert not trace.exists()
