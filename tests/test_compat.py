"""The start-up hook, registration, the patches, each with what happens without it, and versions."""

from pathlib import Path

import pytest
import sacrebleu
from commands import PLUGIN, SCRIPTS, TINY, generation, refused, run, run_python, succeeded
from sampling import soak

from smoe_fairseq.cli import COMMANDS

# Runs a program of fairseq with every patch but one, through the start-up hook as always.
WITHOUT = """
import runpy, sys
import _smoe_fairseq_startup as startup
left_out, program, *arguments = sys.argv[1:]
startup.load("smoe_fairseq.errors")
startup.load("smoe_fairseq.files")
compat = startup.load("smoe_fairseq.compat")
kept = [patch for patch in compat.PATCHES if patch[1].__name__ != left_out]
assert len(kept) < len(compat.PATCHES)
compat.install(kept)
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
"""


def run_without(patch, program, *arguments):
    return run_python(WITHOUT, patch, SCRIPTS / program, *arguments, SMOE_DEBUG="1")


# The start-up hook, and the order in which things are imported


def test_hook_loads_nothing_until_fairseq_is_imported():
    program = """
import sys
heavy = {"torch", "numpy", "fairseq", "hydra", "omegaconf", "importlib.metadata"}
assert "SmoeFairseqHook" in [getattr(finder, "__name__", None) for finder in sys.meta_path]
assert not heavy & set(sys.modules) and not any("smoe" in name for name in sys.modules)
import fairseq
assert "smoe_fairseq.compat" in sys.modules and "smoe_fairseq" not in sys.modules
"""
    run("python", "-c", program)


# Each may be the first to import fairseq; the soak takes all.
COMMAND_MODULES = sorted({module for module, _ in COMMANDS.values()})
SOME = ("smoe_fairseq.checkpoints.imports", "smoe_fairseq.serve.server")
FIRST = """
import importlib, os, sys
import omegaconf, sacrebleu, torch
for name in sys.argv[1:]:
    if not (child := os.fork()):
        importlib.import_module(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.parametrize("modules", [SOME, soak(COMMAND_MODULES)])
def test_each_command_may_be_imported_first(modules):
    succeeded(run_python(FIRST, *modules))


@pytest.mark.parametrize(
    "imports",
    [
        "import fairseq, smoe_fairseq",
        soak("import smoe_fairseq.criterions"),
        soak("import importlib.util as i, smoe_fairseq; i.find_spec('fairseq'); import fairseq"),
        "import fairseq; user_dir(); import smoe_fairseq; user_dir()",
    ],
)
def test_plugin_is_registered_in_whatever_order_it_is_imported(imports):
    program = f"""
