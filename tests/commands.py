"""Commands run as a user runs them, each in a process of its own, which mostly is a forked one."""

import contextlib
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import programs
import pytest
from programs import Server

from smoe_fairseq.errors import UsageError

SCRIPTS = Path(sysconfig.get_path("scripts"))
PATIENCE = 900  # seconds that a command may take; the longest training takes five minutes
OF_FAIRSEQ = "preprocess train hydra-train generate interactive validate eval-lm score"
COMMANDS = {"smoe", *(f"fairseq-{name}" for name in OF_FAIRSEQ.split())}
PLUGIN = Path(__file__).parents[1] / "smoe_fairseq"
TORCH = Server(None, "import_torch")
FAIRSEQ = Server(TORCH, "import_fairseq")
WITH_PLUGIN = Server(FAIRSEQ, "import_plugin")
SMOE = Server(WITH_PLUGIN, "import_smoe")
RECIPES = Server(TORCH, "import_recipes")
STEP = ("-P", "-m", "smoe_fairseq.recipes")  # what Python is given for a recipe or one step of it
TORCHRUN = "smoe_fairseq.recipes.training.torchrun"  # and for torchrun in a recipe

# The stock model, small and shortly trained.
TINY = """--arch transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 --decoder-embed-dim 32
    --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --optimizer adam --lr 0.01
    --lr-scheduler inverse_sqrt --warmup-updates 4 --criterion label_smoothed_cross_entropy
    --max-tokens 300 --max-epoch 2 --no-epoch-checkpoints --cpu --num-workers 0""".split()


def run(
    *command, check=True, cwd=None, stdin="", fresh=False, **environment
) -> subprocess.CompletedProcess:
    """Runs a program of this environment (``fairseq-train``, ``smoe``, ``python``, ...).

    In the result, ``stdout`` holds stderr too; ``check`` fails the test on a non-zero status.
    fresh: the commands of fairseq and ours are started from nothing, as a shell does it. Else they are forked
    from a process that has made their imports, the plugin's too where they name it.
    """
    program, *arguments = map(str, command)
    path = sys.executable if program == "python" else str(SCRIPTS / program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if not fresh and (program in COMMANDS or tuple(arguments[:3]) == STEP):
        server = {"python": RECIPES, "smoe": SMOE}.get(program) or server_of(arguments)
        path = [] if program == "python" else [path]
        result = _fork(server, [*path, *arguments], environment, cwd or os.getcwd(), stdin)
    else:
        result = subprocess.run(
            [path, *arguments],
            cwd=cwd,
            env=environment,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
    return succeeded(result) if check else result


def server_of(arguments) -> Server:
    """The one that has imported the plugin, where this is what ``--user-dir`` says."""
    return WITH_PLUGIN if str(PLUGIN) in map(str, arguments) else FAIRSEQ


def run_python(program: str, *arguments, **options) -> subprocess.CompletedProcess:
    """``python -c``, as of `run_forked`."""
    return run_forked("-c", program, *arguments, **options)


def run_forked(*command, server: Server = TORCH, **environment) -> subprocess.CompletedProcess:
    """What follows ``python``, forked; by default from a process that has imported nothing of fairseq."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return _fork(server, [*map(str, command)], environment, os.getcwd(), "")


def without(*packages: str) -> str:
    """The first lines of a program that cannot import these packages, for `run_python`."""
    return f"""
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in {packages}]:
    del sys.modules[name]  # which the process that it is forked from has imported
class Missing:
    def find_spec(name, *more):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing)
"""


def run_step(*words, cwd, **environment) -> subprocess.CompletedProcess:
    """What ``scripts/`` call: ``python -P -m smoe_fairseq.recipes WORDS``, forked; outputs by themselves."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return _fork(RECIPES, [*STEP, *map(str, words)], environment, cwd, "", apart=True)


