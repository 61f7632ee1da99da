"""Golden files: what a release must not change by accident, as recorded in ``tests/golden``.

``python tests/test_golden.py --write [PART...]`` records them anew, all of them or some of `PARTS`. Do so
only where a change is intended, and read the difference before you commit it. The part "checkpoints" trains
models, which takes minutes; keep the checkpoints of earlier versions unless a system is added.

Everything goes through public doors: the command line, the registered architectures and `StratifiedMoE`.
Weights and inputs come from numpy's `RandomState`, whose numbers are the same in every version. What depends
on torch's random numbers is skipped where these are other ones than when the files were written.
"""

import argparse
import contextlib
import copy
import functools
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from commands import PLUGIN, hypotheses, run, step_here, succeeded
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import (
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    build_model,
)
from fairseq.tasks import TASK_REGISTRY
from plain_loops import executing
from sampling import soak

import smoe_fairseq.models  # noqa: F401  (as --user-dir does)
from smoe_fairseq.cli import main as smoe
from smoe_fairseq.modules import StratifiedMoE

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("golden")
TEXT = GOLDEN / "text"  # raw text with its dictionaries, as fairseq's --dataset-impl raw reads it
CRITERION = "smoe_label_smoothed_cross_entropy"

# ---- Models: keys and shapes of the state dict, initial weights, outputs ----

SIZES = "--encoder-embed-dim 16 --encoder-ffn-embed-dim 12 --encoder-attention-heads 2 --dropout 0"
FOUR_LAYERS = "--encoder-layers 4 --decoder-layers 4"
MODELS = {
    "dense": "--moe-freq 0",
    "strata-2-2-2-2": "--smoe-strata 2-2-2-2",
    "strata-4-4": "--smoe-strata 4-4",
    "one-stratum": "--smoe-strata 8",
    "top-1": "--smoe-strata 8 --moe-top-k 1",
    "top-3": "--smoe-strata 4-4 --moe-top-k 3",
    "stacked": "--smoe-strata 4-4 --moe-stacked",
    "chain": "--smoe-strata 8 --smoe-chain 3",
    "released": "--smoe-strata 2-2-2-2 --smoe-norm released",
    "top-p": "--smoe-strata 4-4 --moe-gate top-p",
    "relu": "--smoe-strata 4-4 --moe-gate relu",
    "simple": "--smoe-strata 4-4 --moe-null-experts 1 --moe-copy-experts 1 --moe-constant-experts 2",
    "hash": "--smoe-strata 8 --moe-gate hash",
    "base": "--smoe-strata 8 --moe-gate base",
    "expert-choice": "--smoe-strata 8 --moe-gate expert-choice",
    "null": "--smoe-strata 4-4 --moe-top-k 3 --moe-null-experts 3",
    "shared": "--smoe-strata 8 --moe-top-k 3 --moe-shared-experts 2 --moe-expert-ffn-dim 6",
    "residual": "--smoe-strata 8 --moe-top-k 1 --moe-residual",
    "cmr": "--smoe-strata 8 --moe-cmr",
    "bias": "--smoe-strata 4-4 --moe-balance bias --moe-second-expert-policy all",
    "update": "--smoe-strata 4-4 --moe-balance-over update",
    "budget": "--smoe-strata 4-4 --smoe-capacity-budget 1.2",
    "masked": "--smoe-strata 4-4 --moe-eom 0.1 --moe-fom 0.1 --moe-gating-dropout 0.1",
    "scaled": "--smoe-strata 4-4 --moe-gate-init-scale 0.5 --moe-output-init-scale 0.5",
    "two-sides": "--encoder-smoe-strata 4-0-4 --decoder-smoe-strata 2-6",
    "layers": f"--smoe-strata 4-0-4,2-6 {FOUR_LAYERS}",
    "pyramid": f"--smoe-strata 4,8 --moe-top-k 1 --moe-residual {FOUR_LAYERS}",
    "sides": f"--encoder-smoe-strata 4-4 --decoder-moe-freq 0 --moe-freq 1 {FOUR_LAYERS}",
    "embeddings": "--smoe-strata 4-4 --no-share-all-embeddings --layernorm-embedding "
    "--encoder-learned-pos --max-source-positions 20",
}
LM_SIZES = SIZES.replace("encoder", "decoder")
LM_MODELS = {
    f"lm-{name}": f"{MODELS[name]} --task language_modeling"
    for name in ("dense", "strata-4-4", "hash", "cmr", "chain", "released")
}
PAIRS = ("aa-bb", "aa-cc", "bb-aa")
PAIR_MODELS = {
    "pairs": "--smoe-strata 4-4",
    "pairs-shared": "--smoe-strata 4-4 --share-encoders --share-decoders",
    "pairs-dense": "--moe-freq 0 --share-encoder-embeddings --no-share-all-embeddings",
}
ALL_MODELS = (
    {name: f"--arch smoe_transformer_tiny {SIZES} {f}" for name, f in MODELS.items()}
    | {name: f"--arch smoe_transformer_lm_tiny {LM_SIZES} {f}" for name, f in LM_MODELS.items()}
    | {
        name: f"--arch smoe_multilingual_transformer_tiny {SIZES} {f} --task multilingual_translation "
        f"--lang-pairs {','.join(PAIRS)} --encoder-langtok tgt"
        for name, f in PAIR_MODELS.items()
    }
)


