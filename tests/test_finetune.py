"""``pretrained: FOLDER``: fine-tuning of transformers' models and of our runs, through the recipes."""

import json
import re
import shutil
from pathlib import Path

import pretrained
import pytest
import torch
from commands import changed, load, refused, run, smoe, step_here, succeeded
from test_recipes import commands, recipe, table, write_dataset
from test_upcycle import set_option

from smoe_fairseq.analysis.cost import build_meta_model, parse_run
from smoe_fairseq.checkpoints.vocabulary import Vocabulary
from smoe_fairseq.models.memory import Run, forecast
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.recipes.data import prepare
from smoe_fairseq.subwords import read_subwords

pytest.importorskip("transformers", reason="the package transformers is not installed")

NEW = "mic_Latn"
SMALL = {"max-update": 2, "max-tokens": 400, "num-workers": 0, "log-interval": 1, "dropout": 0.0}
SETTINGS = {
    "pairs": ["en-swh_Latn", f"en-{NEW}"],
    "languages": {"en": "eng_Latn"},
    "keep": ["en-deu_Latn"],
    "new-languages": {NEW: {"like": "swh_Latn"}},
    "add-subwords": 20,
    "experts": 2,
    "raw": {"parallel": {"valid": 10, "test": 8}},
    "train": SMALL,
    "validate": {"every": 2, "sentences": 4, "beam": 1},
    "generate": {"beam": 1, "max-len-a": 0, "max-len-b": 20},
}


def write_text(folder: Path) -> None:
    """Text of ten scripts, and of a language of the same letters with words of its own and a new letter."""
    folder.mkdir()
    text = pretrained.lines(80, seed=7)
    new = [f"kelusultiek {line[::-1]} ŋmaw nikmawŋ" for line in text]
    new[-1] += " ɓ"  # only in the test set
    for name, lines in (("en-swh_Latn", text), (f"en-{NEW}", new), ("test.en-deu_Latn", text[:8])):
        rows = "".join(f"{one}\t{other}\n" for one, other in zip(text, lines))
        (folder / f"{name}.tsv").write_text(rows)