def step_here(*words, cwd, main=None, **environment) -> subprocess.CompletedProcess:
    """As `run_step`, in this process: for what starts no others, such as a report or a dry run."""
    if main is None:
        from smoe_fairseq.recipes.__main__ import main

    output, errors = io.StringIO(), io.StringIO()
    kept = {k: v for k, v in os.environ.items() if k not in ("RAW", "DATA_DIR", "RUN_DIR")}
    with (
        mock.patch.dict(os.environ, kept | environment, clear=True),
        mock.patch.object(sys, "argv", ["recipes", *map(str, words)]),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main()
        except SystemExit as error:
            status = error.code
    if isinstance(status, str):
        errors.write(f"{status}\n")
        status = 1
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def smoe(*words, check=True, cwd=None, **environment) -> subprocess.CompletedProcess:
    """``smoe WORDS``, in this process; as of `run`, ``stdout`` holds stderr too."""
    from smoe_fairseq.cli import main

    done = step_here(*words, cwd=cwd or os.getcwd(), main=main, **environment)
    done.stdout += done.stderr
    return succeeded(done) if check else done


def start(server: Server) -> list[str]:
    """The words before a program, or ``-c`` or ``-m``, by which a shell has it forked."""
    return [sys.executable, "-I", "-S", programs.__file__, server.address]


def bash_functions() -> dict[str, str]:
    """The environment in which bash forks the same commands; it takes a function before a program."""

    def function(name: str) -> str:
        server = {"smoe": SMOE, "fairseq-preprocess": FAIRSEQ}.get(name, WITH_PLUGIN)
        return f'() {{ {shlex.join(start(server))} {SCRIPTS / name} "$@"; }}'

    functions = {f"BASH_FUNC_{name}%%": function(name) for name in COMMANDS}
    functions["BASH_FUNC_python%%"] = (
        f'() {{ case "${{3:-}}" in "{STEP[2]}") {shlex.join(start(RECIPES))} "$@";; '
        f'{TORCHRUN}) if declare -F torchrun > {os.devnull}; then shift 3; torchrun "$@"; '
        'else command python "$@"; fi;; *) command python "$@";; esac; }'
    )
    return functions


def bash_torchrun() -> dict[str, str]:
    """The environment in which bash has the ranks of ``torchrun`` forked too (torchrun.py)."""
    file = Path(__file__).with_name("torchrun.py")
    words = [sys.executable, "-I", "-S", file, WITH_PLUGIN.address, SCRIPTS]
    return {"BASH_FUNC_torchrun%%": f'() {{ exec {shlex.join(map(str, words))} "$@"; }}'}


def _fork(
    server: Server, command, environment, folder, stdin, apart=False
) -> subprocess.CompletedProcess:
    """Its ``stdout`` holds stderr too, unless these are to be ``apart``."""
    with ExitStack() as stack:
        given, *said = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        files = (given.fileno(), said[0].fileno(), said[apart].fileno())
        status = server.start(command, environment, folder, files).wait(PATIENCE)
        for file in said:
            file.seek(0)
        output, errors = (file.read() for file in said)
    assert status is not None, (
        f"still running after {PATIENCE} s:\n{output[-4000:]}{errors[-4000:]}"
    )
    return subprocess.CompletedProcess(command, status, output, errors)


def touch_binarised(folder: Path, dataset: str, *pairs: str) -> Path:
    """Files of one byte in place of a data set's binarised text, for programs that do not read it."""
    from smoe_fairseq.recipes.datasets import load_dataset

    binary = folder / "data" / dataset / "bin"
    binary.mkdir(parents=True, exist_ok=True)
    for pair in pairs or load_dataset(dataset).pairs:
        for language in pair.split("-"):
            texts = (f"{split}.{pair}.{language}" for split in ("train", "valid"))
            names = (f"{text}.{end}" for text in texts for end in ("bin", "idx"))
            for name in (f"dict.{language}.txt", *names):
                (binary / name).write_text("x")
    return binary


def succeeded(result):
    """The same result, of a command that has ended with status 0."""
    output = result.stdout + (result.stderr or "")
    assert result.returncode == 0, output[-6000:]
    return result


def refused(result, *named) -> str:
    """The last line of a command that has ended with status 1, which is one sentence and has these words."""
    output = result.stdout + (result.stderr or "")
    last = output.splitlines()[-1] if output else ""
    assert result.returncode == 1, output[-4000:]
    assert "Traceback" not in output and "Exception ignored" not in output, output[-4000:]
    assert last.startswith("error: ") and all(str(each) in last for each in named), (last, named)
    return last


def sentence_of(function, *arguments, **options) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises((UsageError, ValueError)) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def put(name: str, tensor):
    """A change of a checkpoint: another weight."""
    return lambda state: state["model"].update({name: tensor})


def config_of(state: dict, part: str) -> dict:
    """A part of a checkpoint's config, which is a dictionary or an object, to be changed."""
    part = state["cfg"][part]
    return part if isinstance(part, dict) else vars(part)


def load(path: Path) -> dict:
    """What a checkpoint holds."""
    import fairseq.checkpoint_utils  # noqa: F401  (for the types that fairseq's checkpoints hold)
    import torch

    return torch.load(path, weights_only=True)


def changed(source: Path, path: Path, change) -> Path:
    """A copy of a checkpoint at ``path``, whose content ``change`` has changed."""
    import torch

    state = load(source)
    change(state)
    torch.save(state, path)
    return path


def untrained(source: Path, path: Path, data: Path, **options) -> Path:
    """A checkpoint as ``source``, of a model with other options and random weights.

    data: where its dictionaries are.
    """
    import torch
    from fairseq.data import Dictionary

    from smoe_fairseq.checkpoints.model import known_options, plain_config
    from smoe_fairseq.models.transformer import SMoETransformerModel

    class Task:
        source_dictionary = Dictionary.load(str(data / "dict.src.txt"))
        target_dictionary = Dictionary.load(str(data / "dict.tgt.txt"))

    state = load(source)
    options = known_options(source, state) | options
    torch.manual_seed(2)
    model = SMoETransformerModel.build_model(Namespace(**options), Task)
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin at 0 or 1
            parameter += 0.1 * torch.randn_like(parameter)
    state["cfg"]["model"] = plain_config(options)
    for record in ("smoe_experts", "last_optimizer_state"):  # of the other model
        state.pop(record, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "model": model.state_dict()}, path)
    return path


