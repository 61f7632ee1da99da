"""Fixtures that several test files share."""

import gc
import json
import os
import random
import shutil
import signal
import tarfile
from pathlib import Path

import handmade
import pretrained
import pytest
from commands import changed, config_of, preprocess, run, succeeded, train
from filelock import FileLock
from plain_loops import EXECUTIONS, executing
from ranks import Ranks
from sampling import pairwise
from warm import quicken_hydra

gc.disable()  # until all modules are imported, a sixth sooner

# Which recipes take seconds for; test_forecast.py asks for it.
os.environ.setdefault("FORECAST", "0")

# nohup and a shell's background ignore some of these, and every process started from there with them. One
# that starts from a handler has the default.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_addoption(parser):
    parser.addoption(
        "--full-grid",
        action="store_true",
        help="all combinations, also of tests that are run for a sample of them",
    )


def pytest_collection_finish():
    quicken_hydra()  # only now, since the process that shares the tests needs no hydra
    # What modules hold is not searched for garbage again and again.
    gc.collect()
    gc.freeze()
    gc.enable()


# These files take longest: the processes that share the tests begin with them, and so end together.
LONG = """golden serve expert_parallel_checkpoints family_training prune translator malicious_checkpoints
    expert_parallel huggingface language_model_commands family preparation analyze average
    expert_parallel_hangs readers recipes other_ranks dictionaries expert_parallel_recovery compat
    one_engine checkpoint_content block upcycle serve_limits""".split()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test with three sets of parameters or more, a pairwise sample is run (sampling.py)."""
    first = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path.name, len(LONG)))
    if config.getoption("--full-grid"):
        return
    left_out = {item for item in items if item.get_closest_marker("rest")}
    grids = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("soak"):
            grids.setdefault((item.path, item.originalname), []).append(item)
    for grid in grids.values():
        chosen = pairwise([parameters(item) for item in grid])
        if chosen and not grid[0].get_closest_marker("full_grid"):
            left_out |= set(grid) - {grid[i] for i in chosen}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def parameters(item) -> dict:
    """What an item was given by each `parametrize`, and by each fixture that has parameters."""
    left = dict(item.callspec.params)
    found = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        found[tuple(names)] = tuple(id(left.pop(name)) for name in names)
    return found | {(name,): (id(value),) for name, value in left.items()}


@pytest.fixture(params=EXECUTIONS)
def execution(request) -> str:
    """Each of two executions, in any type."""
    with executing(request.param):
        yield request.param


@pytest.fixture(scope="session")
def raw_corpus(tmp_path_factory) -> Path:
    """A folder with {train,valid,test}.{src,tgt}; the target is the source in upper case."""
    folder = tmp_path_factory.mktemp("raw")
    generator = random.Random(1)
    for split, size in (("train", 160), ("valid", 16), ("test", 16)):
        lines = [" ".join(generator.choices("abcdefghijkl", k=k % 7 + 2)) for k in range(size)]
        (folder / f"{split}.src").write_text("\n".join(lines) + "\n")
        (folder / f"{split}.tgt").write_text("\n".join(lines).upper() + "\n")
    return folder


@pytest.fixture(scope="session")
def corpus(raw_corpus, tmp_path_factory) -> Path:
    """The tiny corpus as ``fairseq-preprocess`` makes it: the folder that fairseq-train takes."""
    return shared(tmp_path_factory, "corpus", lambda folder: preprocess(raw_corpus, folder))


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory) -> Path:
    """50 sentences, the same in training and test; the target is upper case in reverse order."""
    raw = tmp_path_factory.mktemp("raw50")
    generator = random.Random(4)
    words = [f"{a}{b}" for a in "abcd" for b in "xyz"]
    sentences = [generator.choices(words, k=3 + i % 6) for i in range(50)]
    for split in ("train", "valid", "test"):
        (raw / f"{split}.src").write_text("".join(" ".join(s) + "\n" for s in sentences))
        reverse = "".join(" ".join(s[::-1]).upper() + "\n" for s in sentences)
        (raw / f"{split}.tgt").write_text(reverse)
    make = lambda folder: preprocess(raw, folder, "--joined-dictionary")  # noqa: E731
    return shared(tmp_path_factory, "small-corpus", make)


@pytest.fixture(scope="session")
def english(tmp_path_factory) -> Path:
    """English sentences of the built-in corpus, as ``fairseq-preprocess --only-source`` makes them."""
    from smoe_fairseq.recipes.data import readers
    from smoe_fairseq.recipes.folders import package_folder

    raw, data = tmp_path_factory.mktemp("raw-english"), tmp_path_factory.mktemp("bin-english")
    file = Path(package_folder("recipes", "phrasebook")).absolute() / "train.tsv.xz"
    lines = [english for english, _ in readers.pairs({"eng": file, "cat": file})]
    texts = []
    for split, start, stop in (("train", 0, 400), ("valid", 400, 440), ("test", 440, 450)):
        (raw / f"{split}.eng").write_text("".join(f"{line}\n" for line in lines[start:stop]))
        texts.append(f"--{split}pref={raw / split}.eng")
    run("fairseq-preprocess", "--only-source", "--destdir", data, *texts)
    return data


@pytest.fixture(scope="session")
def two_updates(small_corpus, tmp_path_factory) -> Path:
    """The folder of a run of a tiny SMoE that has ended."""
    from test_training import train as train_smoe

    make = lambda folder: train_smoe(small_corpus, folder, "--max-update", 2)  # noqa: E731
    return shared(tmp_path_factory, "two-updates", make)


@pytest.fixture(scope="session")
def sparse(two_updates) -> Path:
    """Its checkpoint."""
    return two_updates / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def hyphens(sparse, small_corpus, tmp_path_factory) -> Path:
    """This run and its data in one folder, from ``en`` to ``zh-CN``."""
    folder = tmp_path_factory.mktemp("hyphens")
    for file in small_corpus.iterdir():
        name = file.name.replace("src-tgt", "en-zh-CN").replace(".src", ".en")
        shutil.copy(file, folder / name.replace(".tgt", ".zh-CN"))
    named = {"source_lang": "en", "target_lang": "zh-CN", "data": str(folder)}
    checkpoint = folder / "checkpoint_last.pt"
    changed(sparse, checkpoint, lambda state: config_of(state, "task").update(named))
    return folder


@pytest.fixture(scope="session")
def dense(small_corpus, tmp_path_factory) -> Path:
    """A checkpoint of a dense model of ours, which translates most sentences differently."""
    from test_training import train as train_smoe

    def make(folder):
        folder /= "run"
        at_the_end = ("--disable-validation", "--save-interval", 1000)
        train_smoe(small_corpus, folder, "--moe-freq", 0, "--max-update", 150, *at_the_end)

    return shared(tmp_path_factory, "dense", make) / "run/checkpoint_last.pt"


@pytest.fixture(scope="session")
def pre_norm(corpus, tmp_path_factory) -> Path:
    """A checkpoint of fairseq's stock model, pre-norm."""
    norms = ("--encoder-normalize-before", "--decoder-normalize-before")
    make = lambda folder: train(corpus, folder, *norms)  # noqa: E731
    return shared(tmp_path_factory, "pre-norm", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def post_norm(corpus, tmp_path_factory) -> Path:
    """A checkpoint of fairseq's stock model, post-norm, whose meters hold numpy arrays.

    Its batches are read as they are by default, by a process of their own.
    """
    flags = ("--eval-bleu", "--eval-bleu-remove-bpe", "--num-workers", 1)
    make = lambda folder: train(corpus, folder, *flags)  # noqa: E731
    return shared(tmp_path_factory, "post-norm", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def three_languages(tmp_path_factory) -> Path:
    """Two language pairs with one dictionary, of which all is known on paper."""
    return handmade.write_corpus(tmp_path_factory.mktemp("three-languages"))


@pytest.fixture(scope="session")
def multilingual(three_languages, tmp_path_factory) -> Path:
    """A checkpoint of all directions after two updates, with its log and TensorBoard's events."""
    folder = tmp_path_factory.mktemp("multilingual")
    events = ("--tensorboard-logdir", folder / "events")
    handmade.train(three_languages, folder, *handmade.MULTILINGUAL, *events)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def gates_by_hand(multilingual) -> Path:
    return handmade.fix_gates(multilingual, handmade.symbols(len(handmade.LANGUAGES)))


def shared(tmp_path_factory, name: str, make) -> Path:
    """A folder that takes long to ``make``, which one of pytest-xdist's processes does for all."""
    top = tmp_path_factory.getbasetemp()
    folder = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / name
    with FileLock(f"{folder}.lock"):
        if not folder.with_suffix(".done").exists():
            folder.mkdir()
            make(folder)
            folder.with_suffix(".done").touch()
    return folder


@pytest.fixture(scope="session")
def m2m(tmp_path_factory) -> Path:
    """A folder of transformers with a small M2M-100 of random weights."""
    return shared(tmp_path_factory, "m2m", lambda folder: pretrained.write_model(folder, "m2m"))


@pytest.fixture(scope="session")
def nllb(tmp_path_factory) -> Path:
    """A folder of transformers with a small NLLB-200, trained a little."""
    make = lambda folder: pretrained.write_model(folder, "nllb", 80)  # noqa: E731
    return shared(tmp_path_factory, "nllb", make)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    """A folder of the checkpoints in ``tests/golden``, with the text that they have learnt."""
    from test_golden import CHECKPOINTS, TEXT

    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(CHECKPOINTS) as archive:
        # The filter for data where Python has it, which 3.11.2 of Debian 12 does not.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    for file in TEXT.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def phrasebook(tmp_path_factory) -> Path:
    """A folder in which the recipe has prepared the built-in corpus."""
    from test_recipes import recipe

    make = lambda folder: succeeded(recipe(folder, "prepare", "phrasebook"))  # noqa: E731
    return shared(tmp_path_factory, "phrasebook", make)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """From raw text to scores by the recipes: two pairs, one with test data, and a run that has words.

    What each recipe printed is in ``said.json``.
    """
    return shared(tmp_path_factory, "prepared", prepare)


def prepare(folder: Path) -> None:
    from test_recipes import recipe, write_dataset, write_text

    raw = write_text(folder / "text", "en-fr", train=300, valid=20, test=12)
    write_text(raw, "en-de", train=30, valid=20)
    sizes = {"encoder-embed-dim": 64, "encoder-ffn-embed-dim": 64, "encoder-attention-heads": 2}
    training = {"arch": "smoe_transformer_tiny", "max-tokens": 600, "max-update": 60, **sizes}
    training |= {"lr": 0.01, "warmup-updates": 5, "validate-interval": 100, "save-interval": 100}
    given = write_dataset(
        *(folder / "configs", "tiny"),
        pairs=["en-fr", "en-de"],
        raw={},
        subwords={"vocab-size": 60},
        train={**training, "num-workers": 0},
        generate={"max-tokens": 1000, "max-len-b": 10, "num-workers": 0},
    )
    said = {}
    for name, words in {
        "prepare": ("prepare", "tiny"),
        "train": ("train", "tiny", "smoe-2-2"),
        "evaluate": ("evaluate", "tiny", "smoe-2-2", "--beam", "2"),
        "table": ("table", "tiny"),
        "again": ("prepare", "tiny"),
    }.items():
        result = succeeded(recipe(folder, *words, RAW=str(raw), OMP_NUM_THREADS="1", **given))
        said[name] = {"stdout": result.stdout, "stderr": result.stderr}
    (folder / "said.json").write_text(json.dumps(said))


@pytest.fixture(scope="session")
def tiny_run(prepared) -> Path:
    """The run's folder."""
    return prepared / "runs/tiny/smoe-2-2"


@pytest.fixture(scope="session")
def ranks():
    """Starts runs of several processes."""
    return Ranks()