@pytest.fixture(scope="module")
def tuned(nllb, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder with a data set ``mine`` that is prepared for fine-tuning, and the recipes' environment."""
    folder = tmp_path_factory.mktemp("tuned")
    write_text(folder / "text")
    settings = write_dataset(folder / "configs", "mine", pretrained=str(nllb), **SETTINGS)
    result = succeeded(recipe(folder, "prepare", "mine", RAW="text", GPUS="0", **settings))
    (folder / "prepared").write_text(result.stdout)
    return folder, settings | {"GPUS": "0"}


def test_prepared(tuned, nllb):
    """A table says how the subwords fit; files have the model's codes; the record says what was changed."""
    folder, settings = tuned
    rows = [x.split("|")[1:-1] for x in (folder / "prepared").read_text().splitlines() if "|" in x]
    fit = {row[0].strip(): row[1:] for row in rows}
    assert float(fit["eng_Latn"][2]) < 1 and float(fit[NEW][2]) == 0
    assert (folder / "data/mine/raw/test.eng_Latn-mic_Latn.mic_Latn").exists()
    record = json.loads((folder / "data/mine/bin/pretrained.json").read_text())
    assert record["source"] == str(nllb) and record["languages"] == [*pretrained.LANGUAGES, NEW]
    assert not (folder / "data/mine/bin/text").exists()
    again = succeeded(step_here("prepare", "mine", cwd=folder, RAW="text", **settings))
    assert "prepared already" in again.stdout  # the model has 64 positions
    kept = (folder / "data/mine/bin").glob("*.eng_Latn-deu_Latn.deu_Latn.bin")
    assert [file.name.split(".")[0] for file in kept] == ["test"]


def translations(checkpoint: Path, text: list[str], source: str, target: str) -> list[list[str]]:
    model = SMoETransformerModel.from_pretrained(checkpoint)
    found = model.translations(text, source_lang=source, target_lang=target, beam=1, max_len_b=20)
    return [translation.hypotheses[0].tokens for translation in found]


def test_more_subwords_split_other_languages_as_before(tmp_path):
    """Letters that both have stay bytes. A table of experts grows with the embeddings."""
    options = {"vocab_size": 700, "character_coverage": 0.98, "byte_fallback": True}
    file = pretrained.write_subwords(tmp_path, **options)
    before = read_subwords(file)
    pieces = [before.id_to_piece(i) for i in range(3, before.get_piece_size())]
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    table = "encoder.layers.1.moe.gates.0.table"
    weights = {"encoder.embed_tokens.weight": torch.randn(len(symbols), 4)}
    weights[table] = torch.arange(len(symbols))
    vocabulary = Vocabulary(weights, symbols, file.read_bytes())
    others = pretrained.lines(100)
    added = vocabulary.add_pieces([f"{line[::-1]} ŋ" for line in others], others, 20)
    file.write_bytes(vocabulary.subwords)
    now = read_subwords(file)
    assert "ŋ" in added and any(len(piece) > 2 for piece in added)
    assert all(before.encode(line) == now.encode(line) for line in others)
    of_added = vocabulary.weights[table][len(symbols) :].tolist()
    assert len(of_added) == len(added) and 0 <= min(of_added) <= max(of_added) < len(symbols)
    piece = max(added, key=len)  # of the first piece that it replaces
    assert piece.startswith(symbols[of_added[added.index(piece)]])
    vocabulary.trim(added)
    kept = [symbols.index(word) for word in vocabulary.symbols if word in symbols]
    assert vocabulary.weights[table][: len(kept)].tolist() == kept


def test_a_letter_that_the_dictionary_has_is_not_added(tmp_path):
    """Dictionaries of fairseq-preprocess may have letters that are no pieces of the model."""
    file = pretrained.write_subwords(tmp_path)
    pieces = read_subwords(file)
    pieces = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "ŋ"]
    weights = {"encoder.embed_tokens.weight": torch.randn(len(symbols), 4)}
    vocabulary = Vocabulary(weights, symbols, file.read_bytes())
    assert vocabulary.add_pieces(["aŋa ŋe"] * 9, [], 20)
    assert len({*vocabulary.symbols}) == len(vocabulary.symbols) > len(symbols)


@pytest.mark.parametrize("trim", [False, True])
def test_old_languages_translate_as_before(tuned, nllb, tmp_path, trim):
    """A new language and its subwords, or a trimmed vocabulary, change no answer to known text."""
    folder, settings = tuned
    binary = folder / "data/mine/bin"
    before = tmp_path / "imported.pt"
    smoe("import", nllb, "--output", before)
    if trim:
        shutil.copytree(folder / "configs", tmp_path / "configs")
        settings = settings | {"CONFIG_DIR": str(tmp_path / "configs")}
        file = tmp_path / "configs/datasets/mine.yaml"
        file.write_text(file.read_text().replace(str(nllb), "other") + "trim: true\n")
        source = {"RAW": str(folder / "text"), "PRETRAINED": str(nllb)}  # in place of the file's
        succeeded(recipe(tmp_path, "prepare", "mine", **settings | source))
        succeeded(recipe(tmp_path, "train", "mine", "dense", DRY_RUN="1", **settings))
        binary = tmp_path / "data/mine/bin"
    old, new = load(before)["model"], load(binary / "pretrained.pt")["model"]
    name = "encoder.embed_tokens.weight"
    rows = {path: dict_of(path / "dict.txt") for path in (tmp_path, binary)}
    assert len(new[name]) == len(rows[binary]) and (len(new[name]) < len(old[name])) == trim
    shared = rows[tmp_path].keys() & rows[binary].keys()
    for word in shared:
        assert torch.equal(old[name][rows[tmp_path][word]], new[name][rows[binary][word]])
    like = new[name][rows[binary]["__swh_Latn__"]]
    assert torch.equal(new[name][rows[binary][f"__{NEW}__"]], like)
    assert trim or rows[tmp_path].items() <= rows[binary].items()
    added = [word for word in rows[binary].keys() - shared if word != f"__{NEW}__"]
    assert "ŋ" in added and any(len(word) > 2 for word in added) and "ɓ" not in added
    text = pretrained.lines(30, seed=7)
    for target in ("swh_Latn", "deu_Latn"):
        files = (before, binary / "pretrained.pt")
        one, other = (translations(file, text, "eng_Latn", target) for file in files)
        assert one == other and any(one)