def model_of(name: str) -> torch.nn.Module:
    """With its initial weights of seed 1."""
    words = Dictionary()
    for i in range(20):
        words.add_symbol(f"w{i}")
    flags = ["data", *ALL_MODELS[name].split()]
    args = options.parse_args_and_arch(options.get_training_parser(), flags)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    if name in PAIR_MODELS:
        args.langs, args.lang_pairs = ["aa", "bb", "cc"], list(PAIRS)
        task_class = TASK_REGISTRY["multilingual_translation"]
        task = task_class(args, dict.fromkeys(args.langs, words), training=True)
    torch.manual_seed(1)
    return build_model(args, task)


def fingerprint(tensor: torch.Tensor) -> float:
    values = tensor.double().flatten()
    return round(float((values * torch.arange(1, len(values) + 1).double().cos()).sum()), 5)


def described(name: str, value: torch.Tensor) -> str:
    """Shape and `fingerprint` of a tensor of a state dict."""
    return f"{'x'.join(map(str, value.shape))} {fingerprint(value)}"


def random_numbers() -> list[float]:
    """A sample of torch's random numbers, of each kind that models draw from."""
    torch.manual_seed(1)
    drawn = [torch.rand(40), torch.randn(40), torch.randn(5), torch.rand(40, dtype=torch.float64)]
    drawn += [torch.randint(1000, (40,)), torch.randperm(40)]
    drawn += [torch.empty(40).exponential_(), torch.nn.functional.dropout(torch.arange(40.0))]
    return [fingerprint(numbers) for numbers in drawn]


@torch.no_grad()
def fill(module: torch.nn.Module) -> None:
    """Sets all weights, by the names that they have in the state dict, to numbers that differ clearly."""
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            generator = np.random.RandomState(zlib.crc32(name.encode()))
            value.copy_(torch.from_numpy(generator.standard_normal(tuple(value.shape)) * 0.7))
        elif name.endswith("bias.steps"):
            value.copy_(torch.arange(value.numel()).view_as(value) % 3)


def log_probs_of(name: str, model: torch.nn.Module) -> torch.Tensor:
    """``(B, S, V)`` of fixed weights, in evaluation, of source and target with padding."""
    model = model.double().eval()
    fill(model)
    generator, pad = np.random.RandomState(3), 1
    src, tgt = (torch.from_numpy(generator.randint(4, 24, (3, n))) for n in (7, 6))
    src[1, :3] = pad
    tgt[2, 4:] = pad
    with torch.no_grad():
        if name in LM_MODELS:
            logits = model(tgt)[0]
        else:
            part = model.models["aa-cc"] if name in PAIR_MODELS else model
            logits = part(src, src.ne(pad).sum(1), tgt)[0]
    return logits.double().log_softmax(-1)[tgt.ne(pad)]


