"""A dictionary of the same size in another order: noticed wherever a checkpoint meets it."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from commands import changed, generation, preprocess, refused, run, smoe
from fairseq.data import Dictionary
from sampling import soak
from test_expert_parallel_checkpoints import call, refusal
from test_lock import GLOO, SMALL
from test_trainer import MOE

from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.checkpoints.trained_with import (
    DICTIONARIES,
    dictionary_checksums,
    dictionary_mismatch,
)

PLUGIN = SMALL[1]


@pytest.fixture(scope="module")
def data(raw_corpus, tmp_path_factory) -> list[Path]:
    """The same text by a dictionary, and by one with its words in reverse order."""
    top = tmp_path_factory.mktemp("dictionaries")
    preprocess(raw_corpus, top / "one", "--joined-dictionary")
    words = (top / "one/dict.src.txt").read_text().splitlines()
    (top / "dict.txt").write_text("\n".join(reversed(words)) + "\n")
    preprocess(raw_corpus, top / "other", "--joined-dictionary", "--srcdict", top / "dict.txt")
    return [top / "one", top / "other"]


@pytest.fixture(scope="module")
def trained(ranks, data, tmp_path_factory) -> Path:
    """A sparse model, trained with the first."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.train(folder / "logs", 1, data[0], "--save-dir", folder, *MOE, one=True)
    return folder / "checkpoint_last.pt"


def sentence(checkpoint, file, name="source") -> str:
    return f"{checkpoint} was trained with another {name} dictionary than {file}: "


@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
def test_training(ranks, data, trained, tmp_path, flag):
    """With the same dictionary training goes on: test_training.py, test_upcycle.py."""
    words = ["--save-dir", tmp_path / "new", *MOE, "--max-update", 2, flag, trained]
    said = sentence(trained, data[1] / "dict.src.txt")
    ranks.start(tmp_path, 1, data[1], *words, one=True).refused(said)
    assert not list((tmp_path / "new").glob("*.pt"))


def test_the_other_direction_of_a_joint_dictionary(data, trained, tmp_path):
    """All tensors fit, and nothing but the settings tells that the model does not know it."""
    trained = changed(trained, tmp_path / "directed.pt", directed("src", "tgt"))
    words = [*generation(data[0], trained), "--user-dir", PLUGIN]
    said = run("fairseq-generate", *words, "-s", "tgt", "-t", "src", check=False)
    refused(said, trained, "--source-lang src", "--target-lang tgt")
    assert "H-0" in run("fairseq-generate", *words, "-s", "src", "-t", "tgt").stdout


@pytest.mark.soak
def test_training_over_processes(ranks, data, trained, tmp_path):
    """Each ends by itself, with the sentence."""
    words = [*MOE, *GLOO, "--max-update", 2, "--save-dir", tmp_path, "--restore-file", trained]
    process = ranks.start(tmp_path / "logs", 2, data[1], *words)
    assert process.wait(60) == [1, 1], process.output()
    for rank in (0, 1):
        assert "was trained with another source dictionary than" in process.output(rank)
        assert "Traceback" not in process.output(rank)


def test_checksums_are_in_every_file_of_a_set(trained, tmp_path):
    call("reshard", trained, "--world-size", 2, "--output", tmp_path / "set.pt")
    assert open_checkpoint(tmp_path / "set-rank-1.pt")[DICTIONARIES]


def test_translating_and_validating(data, trained):
    given = ["--user-dir", PLUGIN, "--path", trained, "--cpu"]
    validate = ["fairseq-validate", "--task", "translation", "--max-tokens", 400]
    for program, *more in (["fairseq-generate", "--max-len-b", 5], validate):
        result = run(program, data[1], *given, *more, check=False)
        refused(result, sentence(trained, data[1] / "dict.src.txt"))


def test_analysing(data, trained, tmp_path):
    words = sentence(trained, data[1] / "dict.src.txt")
    output = tmp_path / "new"
    given = refusal("analyze", data[1], "--path", trained, "--output", output, "--cpu")
    assert given.startswith(f"error: {words}") and not output.exists()
    assert refusal("cost", "--path", trained, data[1]).startswith(f"error: {words}")
    call("cost", "--path", trained, data[0])


OTHER_TOKEN = "{'main': ('src', None)}"
SEVERAL = ["--task", "translation_multi_simple_epoch", "--encoder-langtok", "tgt"]
SEVERAL += ["--lang-pairs", "src-tgt,tgt-src"]


@pytest.fixture(scope="module")
def several(ranks, data, tmp_path_factory) -> Path:
    """A model of two languages."""
    folder = tmp_path_factory.mktemp("several")
    words = ["--save-dir", folder, *MOE, *SEVERAL, "--langs", "src,tgt"]
    ranks.train(folder / "logs", 1, data[0], *words, one=True)
    return folder / "checkpoint_last.pt"