def dict_of(file: Path) -> dict[str, int]:
    """The words of fairseq's dictionary, and their rows."""
    words = [line.rpartition(" ")[0] for line in file.read_text().splitlines()]
    return {word: row for row, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])}


def validation(text: str) -> float:
    """The loss in nats per token of a log's first validation."""
    return float(re.search(r"valid on 'valid' subset \| loss \S+ \| nll_loss (\S+)", text)[1])


@pytest.mark.soak
def test_trained(tuned):
    """Training begins at the pretrained model, dense and with experts, and the table shows what it was."""
    folder, settings = tuned
    binary, found = folder / "data/mine/bin", {}
    for method in ("dense", "smoe-2-2"):
        result = succeeded(recipe(folder, "train", "mine", method, "--lr", "1e-20", **settings))
        assert "prepared with other" not in result.stderr
        found[method] = validation((folder / f"runs/mine/{method}/train.log").read_text())
        assert not (folder / f"runs/mine/{method}/upcycled.pt").exists()
    assert abs(found["smoe-2-2"] - found["dense"]) < 0.1
    start = load(binary / "pretrained.pt")["model"]
    begun = load(folder / "runs/mine/dense/checkpoint_last.pt")["model"]
    assert all(torch.equal(begun[name], start[name]) for name in start)
    identity = json.loads((folder / "runs/mine/smoe-2-2/identity.json").read_text())["flags"]
    record = json.loads((binary / "pretrained.json").read_text())
    assert identity["--pretrained"] == record["fingerprint"]
    words = ("dense", "smoe-2-2", "--lr", "1e-20")
    for _ in range(2):
        result = recipe(folder, "study", "mine", *words, JOBS="1", **settings)
    assert result.returncode == 0 and "0 of 2 runs" in result.stdout, result.stderr
    file = folder / "results/mine/report.md"
    report = file.read_text()
    assert recipe(folder, "report", "mine", **settings | {"DATA_DIR": "none"}).returncode == 0
    assert file.read_text() == report  # of results/ alone
    about = [json.loads((folder / f"results/mine/{m}/run.json").read_text()) for m in found]
    assert 0 < about[0]["kept_loss"] and abs(about[1]["kept_loss"] - about[0]["kept_loss"]) < 0.1
    kept = json.loads((folder / "results/mine/smoe-2-2/routing.json").read_text())
    assert "eng_Latn-deu_Latn" in kept["requested_capacity"]
    exported = folder / "exported"
    checkpoint = folder / "runs/mine/dense/checkpoint_last.pt"
    words = ("--to", "huggingface", "--data", binary, "--output", exported)
    run("smoe", "export", checkpoint, *words)
    program = f"""
import sys
from transformers import AutoTokenizer, M2M100ForConditionalGeneration
tokenizer = AutoTokenizer.from_pretrained({str(exported)!r}, src_lang="{NEW}")
model = M2M100ForConditionalGeneration.from_pretrained({str(exported)!r})
print(*tokenizer.convert_ids_to_tokens(tokenizer("nikmawŋ").input_ids))
assert "smoe_fairseq" not in sys.modules
"""
    card = (exported / "README.md").read_text()
    assert f'language: ["eng_Latn", "{NEW}", "swh_Latn"]\n' in card and "dense; " in card
    (said,) = run("python", "-c", program, fresh=True).stdout.splitlines()[-1:]
    assert said.split()[0] == NEW and said.split()[-1] == "</s>" and "<unk>" not in said
    shown = table(folder, "mine", CONFIG_DIR=settings["CONFIG_DIR"]).splitlines()
    rows = [row.split("|") for row in shown if row.startswith("| ")]
    assert [row[1].strip() for row in rows] == ["method", "dense", "pretrained", "smoe-2-2"]
    scored = {name.strip(): value for name, value in zip(rows[0], rows[2])}
    assert float(scored["deu_Latn-eng_Latn (not trained)"]) >= 0