def record_models() -> None:
    found, outputs = {"random numbers": random_numbers(), "models": {}}, {}
    for name in ALL_MODELS:
        model = model_of(name)
        state = model.state_dict().items()
        found["models"][name] = {key: described(key, value) for key, value in state}
        outputs[name] = log_probs_of(name, model).numpy().astype(np.float32)
    write_json("models", found)
    np.savez_compressed(GOLDEN / "models.npz", **outputs)


@pytest.fixture(scope="module", params=ALL_MODELS)
def built(request):
    """(name, model), with the initial weights of seed 1."""
    return request.param, model_of(request.param)


def test_state_dict(built):
    """Keys in their order, which is the optimizer's too, and shapes."""
    name, model = built
    want = read_json("models")["models"][name].items()
    got = {key: described(key, value) for key, value in model.state_dict().items()}.items()
    shapes = [[(key, shape.split(" ")[0]) for key, shape in state] for state in (got, want)]
    assert shapes[0] == shapes[1]


def test_initial_weights_of_a_seed(built):
    skip_without_the_same_random_numbers()
    name, model = built
    want = read_json("models")["models"][name]
    for key, value in model.state_dict().items():
        got, expected = described(key, value), want[key]
        numbers = [float(shown.split(" ")[1]) for shown in (got, expected)]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-4, rel=1e-5), key


def test_outputs_of_models(built):
    name, model = built
    assert_close(log_probs_of(name, copy.deepcopy(model)), read_arrays("models")[name], name)


def skip_without_the_same_random_numbers() -> None:
    if random_numbers() != pytest.approx(read_json("models")["random numbers"], abs=1e-4):
        pytest.skip("this version of torch draws other random numbers")


# ---- The block: outputs, losses and gradients in evaluation and in training ----