def test_the_folder_above_the_binarised_data_is_answered_with_it(data, trained, tmp_path):
    (tmp_path / "bin").symlink_to(data[0])
    given = ["--path", trained, "--cpu"]
    assert f"{tmp_path}/bin" in refusal("analyze", tmp_path, *given, "--output", tmp_path / "new")
    words = ("fairseq-generate", tmp_path, "--user-dir", PLUGIN, *given)
    refused(run(*words, check=False), tmp_path / "bin")


def test_folders_of_data_have_one_dictionary(data, tmp_path):
    words = ["--user-dir", PLUGIN, "--save-dir", tmp_path, *MOE, "--cpu"]
    both = f"{data[0]}:{data[1]}"
    refused(run("fairseq-train", both, *words, check=False), data[1] / "dict.src.txt")
    words += [*SEVERAL, "--langs", "src,tgt", "--extra-data", f"{{'more': '{data[1]}'}}"]
    refused(run("fairseq-train", data[0], *words, check=False), data[1] / "dict.src.txt")


def test_interactive_needs_a_direction(data, several):
    words = ["--user-dir", PLUGIN, "--path", several, "--cpu", *SEVERAL, "--langs", "src,tgt"]
    said = run("fairseq-interactive", data[0], *words, stdin="a\n", check=False)
    refused(said, "--source-lang")


def test_other_languages_than_those_of_the_training(ranks, data, several, tmp_path):
    """Each of --langs is a word of the dictionary."""
    words = [*MOE, *SEVERAL, "--langs", "src,tgt,de", "--finetune-from-model", several]
    words += ["--save-dir", tmp_path / "new"]
    ranks.start(tmp_path, 1, data[0], *words, one=True).refused("--langs", data[0])