@pytest.mark.parametrize(
    "change, named",
    [
        ({"languages": {}}, ("{en: eng_Latn}", "mine.yaml")),
        ({"pairs": ["en-zh", f"en-{NEW}"]}, ("{zh: zho_Hans}",)),
        ({"new-languages": {NEW: {}, "swh_Latn": {}}}, ("new-languages.swh_Latn",)),
        ({"new-languages": {NEW: {"like": "xx"}}}, (f"new-languages.{NEW}.like", "xx")),
        ({"new-languages": {NEW: {}, "xyz_Latn": {}}}, ("new-languages.xyz_Latn",)),
        ({"new-languages": {}}, ("add-subwords", "new-languages")),
        ({"languages": {"de": "deu_Latn"}}, ("`languages`", "de")),
        ({"languages": {"en": "swh_Latn"}}, ("`languages`", "swh_Latn")),
        ({"pretrained": "facebook/nllb-200"}, ("facebook/nllb-200", "hf download")),
        ("--vocab-size 400", ("--vocab-size", "pretrained")),
        ({"subwords": {"vocab-size": 500}}, ("mine.yaml: `subwords`", "add-subwords")),
        ({"pretrained": None}, ("new-languages", "--pretrained")),
        ({"pretrained": None, "new-languages": {}, "add-subwords": None, "trim": True}, ("trim",)),
    ],
)
def test_refused_before_anything_is_written(nllb, tmp_path, change, named):
    flags = change.split() if isinstance(change, str) else []
    content = {"pretrained": str(nllb), **SETTINGS, **({} if flags else change)}
    settings = write_dataset(tmp_path / "configs", "mine", **content)
    write_text(tmp_path / "text")
    result = step_here("prepare", "mine", *flags, cwd=tmp_path, RAW="text", **settings)
    refused(result, *named)
    assert not (tmp_path / "data").exists()


def test_training_is_not_shown_before_the_models_sizes_are_known(nllb, tmp_path):
    settings = write_dataset(tmp_path / "configs", "mine", pretrained=str(nllb), **SETTINGS)
    result = step_here("train", "mine", "dense", cwd=tmp_path, DRY_RUN="1", GPUS="0", **settings)
    refused(result, "scripts/prepare.sh mine")