ALL = {"second_expert_policy": "all"}  # the choices that draw no random numbers
HASH_TABLE = torch.tensor([3, 0, 7, 3, 1, 6, 2])
BLOCKS = {
    "default": {},
    "strata-2-2-2-2": {**ALL, "strata": "2-2-2-2", "capacity_factor": 1.0},
    "strata-4-4": {**ALL, "strata": "4-4"},
    "strata-4-4-limited": {**ALL, "strata": "4-4", "capacity_factor": 0.5},
    "strata-4-12": {**ALL, "strata": "4-12", "activation_fn": "gelu"},
    "strata-4-0-4": {**ALL, "strata": "4-0-4"},
    "one-stratum": {**ALL, "strata": "8", "capacity_factor": 1.0},
    "top-1": {"strata": "8", "top_k": 1, "capacity_factor": 1.0},
    "top-3": {**ALL, "strata": "4-4", "top_k": 3, "capacity_factor": 1.0},
    "before-drop": {**ALL, "gate_normalization": "before-drop", "capacity_factor": 0.5},
    "no-normalization": {**ALL, "gate_normalization": "none", "eval_capacity_factor": 0.5},
    "by-score": {**ALL, "drop_order": "score", "capacity_factor": 0.5},
    "random-order": {**ALL, "drop_order": "random", "capacity_factor": 0.5},
    "random-second": {"strata": "4-4", "second_expert_policy": "random"},
    "stacked": {**ALL, "strata": "4-4", "stacked": True, "capacity_factor": 1.0},
    "chain": {**ALL, "strata": "8", "chain": 3, "capacity_factor": 1.0},
    "released": {**ALL, "strata": "2-2-2-2", "norms": "released"},
    "top-p": {"strata": "4-4", "gate": "top-p", "top_p": 0.6, "capacity_factor": 1.0},
    "top-p-chain": {"strata": "5", "gate": "top-p", "chain": 2, "capacity_factor": 0.0},
    "hash": {"strata": "8", "gate": "hash", "hash_table": HASH_TABLE},
    "base": {"strata": "8", "gate": "base"},
    "expert-choice": {"strata": "8", "gate": "expert-choice"},
    "expert-choice-1": {"strata": "8", "gate": "expert-choice", "capacity_factor": 1.0},
    "null": {**ALL, "strata": "4-4", "top_k": 3, "null_experts": 3, "capacity_factor": 1.0},
    "bias": {**ALL, "strata": "4-4", "balance": "bias", "capacity_factor": 1.0},
    "update": {**ALL, "strata": "4-4", "balance_over": "update"},
    "budget": {**ALL, "strata": "2-2-2-2", "capacity_budget": 1.5},
    "exit-bias": {**ALL, "strata": "2-2-2-2", "exit_bias": 1.0},
    "shared": {**ALL, "strata": "8", "shared_experts": 2, "expert_ffn_dim": 3},
    "residual": {"strata": "8", "top_k": 1, "residual": True},
    "cmr": {**ALL, "strata": "8", "cmr": True},
    "cmr-gate-drop": {**ALL, "strata": "8", "cmr": True, "cmr_gate_drop": 0.3},
    "eom": {**ALL, "strata": "4-4", "eom": 0.3},
    "fom": {**ALL, "strata": "4-4", "fom": 0.3},
    "gating-dropout": {**ALL, "strata": "4-4", "gating_dropout": 0.9},
    "dropout": {**ALL, "strata": "4-4", "dropout": 0.3, "activation_dropout": 0.2},
    "dropout-per-layer": {**ALL, "strata": "4-4", "dropout": 0.3, "dropout_per": "layer"},
}
STATS = ("balance_loss", "z_loss", "requested_capacity", "dropped_choices", "entropy", "stops")


def pass_of(name: str, mode: str, execution: str = "auto") -> dict[str, torch.Tensor]:
    """Output, statistics and gradients of one pass over ``(3, 8, D)``, in float64."""
    D, F = 8, 6
    block = StratifiedMoE(D, F, execution=execution, **BLOCKS[name]).double()
    fill(block.train(mode == "train"))
    generator = np.random.RandomState(7)
    x, weights = (torch.from_numpy(generator.standard_normal((3, 8, D))) for _ in range(2))
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[0, :2] = mask[2, 7] = True
    ids = torch.from_numpy(generator.randint(len(HASH_TABLE), size=(3, 8)))
    torch.manual_seed(5)
    y, stats = block(x.requires_grad_(), mask, ids=ids)
    found = {"y": y} | {
        key: getattr(stats, key) for key in STATS if getattr(stats, key) is not None
    }
    losses = (found.get(key, 0) for key in ("balance_loss", "z_loss", "entropy", "stops"))
    objective = (y * weights).sum() + 0.3 * sum(losses)
    leaves = [x]
    if mode == "train":
        leaves += [parameter for _, parameter in sorted(block.named_parameters())]
    gradients = torch.autograd.grad(objective, leaves, allow_unused=True, materialize_grads=True)
    found["gradients"] = torch.cat([gradient.flatten() for gradient in gradients])
    return {key: value.detach() for key, value in found.items()}


def draws(name: str) -> bool:
    """Whether a pass in training draws random numbers: it leaves another state of them behind."""
    pass_of(name, "train")
    after = torch.get_rng_state()
    torch.manual_seed(5)
    return not torch.equal(after, torch.get_rng_state())


def record_blocks() -> None:
    arrays, drawing = {}, []
    for name in BLOCKS:
        drawing += [name] * draws(name)
        for mode in ("eval", "train"):
            for key, value in pass_of(name, mode).items():
                array = value.numpy()
                kept = np.float32 if array.dtype == np.float64 else np.int8
                arrays[f"{name}/{mode}/{key}"] = array.astype(kept)
    np.savez_compressed(GOLDEN / "blocks.npz", **arrays)
    write_json("blocks", {"random in training": drawing})


