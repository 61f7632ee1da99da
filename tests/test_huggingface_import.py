"""``smoe import`` of what ``smoe export --to huggingface`` wrote: the same model again."""

import io
import json
import os
import shutil
from pathlib import Path

import handmade
import pytest
import torch
from commands import load
from sampling import some
from sentencepiece import SentencePieceTrainer
from test_expert_parallel_checkpoints import call, refusal
from test_golden import SYSTEMS_WITH_CHECKPOINT, TRANSLATED, read_json

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.translate.text import BatchTranslator, Options

pytest.importorskip("transformers", reason="the package transformers is not installed")

from test_huggingface import export  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

SYSTEMS = some(SYSTEMS_WITH_CHECKPOINT, "dense", "strata-4-4", "hash")


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_export_is_taken_back(recorded, tmp_path, system):
    """All tensors, all options, and the translations, with nothing but what the folder has."""
    source = recorded / f"{system}.pt"
    folder = export(source, tmp_path / "model")
    output = tmp_path / "new/ours.pt"
    call("import", folder, "--output", output)
    expected, found = load(source)["model"], load(output)["model"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if not name.endswith("._float_tensor"):  # which fairseq never set in these checkpoints
            assert torch.equal(tensor, expected[name]), name
    ours = SMoETransformerModel.from_pretrained(output)
    translator = BatchTranslator(ours)
    said = [t.hypotheses[0].text for t in translator.translate_batch(TRANSLATED, "src", "tgt")]
    assert said == read_json("translations")[system]["smoe translate"]


def test_a_language_with_a_hyphen_is_taken_back(hyphens, tmp_path):
    folder = export(hyphens / "checkpoint_last.pt", tmp_path / "model")
    call("import", folder, "--output", tmp_path / "ours.pt")
    task = load(tmp_path / "ours.pt")["cfg"]["task"]
    assert (task["source_lang"], task["target_lang"]) == ("en", "zh-CN")
    assert {*tmp_path.glob("dict.*")} == {tmp_path / f"dict.{x}.txt" for x in ("en", "zh-CN")}


@pytest.mark.soak
def test_languages_and_settings_are_taken_back(three_languages, tmp_path):
    """Also a language of no pair; and what transformers has saved again is taken, in several files too.

    In between, source and translation begin with the target's token there, too.
    """
    from transformers import AutoModelForSeq2SeqLM

    more = (*handmade.MULTILINGUAL, "--decoder-langtok", "--label-smoothing", 0.2)
    more += ("--langs", "cc,aa,bb")  # the order of their tokens, in which JSON does not keep them
    handmade.train(three_languages, tmp_path, *more)
    source = tmp_path / "checkpoint_last.pt"
    folder = export(source, tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = json.loads((folder / SETTINGS).read_text()) | {"lang_pairs": ["aa-bb"]}
    (folder / SETTINGS).write_text(json.dumps(settings))
    output = tmp_path / "new/ours.pt"
    call("import", folder, "--output", output)
    assert load(output)["cfg"]["criterion"]["label_smoothing"] == 0.2
    assert load(output)["smoe_dictionaries"] == load(source)["smoe_dictionaries"]
    translators = [
        BatchTranslator(SMoETransformerModel.from_pretrained(path, data_name_or_path=data))
        for path, data in ((source, None), (output, None), (output, three_languages))
    ]
    text = [" ".join(handmade.words_of("aa")[:n]) for n in (2, 5)]
    for target in ("bb", "cc"):
        expected, *others = (
            [
                t.hypotheses[0].tokens
                for t in each.translate_batch(text, "aa", target, Options(beam=1))
            ]
            for each in translators
        )
        tokenizer.src_lang, tokenizer.tgt_lang = "aa", target
        batch = tokenizer(text, text_target=text, return_tensors="pt", padding=True)
        token = tokenizer.get_lang_id(target)
        assert (batch["input_ids"][:, 0] == token).all() and (batch["labels"][:, 0] == token).all()
        del batch["labels"]
        rows = model.generate(**batch, forced_bos_token_id=token, num_beams=1)[:, 1:]
        tokens = [tokenizer.convert_ids_to_tokens(row[row != 1]) for row in rows]
        assert [*others, tokens] == [expected] * 3


def other_subwords() -> bytes:
    """A sentencepiece model of other letters."""
    written = io.BytesIO()
    lines = iter(["zyx wvu tsr qpo"] * 20)
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=written, vocab_size=17)
    return written.getvalue()


SETTINGS = "tokenizer_config.json"
# A changed file, the value that it has instead, and what the sentence names.
WRONG = [
    ("config.json", {"model_type": "bert"}, "model_type"),
    ("config.json", {"router_aux_loss_coef": float("nan")}, "router_aux_loss_coef"),
    ("config.json", {"label_smoothing": 2}, "label_smoothing"),
    ("config.json", {"encoder_layers": "2"}, "encoder_layers"),
    ("config.json", {"share_all_embeddings": 1}, "share_all_embeddings"),
    ("config.json", {"encoder_ffn_embed_dim": 9}, "ffn_embed_dim"),
    ("config.json", {"moe_blocks": [1]}, "moe_blocks"),
    ("config.json", {"moe_blocks": {}}, "moe_blocks"),
    ("config.json", {"moe_blocks": {"encoder.layers.1.moe": {}}}, "decoder.layers.1.moe"),
    ("config.json", {"moe_top_k": 1}, "moe_blocks.encoder.layers.1.moe.top_k"),
    ("config.json", {"moe_eval_capacity_factor": 0.01}, "eval_capacity_factor"),
    ("config.json", {"decoder_smoe_strata": "8"}, "moe_blocks.decoder.layers.1.moe.strata"),
    (SETTINGS, {"lang_pairs": []}, "lang_pairs"),
    (SETTINGS, {"lang_pairs": ["src-src"]}, "lang_pairs"),
    (SETTINGS, {"lang_pairs": ["src,x-tgt"]}, "lang_pairs"),
    (SETTINGS, {"lang_pairs": ["../src-tgt"]}, "lang_pairs"),
    (SETTINGS, {"language_tokens": {"src": "__src__"}}, "lang_pairs"),
    (SETTINGS, {"language_tokens": ["src"]}, "language_tokens"),
    ("vocab.json", {3: "b\nc"}, "[3]"),
    ("vocab.json", slice(None, 3, -1), "vocab.json"),  # in another order
    ("vocab.json", {3: "<s>"}, "<unk>"),
    ("vocab.json", {4: "same", 5: "same"}, "same"),
    ("vocab.json", {}, "entries"),
    ("vocab.json", {4: "\u2581piece"}, "vocab.json"),
    ("spm.model", b"no model", "sentencepiece"),
    ("spm.model", other_subwords(), "spm.model"),
    ("model.safetensors", None, "missing"),
    ("vocab.json", None, "missing"),
    ("config.json", None, "missing"),
    ("config.json", b"{", "JSON"),
    ("model.safetensors", b"{", "damaged"),
]
PIPES = ("config.json", "model.safetensors", "spm.model", "vocab.json", SETTINGS)


def damaged(source: Path, copy: Path, name: str, change) -> Path:
    """A copy of a folder for transformers, of which one file has another content, or None and is missing.

    change: the content; a pipe in its place; or what some keys or places of its JSON hold instead, of a list
    without any, that the last one is missing.
    """
    file = Path(shutil.copytree(source, copy), name)
    content = file.read_bytes() if file.exists() else b"{}"
    file.unlink(missing_ok=True)
    if change is os.mkfifo:
        os.mkfifo(file)
    elif isinstance(change, bytes):
        file.write_bytes(change)
    elif change is not None:
        values = json.loads(content)
        if isinstance(change, slice):
            values = [*values[:4], *values[change]]
        for key, value in change.items() if isinstance(change, dict) else ():
            values[key] = value
        file.write_text(json.dumps(values if change else values[:-1]))
    return copy


@pytest.fixture(scope="module")
def folder(recorded, tmp_path_factory) -> Path:
    return export(recorded / "strata-4-4.pt", tmp_path_factory.mktemp("export") / "model")


def test_the_weights_alone_are_no_model(folder, tmp_path):
    file = folder / "model.safetensors"
    assert f"{file}: expected" in refusal("import", file, "--output", tmp_path / "new/ours.pt")


@pytest.mark.parametrize("name, change, named", WRONG + [(name, os.mkfifo, "") for name in PIPES])
def test_what_cannot_be_imported_is_one_sentence(folder, tmp_path, name, change, named):
    copy = damaged(folder, tmp_path / "model", name, change)
    sentence = refusal("import", copy, "--output", tmp_path / "new/ours.pt")
    assert named in sentence and (f"{copy}" in sentence or not named)
    assert not (tmp_path / "new").exists()
    if name in ("vocab.json", "spm.model") and change not in (None, os.mkfifo):
        with pytest.raises(UsageError, match=name):
            AutoTokenizer.from_pretrained(copy)


def test_a_block_has_the_defaults_of_what_it_leaves_out(folder, tmp_path):
    """Those of a config by hand; and its dropout in training may be another."""
    blocks = json.loads((folder / "config.json").read_text())["moe_blocks"]
    fewer = {n: {"strata": block["strata"], "dropout": 0.3} for n, block in blocks.items()}
    copy = damaged(folder, tmp_path / "model", "config.json", {"moe_blocks": fewer})
    call("import", copy, "--output", tmp_path / "ours.pt")


def test_text_of_another_model_is_not_replaced(folder, tmp_path):
    (tmp_path / "dict.src.txt").write_text("another 1\n")
    sentence = refusal("import", folder, "--output", tmp_path / "ours.pt")
    assert f"{tmp_path / 'dict.src.txt'}" in sentence
    assert [file.name for file in tmp_path.iterdir()] == ["dict.src.txt"]