@pytest.fixture(scope="module")
def from_experts(prepared, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """As ``tuned``, from a run with experts, which trained a part of its model."""
    folder = tmp_path_factory.mktemp("experts")
    source = shutil.copytree(prepared / "runs/tiny/smoe-2-2", folder / "smoe-2-2")
    (folder / "data").mkdir()
    (folder / "data/tiny").symlink_to(prepared / "data/tiny")
    checkpoint = source / "checkpoint_best.pt"
    changed(checkpoint, checkpoint, set_option("freeze", "embeddings"))
    content = {"pairs": ["en-fr"], "experts": 4, "train": SMALL, "validate": {"metric": "loss"}}
    content |= {"pretrained": "smoe-2-2", "shards": 2}
    settings = write_dataset(folder / "configs", "mine", **content)
    settings |= {"GPUS": "0"}
    succeeded(step_here("prepare", "mine", cwd=folder, RAW=str(prepared / "text"), **settings))
    return folder, settings


def test_a_run_with_experts(from_experts, prepared, tmp_path):
    """Its model is fine-tuned by the method that trained it, scored before that, and no other's."""
    folder, settings = from_experts
    model = folder / "data/mine/bin/pretrained.pt"
    old, new = (load(f) for f in (prepared / "runs/tiny/smoe-2-2/checkpoint_best.pt", model))
    assert old["model"].keys() == new["model"].keys()
    assert all(torch.equal(old["model"][name], new["model"][name]) for name in old["model"])
    result = step_here("train", "mine", "smoe-2-2", cwd=folder, DRY_RUN="1", **settings)
    (words,) = commands(result, "fairseq-train")
    assert words[words.index("--finetune-from-model") + 1] == "data/mine/bin/pretrained.pt"
    assert "upcycle" not in result.stdout and "--freeze" not in words
    for method, named in {"dense": "--moe-freq 0", "smoe-3-1": "--smoe-strata 3-1"}.items():
        refused(step_here("train", "mine", method, cwd=folder, **settings), named, "smoe-2-2")
    record = json.loads((folder / "data/mine/bin/pretrained.json").read_text())
    record["experts"]["moe-freq"] = record["options"]["moe_freq"] = 1
    every = shutil.copytree(folder / "data/mine/bin", tmp_path / "data/mine/bin")
    # Of a run with experts in every layer.
    (every / "pretrained.json").write_text(json.dumps(record))
    given = settings | {"DATA_DIR": str(tmp_path / "data"), "DRY_RUN": "1"}
    result = step_here("train", "mine", "smoe-2-2", cwd=folder, **given)
    assert "--moe-freq 1 " in result.stdout, result.stderr
    succeeded(step_here("evaluate", "mine", "pretrained", cwd=folder, JOBS="1", **settings))
    read = folder / "runs/mine/pretrained/test/en-fr.txt"
    flags = ("--from", "en", "--to", "fr")
    text = (folder / "data/mine/raw/test.en-fr.en").read_text()
    said = run("smoe", "translate", prepared / "runs/tiny/smoe-2-2", *flags, stdin=text)
    assert read.read_text() in said.stdout


def test_a_run_with_other_language_tokens(from_experts, prepared, tmp_path):
    """With ``--lang-tok-style mbart`` fairseq also adds ``<mask>``, which has an embedding too.

    What the run's model computes with, beside its weights, is fine-tuned likewise.

    ``dictionary.txt`` beside the dictionary is no other one.
    """
    folder, settings = from_experts
    place = shutil.copytree(prepared / "data/tiny/bin", tmp_path / "mbart")
    (place / "dictionary.txt").write_text("other 1\n")

    def change(state):
        state["cfg"]["task"].lang_tok_style = "mbart"
        state["cfg"]["task"].lang_tok_replacing_bos_eos = True
        set_option("moe_eom", 0.2)(state)
        del state["smoe_dictionaries"]
        for name, tensor in state["model"].items():
            if "embed_tokens" in name or "output_projection" in name:
                state["model"][name] = torch.cat([tensor, tensor[:1]])

    source = changed(folder / "smoe-2-2/checkpoint_best.pt", place / "mbart.pt", change)
    settings = settings | {"RAW": str(prepared / "text"), "DATA_DIR": str(tmp_path)}
    settings |= {"PRETRAINED": str(source), "DRY_RUN": ""}
    succeeded(step_here("prepare", "mine", cwd=folder, **settings))
    words = list(dict_of(tmp_path / "mine/bin/dict.txt"))
    assert "[fr]" in words and "__fr__" not in words and words[-1] == "<mask>"
    settings["DRY_RUN"] = "1"
    result = step_here("train", "mine", "smoe-2-2", cwd=folder, **settings)
    (words,) = commands(result, "fairseq-train")
    assert "--lang-tok-replacing-bos-eos" in words and words[words.index("--moe-eom") + 1] == "0.2"
    result = step_here("train", "mine", "smoe-2-2", "--moe-eom", "0.0", cwd=folder, **settings)
    refused(result, "--moe-eom 0.0", "mbart.pt")


def test_a_run_whose_dictionary_is_another_now(from_experts, prepared, tmp_path):
    """Its text was prepared again: the rows of its embeddings belong to other subwords."""
    folder, settings = from_experts
    place = shutil.copytree(prepared / "data/tiny/bin", tmp_path / "bin")
    (place / "dict.sha256").unlink(missing_ok=True)
    for file in place.glob("dict*.txt"):
        first, second, *rest = file.read_text().splitlines(keepends=True)
        file.write_text("".join([second, first, *rest]))
    source = shutil.copy(folder / "smoe-2-2/checkpoint_best.pt", place)
    settings = settings | {"RAW": str(prepared / "text"), "DATA_DIR": str(tmp_path)}
    said = step_here("prepare", "mine", cwd=folder, PRETRAINED=str(source), **settings)
    refused(said, "pretrained: ", tmp_path / "bin/dict.")
    assert not (tmp_path / "mine/bin").exists()


def test_a_model_that_was_trained_further_since_is_told(from_experts, tmp_path):
    folder, settings = from_experts
    shutil.copytree(folder / "data", tmp_path / "data")
    source = shutil.copytree(folder / "smoe-2-2", tmp_path / "smoe-2-2")
    (source / "train.log").write_text("another line")
    said = step_here("prepare", "mine", cwd=tmp_path, PRETRAINED="./smoe-2-2/", **settings)
    assert said.returncode == 0 and "prepared already" in said.stdout
    checkpoint = source / "checkpoint_best.pt"
    changed(checkpoint, checkpoint, lambda state: state["extra_state"].update(further=True))
    refused(step_here("prepare", "mine", cwd=tmp_path, **settings), "data/mine/bin", "`pretrained`")


def test_large_files_of_a_model_are_told_apart_by_samples(tmp_path):
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        with open(file, "wb") as content:
            content.truncate(1 << 27)
            content.seek(1 << 26)
            content.write(file.name.encode())
    one, other = map(prepare._identity, files)
    assert one != other and one == prepare._identity(files[0])


def test_runs_that_began_from_another_model_are_told_and_not_averaged(from_experts, tmp_path):
    """The source was trained further, and the data set prepared again."""
    folder, settings = from_experts
    now = json.loads((folder / "data/mine/bin/pretrained.json").read_text())["fingerprint"]
    scores = {"scores": {"en-fr": {"bleu": 5.0, "signature": "s", "sentences": 3}}}
    for run_name, start in {"smoe-2-2": "0ld", "smoe-2-2.seed-2": now}.items():
        place = tmp_path / "mine" / run_name
        place.mkdir(parents=True)
        (place / "scores.json").write_text(json.dumps(scores))
        flags = {"--pretrained": start}
        content = {"method": "smoe-2-2", "dictionary": "", "flags": flags}
        (place / "identity.json").write_text(json.dumps(content))
    settings = settings | {"RUN_DIR": str(tmp_path)}
    told = succeeded(step_here("table", "mine", cwd=folder, **settings)).stdout
    assert "smoe-2-2: it began from another model than data/mine/bin/pretrained.pt" in told
    assert "seed-2: it began" not in told and "models are not averaged" in told


@pytest.mark.soak
def test_fine_tuning_begins_at_a_run_with_experts(from_experts, tmp_path):
    folder, settings = from_experts
    run_dir = str(tmp_path / "runs")
    words = ("--lr", "1e-20", "--gpus", "2", "--expert-parallel")
    succeeded(recipe(folder, "train", "mine", "smoe-2-2", *words, RUN_DIR=run_dir, **settings))
    begun, whole = tmp_path / "runs/mine/smoe-2-2/checkpoint_last.pt", tmp_path / "whole.pt"
    smoe("consolidate", begun, "--output", whole)
    start, begun = (load(file)["model"] for file in (folder / "data/mine/bin/pretrained.pt", whole))
    assert all(torch.equal(begun[name], start[name]) for name in start)
    file = tmp_path / "runs/mine/smoe-2-2/identity.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"flags": record["flags"] | {"--pretrained": "0ld"}}))
    said = step_here("train", "mine", "smoe-2-2", *words, cwd=folder, RUN_DIR=run_dir, **settings)
    refused(said, "data/mine/bin/pretrained.pt")


@pytest.mark.parametrize(
    "words, named",
    [
        ("dense --encoder-layers 3", ("--encoder-layers 3",)),
        ("dense --activation-fn gelu", ("--activation-fn gelu",)),
        ("dense --freeze embeddings,encoder,decoder", ("--freeze",)),
        ("pretrained", ("pretrained",)),
    ],
)
def test_refused_in_training(tuned, words, named):
    folder, settings = tuned
    settings = settings | {"FORECAST": "1"}
    refused(step_here("train", "mine", *words.split(), cwd=folder, **settings), *named)


@pytest.mark.parametrize(
    "line, other, named",
    [
        ("pretrained: ", "pretrained: ~/other-", ("data/mine/bin", "{}/other-")),
        ("pretrained: ", "# ", ("data/mine/bin", "mine.yaml")),
        ("  max-update: 2\n", "  encoder-layers: 7\n", ("--encoder-layers 7",)),
        ("  max-update: 2\n", "  encoder-layers: null\n", ()),
        ("\ntrain:\n", "\ntask: {encoder-langtok: tgt}\ntrain:\n", ("task.encoder-langtok", "src")),
        ("\ntrain:\n", "\ntask: {encoder-langtok: src}\ntrain:\n", ()),
    ],
)
def test_the_file_describes_another_model_than_the_data_have(tuned, tmp_path, line, other, named):
    folder, settings = tuned
    shutil.copytree(folder / "configs", tmp_path / "configs")
    file = tmp_path / "configs/datasets/mine.yaml"
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, other))
    settings = settings | {"CONFIG_DIR": "~/configs", "HOME": str(tmp_path), "DRY_RUN": "1"}
    said = step_here("train", "mine", "dense", cwd=folder, **settings)
    if named:
        refused(said, *(name.format(tmp_path) for name in named))
    else:
        assert "--encoder-layers 2 " in said.stdout, said.stderr