@pytest.mark.full_grid
@pytest.mark.parametrize("execution", ["auto", "grouped"])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", BLOCKS)
def test_pass_through_the_block(name, mode, execution):
    if mode == "train" and name in read_json("blocks")["random in training"]:
        skip_without_the_same_random_numbers()
        if execution == "grouped":
            pytest.skip("this path draws for all tokens, not for those at a stratum alone")
    arrays = read_arrays("blocks")
    with executing(execution):
        found = pass_of(name, mode, execution)
    for key, value in found.items():
        assert_close(value, arrays[f"{name}/{mode}/{key}"], key)


# ---- Flags: names, defaults and choices, without the words of the help ----


class _Help(Exception):
    """Raised in place of printing a parser's help."""


def parser_behind(call: Callable[[], object]) -> argparse.ArgumentParser:
    """The parser whose help a command was asked for."""

    def print_help(parser, file=None):
        raise _Help(parser)

    with mock.patch("argparse.ArgumentParser.print_help", print_help):
        try:
            call()
        except _Help as shown:
            return shown.args[0]
    raise AssertionError("no help was asked for")


def flags_of(parser: argparse.ArgumentParser) -> dict[str, dict]:
    """All options that the help shows, by their names; of operands, by what stands in their place."""
    found = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        name = " ".join(action.option_strings) or str(action.metavar or action.dest)
        shown = {"default": action.default, "metavar": action.metavar, "nargs": action.nargs}
        shown |= {"choices": action.choices and [str(choice) for choice in action.choices]}
        shown |= {"required": action.required}
        found[name] = {key: plain(value) for key, value in shown.items() if value is not None}
    return found


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def defaults_of(model: str) -> dict[str, object]:
    """Of the model's config, where neither a flag nor the architecture says otherwise."""
    if model not in MODEL_DATACLASS_REGISTRY:
        return {}
    known = vars(MODEL_DATACLASS_REGISTRY[model]())
    return {name: plain(value) for name, value in known.items() if not name.startswith("_")}