FAULTS = {  # of the files of a preparation: the change, and what is named
    "a dictionary that is not as the others": (
        lambda folder, other: (folder / "dict.tgt.txt").write_text("a 1\n"),
        "dict.tgt.txt",
    ),
    "a byte order mark": (
        lambda folder, other: (folder / "dict.tgt.txt").write_text(
            (other / "dict.tgt.txt").read_text(), encoding="utf-8-sig"
        ),
        "dict.tgt.txt",
    ),
    "one side of another text": (
        lambda folder, other: [
            shutil.copy(other / f"valid.src-tgt.src.{kind}", folder / f"train.src-tgt.src.{kind}")
            for kind in ("idx", "bin")
        ],
        "train.src-tgt.src.idx",
    ),
    "no text to validate": (
        lambda folder, other: [file.unlink() for file in folder.glob("valid.*")],
        "valid.src-tgt",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_belong_together_are_named(data, tmp_path, fault):
    folder = shutil.copytree(data[0], tmp_path / "data")
    change, named = FAULTS[fault]
    change(folder, data[0])
    words = [*MOE, *SEVERAL, "--langs", "src,tgt", "--save-dir", tmp_path / "new", "--cpu"]
    result = run("fairseq-train", folder, "--user-dir", PLUGIN, *words, check=False)
    refused(result, folder, named)


def test_a_byte_order_mark_may_be_a_word_of_a_dictionary(tmp_path):
    """As where texts were joined, and nothing removes their marks."""
    (tmp_path / "dict.txt").write_text("a 2\n\ufeff 1\n")
    assert Dictionary.load(str(tmp_path / "dict.txt")).symbols[-2:] == ["a", "\ufeff"]


@pytest.mark.parametrize("pair", ["src-other", soak("src"), soak("tgt-tgt")])
def test_a_pair_that_the_data_lack_is_named(data, tmp_path, pair):
    words = [*MOE, *SEVERAL, "--langs", "src,tgt", "--lang-pairs", pair, "--cpu"]
    words += ["--user-dir", PLUGIN, "--save-dir", tmp_path]
    refused(run("fairseq-train", data[0], *words, check=False), data[0], f"--lang-pairs {pair}")


@pytest.mark.parametrize(
    "flag",
    ["--encoder-langtok tgt", "--task translation_m", soak("--langs src,tgt"), soak("--langtoks")],
)
def test_a_flag_of_the_training_that_generation_lacks_is_named(data, several, flag):
    """Without the language's token the translation would be wrong; else the data would be blamed."""
    task = "--task translation_multi_simple_epoch --lang-pairs src-tgt,tgt-src --langs".split()
    given = {
        "--encoder-langtok tgt": [*task, "src,tgt"],
        "--langs src,tgt": [*task, "src,tgt,other", "--encoder-langtok", "tgt"],
        "--task translation_m": ["--task", "translation"],
        "--langtoks": [*task, "src,tgt", "--encoder-langtok", "tgt", "--langtoks", OTHER_TOKEN],
    }[flag]
    words = ["--user-dir", PLUGIN, "--path", several, "--cpu", "-s", "src", "-t", "tgt"]
    refused(run("fairseq-generate", data[0], *words, *given, check=False), several, flag)


def directed(*languages: str):
    given = dict(zip(("source_lang", "target_lang"), languages))
    return lambda state: state["cfg"]["task"].update(given)


def with_token(state) -> None:
    vars(state["cfg"]["task"]).update(encoder_langtok="src", langtoks={"main": ("src", None)})


@pytest.mark.parametrize(
    "model, changes, flag",
    [
        ("trained", (directed("src", "tgt"), directed("tgt", "src")), "--source-lang tgt"),
        ("several", (lambda state: None, with_token), "--encoder-langtok src"),
    ],
)
def test_models_that_read_text_otherwise_have_no_mean(
    data, tmp_path, request, model, changes, flag
):
    """Neither of their probabilities nor of their weights."""
    path = request.getfixturevalue(model)
    both = [changed(path, tmp_path / f"{n}.pt", change) for n, change in enumerate(changes)]
    languages = ("--from", "src", "--to", "tgt") if model == "several" else ()
    refused(smoe("translate", *both, "--data", data[0], *languages, check=False), both[1], flag)
    if model == "trained":
        words = (*generation(data[0], ":".join(map(str, both))), "--user-dir", PLUGIN)
        said = run("fairseq-generate", *words, "-s", "src", "-t", "tgt", check=False)
        refused(said, both[1], flag)
    assert flag in refusal("average", *both, "--output", tmp_path / "mean.pt")
    assert not (tmp_path / "mean.pt").exists()


# Checksums of tasks of all kinds


def dictionary(*words) -> Dictionary:
    made = Dictionary()
    for word in words:
        made.add_symbol(word)
    return made


def test_tasks_of_several_languages_note_each():
    """In training and translation fairseq calls other languages source and target."""
    several = {"en": dictionary("a", "b"), "de": dictionary("b", "a"), "fr": dictionary("a")}
    trained = Namespace(data_manager=Namespace(dicts=several), source_dictionary=several["en"])
    for task in (trained, Namespace(dicts=several)):
        assert dictionary_checksums(task).keys() == {"en", "de", "fr"}
    content = {DICTIONARIES: dictionary_checksums(trained)}
    of_one = Namespace(data_manager=Namespace(dicts={"de": several["de"]}))
    assert dictionary_mismatch("model.pt", content, of_one) is None
    of_one.data_manager.dicts = {"de": several["en"]}
    found = dictionary_mismatch("model.pt", content, of_one)
    assert "another de dictionary than the de dictionary: both have 6 words" in found
    assert "--langs in the same order" in found


def test_other_sizes_are_left_to_the_model():
    """Some models take a dictionary with a word less (BART, which is trained with a mask)."""
    one, other = (Namespace(source_dictionary=dictionary(*w)) for w in (["a", "<mask>"], ["a"]))
    assert dictionary_mismatch("model.pt", {DICTIONARIES: dictionary_checksums(one)}, other) is None


def test_it_is_the_order_of_the_words_that_counts():
    one, same, other = dictionary("a", "b"), dictionary("a", "b"), dictionary("b", "a")
    one.add_symbol("a", n=7)  # counts are not compared
    sums = [dictionary_checksums(Namespace(target_dictionary=d)) for d in (one, same, other)]
    assert sums[0] == sums[1] != sums[2]
    assert {*sums[0]["target"]} == {"symbols", "sha256"} and len(sums[0]["target"]["sha256"]) == 64


class Silent:
    """A task without text."""

    @property
    def source_dictionary(self):
        raise NotImplementedError

    target_dictionary = None


@pytest.mark.parametrize(
    "content", [{}, {DICTIONARIES: None}, {DICTIONARIES: "x"}, {DICTIONARIES: {"source": 1}}]
)
def test_without_a_note_nothing_is_compared(content):
    task = Namespace(source_dictionary=dictionary("a"))
    assert dictionary_mismatch("model.pt", content, task) is None
    assert dictionary_checksums(Silent()) == {}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dictionary_shorter_than_the_text(ranks, data, tmp_path, workers):
    """Of `fairseq-preprocess`, which writes no checksums."""
    shutil.copytree(data[0], tmp_path / "bin")
    for file in (tmp_path / "bin").glob("dict.*.txt"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    words = ["--save-dir", tmp_path / "new", *MOE, "--num-workers", workers]
    run = ranks.start(tmp_path, 1, tmp_path / "bin", *words, one=True)
    assert "Error" not in run.refused(f"{tmp_path}/bin/dict.")
    assert not list((tmp_path / "new").glob("*.pt"))