def no_room(*_, **__):
    """In the place of a function that writes: as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def preprocess(raw: Path, folder: Path, *flags) -> None:
    """``fairseq-preprocess`` from the tiny corpus's text to ``folder``."""
    prefixes = [f"--{split}pref={raw / split}" for split in ("train", "valid", "test")]
    run("fairseq-preprocess", "-s", "src", "-t", "tgt", "--destdir", folder, *prefixes, *flags)


def train(data, save_dir, *flags, check=True):
    return run("fairseq-train", data, "--save-dir", save_dir, *TINY, *flags, check=check)


def hydra_train(folder: Path, data: Path, model: dict, criterion: str, *words, **common) -> None:
    """``fairseq-hydra-train`` by a file, for two epochs into ``folder/run``."""
    config = {
        "common": {"cpu": True, **common},
        "task": {"_name": "translation", "data": str(data)},
        "model": model,
        "criterion": {"_name": criterion, "label_smoothing": 0.1},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 4},
        "dataset": {"max_tokens": 400, "num_workers": 0},
        "optimization": {"max_epoch": 2, "lr": [0.001]},
        "checkpoint": {"save_dir": str(folder / "run"), "no_epoch_checkpoints": True},
    }
    (folder / "c.yaml").write_text("# @package _group_\n" + json.dumps(config))
    run("fairseq-hydra-train", "--config-dir", folder, "--config-name", "c", *words, cwd=folder)


def generate(data, checkpoint, *flags):
    """Translates the test set; returns the best hypotheses and their scores by sentence number."""
    return hypotheses(run("fairseq-generate", *generation(data, checkpoint), *flags).stdout)


def generation(data, checkpoint):
    search = ("--beam", "3", "--max-len-b", "12")
    return [data, "--path", checkpoint, *search, "--cpu", "--num-workers", "0"]


def hypotheses(output):
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (float(score), words) for number, score, words in found}