def sizes_of(architecture: str) -> dict[str, object]:
    """What the architecture sets where no flag is given."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    ARCH_MODEL_REGISTRY[architecture].add_args(parser)
    args = options.parse_args_and_arch(
        options.get_training_parser(), ["data", "--arch", architecture]
    )
    own = sorted({action.dest for action in parser._actions} & vars(args).keys())
    return {name: plain(getattr(args, name)) for name in own}


def all_flags() -> dict:
    def of_part(part) -> dict:
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
        part.add_args(parser)
        return flags_of(parser)

    commands = parser_behind(lambda: smoe(["--help"]))
    (names,) = (a.choices for a in commands._actions if isinstance(a, argparse._SubParsersAction))
    recipe = functools.partial(step_here, cwd=".")
    recipes = parser_behind(lambda: recipe("--help"))
    (steps,) = (a.choices for a in recipes._actions if isinstance(a, argparse._SubParsersAction))
    ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("smoe_"))
    models = sorted({ARCH_MODEL_NAME_REGISTRY[name] for name in ours})
    return {
        "smoe": {n: flags_of(parser_behind(lambda n=n: smoe([n, "--help"]))) for n in names},
        "recipes": {n: flags_of(parser_behind(lambda n=n: recipe(n, "--help"))) for n in steps},
        "models": {name: of_part(MODEL_REGISTRY[name]) for name in models},
        "defaults": {name: defaults_of(name) for name in models},
        "criterion": {CRITERION: of_part(CRITERION_REGISTRY[CRITERION])},
        "architectures": {name: sizes_of(name) for name in ours},
    }


def test_flags():
    got, want = json.loads(json.dumps(all_flags())), read_json("flags")
    for part, parsers in want.items():
        assert got[part].keys() == parsers.keys(), part
        for name, flags in parsers.items():
            assert got[part][name] == flags, f"{part}: {name}"
    assert got.keys() == want.keys()


# ---- Recipes: the commands that DRY_RUN=1 prints ----

SYSTEMS = ("dense", "moe", "smoe-4-4")
METHODS = """dense moe switch moe-16 moe-32 moe-base moe-bias moe-chain moe-cmr moe-eom moe-expert-choice
    moe-hash moe-null moe-residual moe-shared moe-top-4 moe-top-p moe-update smoe-2-2-2-2 smoe-4-12
    smoe-budget-4-4 smoe-released-4-4 stacked-4-4 deep-4-4 pyramid-8""".split()
ON_GPUS = {"GPUS": "8", "PRECISION": "fp16"}  # whatever this machine's are
DATASETS = ("libreoffice", "m15", "m4", "multi30k", "opus100", "phrasebook")
LONG = ("m15", "multi30k", "opus100")


def dry_runs() -> dict[str, dict[str, str]]:
    """Words of a recipe and the environment, all that are recorded."""
    found = {}
    for dataset in DATASETS:
        found[f"prepare {dataset}"] = {}
        found[f"evaluate {dataset} smoe-4-4"] = {}
        found[f"study {dataset}{' moe' * (dataset == 'phrasebook')}"] = {}
        for system in METHODS if dataset == "phrasebook" else SYSTEMS:
            found[f"train {dataset} {system}"] = {}
        found[f"train {dataset} smoe-2-2-2-2 --expert-parallel"] = ON_GPUS
    slurm = {"LAUNCHER": "slurm", "NODES": "2", "MASTER_ADDR": "host", "MASTER_PORT": "20000"}
    found["train m15 smoe-4-12 --max-update 7"] = ON_GPUS | slurm
    found["train m4 moe --seed 3"] = ON_GPUS | {"BATCH": "release", "SEED": "2"}
    found["evaluate m4 moe --beam 2"] = {"SEED": "2"}
    found["study phrasebook moe smoe-4-4 --max-update 7"] = {"SEEDS": "1 2"}
    return found


def dry_run(words: str, given: dict[str, str]) -> list[str]:
    """The commands, without the comments between them.

    A long word is written out once, and of hundreds of commands the first and the last are kept.
    """
    ours = {"DRY_RUN": "1", "FORECAST": "0", "WORKERS": "2", "GPUS": "0"}
    ours |= {"CONFIG_DIR": str(ROOT / "configs"), **given}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        for name in "RESULTS_DIR SEED SEEDS BATCH NODES LAUNCHER JOBS PRECISION".split():
            os.environ.pop(name, None)
        lines = succeeded(step_here(*words.split(), cwd=folder, **ours)).stdout.splitlines()
        assert os.listdir(folder) == [], words
    text = "\n".join(line for line in lines if not line.startswith("#")).replace(str(ROOT), "ROOT")
    seen: set[str] = set()

    def shorter(word: re.Match) -> str:
        known = word[0] in seen
        seen.add(word[0])
        return f"<as above: {word[0][:8]}...>" if known else word[0]

    lines = re.sub(r"\S{100,}", shorter, text).splitlines()
    if len(lines) > 200:
        lines[40:-40] = [f"{len(lines) - 80} more"]
    return lines


@pytest.mark.parametrize("dataset", [soak(d) if d in LONG else d for d in DATASETS])
def test_dry_runs(dataset):
    want = read_json("recipes")
    assert dry_runs().keys() == want.keys()
    for words, given in dry_runs().items():
        if words.split()[1] == dataset:
            assert dry_run(words, given) == want[words], words


# ---- Training: what is logged, and a checkpoint of each gate with its translations ----

TRAINED = "--encoder-embed-dim 16 --encoder-ffn-embed-dim 8 --encoder-attention-heads 2 --dropout 0"
LOGS = {
    "dense": "--moe-freq 0",
    "strata": "--smoe-strata 2-2-2-2 --moe-z-loss-wt 0.001 --update-freq 2",
    "unlimited": "--smoe-strata 8 --moe-capacity-factor 0 --moe-top-k 3",
    "budget": "--smoe-strata 4-4 --smoe-capacity-budget 1.2 --moe-drop-order score",
    "top-p": "--smoe-strata 4-4 --moe-gate top-p --moe-capacity-factor 2.0",
    "expert-choice": "--smoe-strata 8 --moe-gate expert-choice",
    "cmr-null": "--smoe-strata 8 --moe-cmr --moe-null-experts 2 --moe-balance-over update",
    "bias": "--smoe-strata 4-4 --moe-balance bias --moe-second-expert-policy all",
}
TIMES = re.compile(r"(train_|valid_|)(wps|ups|wall|train_wall|gb_free)")
SYSTEMS_WITH_CHECKPOINT = """dense strata-2-2-2-2 strata-4-4 one-stratum stacked chain released top-p hash
    base expert-choice null shared residual cmr bias two-sides""".split()
CHECKPOINTS = GOLDEN / "checkpoints.tar.xz"
TRANSLATED = ["ax by cz dx", "bz bz ay", "dx cy bx az dy cz"]


def train(folder: Path, *flags: str) -> str:
    """Its log; all paths that the checkpoint keeps are relative ones."""
    for name, target in (("text", TEXT), ("smoe_fairseq", ROOT / "smoe_fairseq")):
        (folder / name).symlink_to(target)
    return run(
        *("fairseq-train", "text", "-s", "src", "-t", "tgt", "--dataset-impl", "raw", "--cpu"),
        *("--user-dir", "smoe_fairseq", "--num-workers", 0, "--arch", "smoe_transformer_tiny"),
        *(*TRAINED.split(), "--criterion", CRITERION, "--label-smoothing", 0.1, "--seed", 1),
        *("--optimizer", "adam", "--lr", 0.01, "--max-tokens", 300, "--log-format", "json"),
        *("--no-epoch-checkpoints", "--save-dir", "run", *flags),
        cwd=folder,
    ).stdout


def log_of(name: str, folder: Path) -> dict[str, dict[str, float]]:
    """What two updates and a validation log, by tag."""
    flags = "--max-update", "2", "--log-interval", "2", "--no-save", "--user-dir", PLUGIN
    log = train(folder, *flags, *LOGS[name].split())
    tags = ("train_inner", "train", "valid")
    found = {tag: re.findall(rf"\| {tag} \| (\{{.*\}})", log) for tag in tags}
    assert all(found.values()), log
    return {
        tag: {
            key: None if TIMES.fullmatch(key) else float(value)
            for key, value in json.loads(lines[-1]).items()
        }
        for tag, lines in found.items()
    }


def record_logs() -> None:
    found = {}
    for name in LOGS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = log_of(name, Path(folder))
    write_json("logs", found)


@pytest.mark.parametrize("name", LOGS)
def test_log(name, tmp_path):
    """All keys, and their values but for times."""
    got, want = log_of(name, tmp_path), read_json("logs")[name]
    assert {tag: sorted(values) for tag, values in got.items()} == {
        tag: sorted(values) for tag, values in want.items()
    }
    skip_without_the_same_random_numbers()
    for tag, values in want.items():
        known = {key: value for key, value in values.items() if value is not None}
        assert {key: got[tag][key] for key in known} == pytest.approx(known, 2e-3, 2e-3), tag


def translations(checkpoint: Path) -> dict[str, list[str]]:
    """Of ``fairseq-generate`` (the test set), with scores, and of ``smoe translate``."""
    from fairseq_cli.generate import main as generate

    flags = [str(TEXT), *"-s src -t tgt --dataset-impl raw --cpu --num-workers 0".split()]
    flags += ["--beam", "4", "--batch-size", "20", "--path", str(checkpoint)]
    args = options.parse_args_and_arch(options.get_generation_parser(), flags)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        generate(convert_namespace_to_omegaconf(args))
    found = [said for _, said in sorted(hypotheses(output.getvalue()).items())]
    text = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in TRANSLATED).encode()))
    translated = io.TextIOWrapper(io.BytesIO())
    with mock.patch.object(sys, "stdin", text), contextlib.redirect_stdout(translated):
        assert smoe(["translate", str(checkpoint), "--data", str(TEXT)]) == 0
    return {
        "fairseq-generate": [words for _, words in found],
        "scores": [round(score, 4) for score, _ in found],
        "smoe translate": translated.buffer.getvalue().decode().splitlines(),
    }


def record_checkpoints() -> None:
    write_text()
    found = {}
    with tempfile.TemporaryDirectory() as name, tarfile.open(CHECKPOINTS, "w:xz") as archive:
        for system in SYSTEMS_WITH_CHECKPOINT:
            folder = Path(name, system)
            folder.mkdir()
            flags = "--max-update 200 --lr-scheduler inverse_sqrt --warmup-updates 30 --clip-norm 1"
            flags += " --validate-interval 1000 --save-interval 1000 --no-save-optimizer-state"
            train(folder, *flags.split(), *MODELS[system].split())
            archive.add(folder / "run/checkpoint_last.pt", f"{system}.pt")
            found[system] = translations(folder / "run/checkpoint_last.pt")
    write_json("translations", found)


@pytest.mark.parametrize("system", SYSTEMS_WITH_CHECKPOINT)
def test_translations_of_a_checkpoint(recorded, system):
    got, want = translations(recorded / f"{system}.pt"), read_json("translations")[system]
    assert got.pop("scores") == pytest.approx(want.pop("scores"), abs=1e-3)
    assert got == want


def write_text() -> None:
    """Sentences of twelve words, whose translation is the same in upper case."""
    TEXT.mkdir(parents=True, exist_ok=True)
    generator = np.random.RandomState(4)
    words = [f"{a}{b}" for a in "abcd" for b in "xyz"]
    for split, size in (("train", 80), ("valid", 8), ("test", 8)):
        lines = "".join(
            " ".join(generator.choice(words, size=3 + i % 4)) + "\n" for i in range(size)
        )
        (TEXT / f"{split}.src-tgt.src").write_text(lines)
        (TEXT / f"{split}.src-tgt.tgt").write_text(lines.upper())
    for language in ("src", "tgt"):  # a joined dictionary
        lines = "".join(f"{word} 10\n{word.upper()} 10\n" for word in words)
        (TEXT / f"dict.{language}.txt").write_text(lines)


# ---- Files ----

PARTS = {
    "models": record_models,
    "blocks": record_blocks,
    "flags": lambda: write_json("flags", all_flags()),
    "recipes": lambda: write_json("recipes", {w: dry_run(w, g) for w, g in dry_runs().items()}),
    "checkpoints": record_checkpoints,  # with the text
    "logs": record_logs,
}


def write_json(name: str, content: dict) -> None:
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\s+([^][{}\"]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    (GOLDEN / f"{name}.json").write_text(text + "\n")


def read_json(name: str) -> dict:
    say_how_to_renew(name)
    return json.loads((GOLDEN / f"{name}.json").read_text())


def say_how_to_renew(part: str) -> None:
    """pytest shows it if the test fails."""
    print(
        f"tests/golden/{part}: if the change is intended, python tests/test_golden.py --write {part}"
    )


def read_arrays(name: str) -> dict[str, np.ndarray]:
    say_how_to_renew(name)
    return _arrays(name)


@functools.cache
def _arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def assert_close(got: torch.Tensor, want: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5, err_msg=name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    GOLDEN.mkdir(exist_ok=True)
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()
        print(f"{part}: written")