import argparse
def user_dir():
    fairseq.utils.import_user_module(argparse.Namespace(user_dir={str(PLUGIN)!r}))
{imports}
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
assert "smoe_transformer" in ARCH_MODEL_REGISTRY
assert "smoe_label_smoothed_cross_entropy" in CRITERION_REGISTRY
"""
    succeeded(run_python(program))


# Each patch: what happens without it


SMOE = f"--user-dir {PLUGIN} --arch smoe_transformer_tiny --smoe-strata 2-2 --max-update 2".split()
SMOE += ["--no-share-all-embeddings", "--criterion", "smoe_label_smoothed_cross_entropy"]
WITHOUT_PATCH = {  # what fairseq's command says then
    "hash_dataclasses": ("train", ["--help"], "mutable default"),
    "allow_checkpoint_types": ("generate", [], "argparse.Namespace"),
    "avoid_fast_path": ("generate", [], "Mask Type should be defined"),
    "keep_bf16_off_tpu": ("train", ["--bf16", "--max-update", 2], "xla_device"),
    "import_user_dir_first": ("hydra-train", [], "Could not find"),
    "quiet_hydra": ("generate", [], "version_base parameter is not specified"),
    "check_values": ("train", ["--max-update", -1], "done training"),
    "keep_lines_short": ("train", [*SMOE, "--log-interval", 1], "encoder.layer.1/"),
    "give_nan_for_missing": ("train", ["--best-checkpoint-metric", "none"], "KeyError"),
}


@pytest.mark.parametrize("patch", [soak(patch) for patch in WITHOUT_PATCH])
def test_what_happens_without_a_patch(corpus, post_norm, tmp_path, patch):
    command, more, words = WITHOUT_PATCH[patch]
    hydra = ("--cfg", "job", f"common.user_dir={PLUGIN}", "model=smoe_transformer")
    given = {
        "train": (corpus, "--save-dir", tmp_path, *TINY),
        "generate": generation(corpus, post_norm),
        "hydra-train": (*hydra, "criterion=smoe_label_smoothed_cross_entropy"),
    }[command]
    command = (f"fairseq-{command}", *given, *more)
    assert words in run_without(patch, *command).stdout
    assert words == "done training" or words not in run(*command, check=False, cwd=tmp_path).stdout


def test_a_folder_that_holds_a_dictionary_is_named(raw_corpus, tmp_path):
    (tmp_path / "dict.src.txt").write_text("a 1\n")
    command = ("fairseq-preprocess", "-s", "src", "-t", "tgt", "--destdir", tmp_path)
    result = run(*command, "--trainpref", raw_corpus / "train", check=False)
    assert "Error:" not in refused(result, tmp_path / "dict.src.txt")


def test_a_tpu_that_was_asked_for_is_not_taken_away():
    from fairseq import options

    words = ["data", "--arch", "transformer", "--bf16"]
    for tpu in ([], ["--tpu"]):
        args = options.parse_args_and_arch(options.get_training_parser(), [*words, *tpu])
        assert args.bf16 and args.tpu == bool(tpu)


def test_older_kinds_of_data_sets_are_refused(raw_corpus, tmp_path):
    words = ("-s", "src", "-t", "tgt", "--destdir", tmp_path, "--trainpref", raw_corpus / "train")
    words += ("--dataset-impl", "cached")
    refused(run("fairseq-preprocess", *words, check=False), "--dataset-impl")


HUFFMAN = """
from fairseq.data import huffman
builder = huffman.HuffmanCodeBuilder()
builder.add_symbols("a", "b", "a", "c")
coder = builder.build_code()
found = coder.decode(coder.encode(["a", "c", "b"]))
assert [node.symbol for node in found] == ["a", "c", "b"]
"""


def test_huffman_codes_are_read_on_any_bitarray():
    succeeded(run_python(HUFFMAN))


@pytest.mark.soak
def test_without_its_patch_they_are_not(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HUFFMAN)
    assert run_without("find_last_bit", program).returncode


@pytest.mark.soak
def test_buckets_of_lengths_are_made_on_any_numpy(corpus, tmp_path):
    more = ("--num-batch-buckets", 2, "--max-update", 1, "--disable-validation")
    result = run("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, *more, fresh=True)
    assert "bucketing target lengths" in result.stdout


@pytest.mark.soak
def test_fairseq_score_reads_files_on_any_sacrebleu(tmp_path):
    texts = {"sys": "a b c d e\nf g h i\n", "ref": "a b c d e\nf g h x\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    words = ("--sys", tmp_path / "sys", "--ref", tmp_path / "ref", "--sacrebleu")
    result = run("fairseq-score", *words)
    by_sentence = run("fairseq-score", *words[:-1], "--sentence-bleu")
    assert "BLEU4 = 100.00" in by_sentence.stdout
    sys, ref = (text.splitlines() for text in texts.values())
    assert f"BLEU = {sacrebleu.corpus_bleu(sys, [ref]).score:.2f}" in result.stdout
    (tmp_path / "ref").write_text(texts["ref"] + "one line more\n")
    # As a shell starts it: the patches come while it is being imported.
    refused(run("fairseq-score", *words[:-1], fresh=True, check=False), "--sys and --ref")
    refused(run("fairseq-score", *words, check=False), "--sys and --ref")


def test_a_buffer_that_fairseq_never_sets_is_zero(monkeypatch):
    """And not what memory happens to hold, in a new model and in one that is loaded."""
    import torch
    from fairseq.modules import SinusoidalPositionalEmbedding

    monkeypatch.setattr(torch, "FloatTensor", lambda size: torch.full((size,), torch.nan))
    positions = SinusoidalPositionalEmbedding(8, 1)
    assert positions._float_tensor.tolist() == [0]
    positions.load_state_dict({"_float_tensor": torch.FloatTensor(1)})
    assert positions._float_tensor.tolist() == [0]


def test_a_data_class_of_a_plugin_may_hold_another():
    """fairseq's own tests have these; Python 3.11 refuses such a default. And nothing is said."""
    program = """
import smoe_fairseq.models
from fairseq.dataclass import FairseqDataclass
from dataclasses import dataclass
@dataclass
class A(FairseqDataclass):
    number: int = 1
@dataclass
class B(FairseqDataclass):
    a: A = A()
assert "kw_only" in dataclass.__kwdefaults__  # which torch 2.6 asks for
"""
    result = run_python(program)
    assert (result.returncode, result.stdout) == (0, "")


# Other programs than fairseq's commands: exceptions, and nothing read from the command line


def test_another_program_gets_exceptions_and_only_its_own_words(corpus, pre_norm, tmp_path):
    training = [str(word) for word in (corpus, "--save-dir", tmp_path, *TINY, "--max-tokens", 3)]
    (tmp_path / "checkpoint1.pt").touch()  # fairseq's tests train anew beside such files
    program = f"""
from fairseq import distributed_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train
words = ["data", "--path", {str(pre_norm)!r}, "--max-tokens", "10"]
args = options.parse_args_and_arch(options.get_validation_parser(), words)
assert args.task == "translation"
assert options.get_validation_parser("translation_lev").get_default("task") == "translation_lev"
args = options.parse_args_and_arch(options.get_training_parser(), {training!r})
try:
    distributed_utils.call_main(convert_namespace_to_omegaconf(args), train.main)
except AssertionError:
    pass
"""
    succeeded(run_python(program, *"--arch nope --task nope --path none.pt".split()))