def test_evaluated_before_training(tuned, tmp_path):
    folder, settings = tuned
    settings = settings | {"RUN_DIR": str(tmp_path / "runs"), "JOBS": "1"}
    missing = step_here("evaluate", "mine", "dense", cwd=folder, **settings)
    refused(missing, tmp_path / "runs/mine/dense/checkpoint_best.pt")
    assert not (tmp_path / "runs").exists()
    succeeded(step_here("evaluate", "mine", "pretrained", cwd=folder, **settings))
    assert [path.name for path in (tmp_path / "runs/mine").iterdir()] == ["pretrained"]
    file = tmp_path / "runs/mine/pretrained/scores.json"
    for other in (False, True):
        if other:  # another model was prepared
            content = json.loads(file.read_text()) | {"contents": {"pretrained.pt": "0ld"}}
            file.write_text(json.dumps(content))
        shown = step_here("table", "mine", cwd=folder, **settings).stdout
        assert ("pretrained: pretrained.pt is another one than was scored" in shown) == other
        again = step_here("evaluate", "mine", "dense", cwd=folder, DRY_RUN="1", **settings)
        assert again.returncode == 0 and ("/pretrained.pt" in again.stdout) == other


def test_one_direction_from_random_weights_by_the_loss(tuned, nllb, tmp_path):
    """What a data set's file can ask for: a pair as it is written, and validation without translations."""
    change = {"pretrained": str(nllb), "one-way": True, "validate": {"metric": "loss", "every": 1}}
    settings = write_dataset(tmp_path / "configs", "mine", **SETTINGS | change)
    words = {}
    for method in ("smoe-2-2", "smoe-scratch-2-2"):
        result = recipe(tuned[0], "train", "mine", method, DRY_RUN="1", **settings)
        (words[method],) = commands(result, "fairseq-train")
    assert "--finetune-from-model" in words["smoe-2-2"]
    scratch = words["smoe-scratch-2-2"]
    assert "--finetune-from-model" not in scratch and "--validate-sentences" not in scratch
    assert scratch[scratch.index("--lang-pairs") + 1] == f"eng_Latn-swh_Latn,eng_Latn-{NEW}"


def test_frozen_parts_stay(tuned, tmp_path):
    folder, settings = tuned
    words = ("--freeze", "embeddings,encoder", "--lr", "0.01", "--warmup-updates", "1")
    words += ("--save-dir", str(tmp_path / "run"))
    succeeded(recipe(folder, "train", "mine", "dense", *words, **settings))
    start = load(folder / "data/mine/bin/pretrained.pt")["model"]
    trained = load(tmp_path / "run/checkpoint_last.pt")["model"]
    same = {name for name in start if torch.equal(start[name], trained[name])} - {"decoder.version"}
    frozen = {name for name in start if name.startswith("encoder.") or "embed" in name}
    assert frozen | {"decoder.output_projection.weight"} == same
    options = parse_run(["--arch", "smoe_transformer_tiny", "--freeze", "embeddings"])
    model = build_meta_model(options, 1000)
    held = forecast(Run(model, options))
    assert held.weights - held.gradients == 4 * model.encoder.embed_tokens.weight.numel() > 0
