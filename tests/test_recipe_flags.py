"""Flags of the recipes, whose defaults are environment variables."""

import difflib

import pytest
from commands import refused, run, smoe, step_here, succeeded
from test_recipes import ROOT

from smoe_fairseq import __version__
from smoe_fairseq.recipes.commands import NEAR
from smoe_fairseq.recipes.settings import SETTINGS

GIVEN = {"CONFIG_DIR": str(ROOT / "configs")}
BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}


def dry(tmp_path, *words, **environment):
    return step_here(*words, "--dry-run", cwd=tmp_path, **GIVEN | environment)


@pytest.mark.parametrize(
    "words, variables",
    [
        ("train multi30k --gpus 0 --seed 2 moe --lr 0.1", {"GPUS": "0", "SEED": "2"}),
        ("train m4 moe --lr 0.1 --gpus=8 --batch 20000", {"GPUS": "8", "BATCH": "20000"}),
        ("study multi30k moe --seeds 1,2 --lr 0.1 --gpus 0", {"SEEDS": "1 2", "GPUS": "0"}),
        ("study multi30k moe --seeds 1-2 --lr 0.1 --gpus 0", {"SEEDS": "1 2", "GPUS": "0"}),
        ("prepare multi30k --raw text --workers 3", {"RAW": "text", "WORKERS": "3"}),
        ("train multi30k moe --lr 0.1 --data-dir d --run-dir r", {"DATA_DIR": "d", "RUN_DIR": "r"}),
    ],
)
def test_a_flag_does_what_its_variable_does(tmp_path, words, variables):
    shown = succeeded(dry(tmp_path, *words.split()))
    names = {BY_VARIABLE[variable].name for variable in variables}
    rest = [word for word in words.split() if word.partition("=")[0] not in names]
    rest = [word for word in rest if word not in [*variables.values(), "1,2", "1-2"]]
    same = dry(tmp_path, *rest, **variables)
    lines = [x for x in shown.stdout.splitlines() if not x.startswith("export ")]
    assert lines == same.stdout.splitlines() and lines
    assert {f"export {name}" for name in variables} == {
        x.partition("=")[0] for x in shown.stdout.splitlines() if x.startswith("export ")
    }


def test_an_archive_of_text_is_to_be_unpacked(tmp_path):
    (tmp_path / "x.zip").touch()
    words = ("prepare", "multi30k", "--raw", "x.zip")
    for dry_run in "", "1":
        refused(step_here(*words, cwd=tmp_path, **GIVEN, DRY_RUN=dry_run), "--raw x.zip")


IN_A_STUDY = ("--gpus -1", "--nodes 0", "--jobs 0", "--batch 0", "--precision fp9", "--launcher x")


@pytest.mark.parametrize(
    "words, status, named",
    [
        ("train multi30k moe --gpu 4", 2, "--gpus"),
        ("train multi30k moe --seed", 2, "--seed"),
        ("train multi30k moe --run-dir=", 2, "--run-dir"),
        ("evaluate multi30k moe --job 3", 2, "--jobs"),
        ("study multi30k --gpus 0 --seed 1", 2, "--seeds"),
        ("train multi30k moe --gpus 0 --seed x", 1, "--seed x"),
        ("study multi30k moe --seeds 3-1", 1, "--seeds 3-1"),
        ("study multi30k moe --seeds 1-9999", 1, "--seeds 1-9999"),
        ("study multi30k moe --seeds 1,3,1", 1, "--seeds 1,3,1"),
        ("train multi30k moe --gpus four", 1, "--gpus four"),
        ("evaluate multi30k moe --gpus 0 --jobs auto", 1, "--jobs auto"),
        ("train m4 moe --gpus 1 --batch huge", 1, "--batch huge: expected paper (13,000)"),
        ("train m4 moe --gpus 1 --launcher mpi", 1, "--launcher mpi"),
        ("train multi30k moe --gpus 0 --precision fp64", 1, "--precision fp64"),
        ("train multi30k moe --gpus 0 --data-dir file", 1, "--data-dir"),
        ("train multi30k moe --gpus 0 --run-dir file", 1, "--run-dir"),
        ("study multi30k moe --gpus 0 --results-dir file", 1, "--results-dir"),
        # A study says at once what its runs would; each has a folder of its own.
        *((f"study multi30k moe {x}", 1, x) for x in (*IN_A_STUDY, "--max-tokens 0")),
        *((f"study multi30k moe {x} own", 1, x) for x in ("--save-dir", "--log-file")),
        # An evaluation sets these itself.
        *((f"evaluate multi30k moe {x} x", 1, x) for x in ("--path", "--results-path", "--langs")),
        ("evaluate multi30k moe --nbest 2", 1, "--nbest"),  # would score each line twice
        ("prepare multi30k --normalization NFC", 1, "--normalization: NFC"),
        ("evaluate multi30k moe -s x", 1, "--source-lang"),
        ("evaluate multi30k moe --lang-pairs en-fr", 1, "--lang-pairs"),  # would choose nothing
        ("evaluate multi30k moe --num-shards 2", 1, "--num-shards"),  # would translate all
        ("evaluate multi30k moe --remove-bpe", 1, "--remove-bpe"),  # fairseq's @@: scores of pieces
    ],
)
def test_what_is_wrong_is_said_of_the_flag(tmp_path, words, status, named):
    (tmp_path / "file").touch()
    result = dry(tmp_path, *words.split())
    assert result.returncode == status and len(result.stderr.splitlines()) == 1
    assert "error: " in result.stderr and named in result.stderr
    assert not result.stdout.startswith("fairseq-train")


@pytest.mark.parametrize(
    "flags", ["--arch transformer", "--optimizer sgd", "-- --max-epoch 0.5", "--Dropout 0.1"]
)
def test_what_lacks_flags_of_the_recipe_is_named(tmp_path, flags):
    """After ``--``, as other programs separate flags, there are flags as well."""
    result = dry(tmp_path, *f"train multi30k moe --gpus 0 {flags}".split(), FORECAST="1")
    assert "-- -" not in refused(result, flags.removeprefix("-- ").split()[0])


@pytest.mark.parametrize("variable", ["DRY_RUN", "FORECAST"])
def test_a_switch_that_is_neither_on_nor_off_is_named(tmp_path, variable):
    given = GIVEN | {"DRY_RUN": "1", "GPUS": "0", variable: "no"}
    refused(step_here("train", "multi30k", "moe", cwd=tmp_path, **given), f"{variable}=no")


@pytest.mark.parametrize("command", ["train", "translate"])
def test_an_error_points_to_the_help_of_its_command(command):
    result = smoe(command, "--no-such-flag", check=False)
    assert result.returncode == 2 and f"smoe {command} --help" in result.stdout.splitlines()[-1]


def test_no_flag_of_fairseq_is_taken_for_a_mistyped_one():
    from fairseq import options

    flags = {
        name
        for parser in (options.get_training_parser(), options.get_generation_parser())
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    own = {setting.name for setting in SETTINGS}
    near = {name: difflib.get_close_matches(name, own, 1, NEAR) for name in flags - own}
    assert len(flags) > 200 and not {name for name, found in near.items() if found}


def test_the_version_is_told():
    assert run("smoe", "--version").stdout.split()[-1] == __version__