def test_the_stack_trace_of_another_programs_own_fault_is_printed():
    result = run_python("import fairseq_cli.train; {}['of its own']")
    assert result.returncode and "Traceback (most recent call last)" in result.stdout
    assert "error: " not in result.stdout


def test_an_average_is_read_from_a_file_of_it_alone(tmp_path):
    import torch
    from fairseq.checkpoint_utils import load_ema_from_checkpoint

    weights = {"w": torch.ones(2)}
    torch.save({"model": {"w": torch.zeros(2)}, "extra_state": {"ema": weights}}, tmp_path / "a.pt")
    assert load_ema_from_checkpoint(str(tmp_path / "a.pt"))["model"]["w"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["x.pt", "checkpoint_best.pt", "average.pt"])
def test_a_missing_file_to_restore_is_a_new_run_unless_it_seems_mistyped(corpus, tmp_path, name):
    """fairseq's users write --restore-file x.pt for a new run."""
    (tmp_path / "checkpoint_best2.pt").touch()
    flags = ("--restore-file", name, "--max-update", 1, "--disable-validation")
    result = run("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, *flags, check=False)
    assert result.returncode == (name != "x.pt")
    line = next(line for line in result.stdout.splitlines() if "is missing" in line)
    assert f"--restore-file {name}" in line
    assert (tmp_path / "checkpoint_last.pt").exists() == (name == "x.pt")


@pytest.mark.parametrize(
    "names, newest",
    [
        ("checkpoint_last.pt/folder", "checkpoint_last.pt"),
        ("checkpoint_1_99.pt checkpoint2.pt checkpoint_best.pt", "checkpoint2.pt"),
        soak("checkpoint_best-rank-0.pt", "checkpoint_best.pt"),
    ],
)
def test_a_new_training_replaces_no_checkpoints(corpus, tmp_path, names, newest):
    files = [tmp_path / name for name in names.split()]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    result = run("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, check=False)
    refused(result, tmp_path / newest)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)


# The right fairseq, or one sentence


def pretend(folder: Path, version: str) -> None:
    """That this fairseq is installed there."""
    info = folder / f"fairseq-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fairseq\nVersion: {version}")


@pytest.mark.parametrize("version, named", [(None, "not installed"), ("0.10.2", "0.10.2")])
def test_without_the_right_fairseq_a_command_is_one_sentence(tmp_path, version, named):
    if version:
        pretend(tmp_path, version)
    environment = {"PYTHONPATH": f"{tmp_path}:{PLUGIN.parent}", "PYTHONWARNINGS": "ignore"}
    # -S leaves the installed packages out.
    words = ("python", "-S", "-m", "smoe_fairseq.cli", "cost")
    result = run(*words, check=False, **environment)
    refused(result, named, "fairseq==0.12.2")
    assert result.stdout.count("\n") == 1


def test_another_fairseq_is_left_alone_with_a_warning(tmp_path):
    pretend(tmp_path, "0.13.0")
    source = "import dataclasses; print(dataclasses.dataclass.__code__.co_filename)"
    (tmp_path / "fairseq.py").write_text(source)
    result = run("python", "-c", "import fairseq", PYTHONPATH=str(tmp_path))
    assert "needs fairseq 0.12.2, but 0.13.0 is installed" in result.stdout
    assert result.stdout.endswith("/dataclasses.py\n")


@pytest.mark.soak
def test_without_its_patch_the_default_back_end_refuses_the_cpu(ranks, corpus, tmp_path):
    """With it: see test_several_processes.py."""
    words = (SCRIPTS / "fairseq-train", corpus, *TINY, "--save-dir", tmp_path / "new")
    words += ("--max-update", "2", "--distributed-backend", "gloo")
    run = ranks.start(tmp_path, 2, "wrap_any_model", *words, program=WITHOUT)
    assert 0 not in run.wait()
    assert "device_ids and output_device arguments" in run.output()


LEFT_ITERATOR = """
import gc, multiprocessing, sys, torch
from fairseq.data.iterators import EpochBatchIterator

gc.disable()
data = torch.utils.data.TensorDataset(torch.arange(5))
itr = EpochBatchIterator(data, list, [[0, 1], [2, 3], [4]], num_workers=2)
epoch = itr.next_epoch_itr()
assert sorted(len(batch) for batch in epoch) == [1, 2, 2]
before = multiprocessing.active_children()
del itr, epoch
sys.exit(f"{len(before)} processes, then {len(multiprocessing.active_children())}")
"""


@pytest.mark.soak
def test_without_its_patch_processes_outlive_the_iterator_that_they_load_for(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LEFT_ITERATOR)
    ends = [run_python(f"import runpy; runpy.run_path({str(program)!r})")]
    ends.append(run_without("end_loading_processes", program))
    assert [end.stdout.splitlines()[-1] for end in ends] == [f"2 processes, then {n}" for n in "02"]
