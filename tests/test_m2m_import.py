"""``smoe import`` of M2M-100, NLLB-200 and NLLB-MoE: what transformers computes, with their text."""

import json
import math
import shutil
from pathlib import Path

import pretrained
import pytest
import torch
from commands import changed, config_of, load
from test_expert_parallel_checkpoints import call, refusal

from smoe_fairseq.models.checks import same_bits
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.subwords import read_subwords
from smoe_fairseq.translate.readout import encoded

pytest.importorskip("transformers", reason="the package transformers is not installed")

from test_huggingface import batch  # noqa: E402
from test_huggingface_import import damaged, other_subwords  # noqa: E402

# Text that tokenizers may change: spaces, line ends, NFKC, joiners, emoji, marks of words.
SPECIAL = [
    *("  a  b", "\u3000a\xa0b", "a\rb", "a\r\nb", "a\u2028b\x85c", "a\tb\x0bc\x1cd"),
    *("\ufeffa\u200bb", "ﬁ ①② Ａｂ ½ … ㍿ ﷺ ｶﾞ", "e\u0301 é", "क\u200dक", "\u200da\u200d b"),
    *("👨‍👩‍👧 🏳️‍🌈 a", "▁a a▁b", ""),
    *("a\x00b\ue000", "\u202ea\u200e b", "aкა가", "a" * 300, "1,000.00", "\xad soft"),
]
DIRECTIONS = {"m2m": ("en", "de"), "nllb": ("eng_Latn", "swh_Latn")}


@pytest.fixture(scope="session", params=DIRECTIONS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def imported(kind, m2m, nllb, tmp_path_factory) -> Path:
    """A checkpoint beside its text."""
    output = tmp_path_factory.mktemp("imported") / "checkpoint.pt"
    call("import", {"m2m": m2m, "nllb": nllb}[kind], "--output", output)
    return output


@pytest.fixture(scope="session")
def theirs(kind, m2m, nllb):
    """Tokenizer and model of transformers; the tokenizer reads the first language."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = {"m2m": m2m, "nllb": nllb}[kind]
    tokenizer = AutoTokenizer.from_pretrained(folder, src_lang=DIRECTIONS[kind][0])
    return tokenizer, AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


@torch.no_grad()
def test_logits(imported, theirs):
    _, model = theirs
    ours = SMoETransformerModel.from_pretrained(imported).models[0]
    source, given = batch(model.config.vocab_size)
    expected = model(source, source != 1, given).logits[given != 1]
    found = ours(source, (source != 1).sum(1), given)[0][given != 1]
    assert expected.std() > 0.1 and (found - expected).abs().max() < 1e-5


def test_text(kind, imported, theirs):
    """The ids of lines, and greedy translations."""
    tokenizer, model = theirs
    source, target = DIRECTIONS[kind]
    ours = SMoETransformerModel.from_pretrained(imported)
    assert (imported.parent / "langs.txt").read_text().split() == list(ours.task.langs)
    text = pretrained.lines(300, seed=5) + SPECIAL
    language = ours.src_dict.index(f"__{source}__")
    for line, ids in zip(text, tokenizer(text)["input_ids"], strict=True):
        assert [language, *encoded(ours, line, ours.src_dict)] == ids, repr(line)
    sample = tokenizer(text[:20], return_tensors="pt", padding=True)
    first = tokenizer.convert_tokens_to_ids(f"__{target}__" if kind == "m2m" else target)
    for beam in (1, 5) if kind == "nllb" else (1,):  # M2M-100 is not trained, so it never ends
        # With another length penalty ours, like fairseq, divides the score of the language's token, too.
        search = {"num_beams": beam, "length_penalty": 0.0, "suppress_tokens": [1]}
        search |= {"early_stopping": True} if beam > 1 else {}
        said = model.generate(
            **sample, forced_bos_token_id=first, forced_eos_token_id=2, max_length=30, **search
        )
        options = {"beam": beam, "lenpen": 0.0, "max_len_a": 0, "max_len_b": 28}
        found = ours.translations(text[:20], source_lang=source, target_lang=target, **options)
        for ids, translation in zip(said.tolist(), found, strict=True):
            tokens = [ours.tgt_dict.index(token) for token in translation.hypotheses[0].tokens]
            end = 25 if len(tokens) > 28 else None  # at the limit, theirs ends at no cost
            assert tokens[:end] == ids[1 : ids.index(2, 1) + 1][:end]


# NLLB-MoE


def weighted_sum(self, x_TD, first_TE, weight_TE):
    """``sum_e G_e FFN_e(x)``, without what is masked on average (NLLB team 2022, section 6.2).

    transformers 5 takes the mask of first choices for numbers of experts, so that only two ever compute.
    """
    outputs = [expert(x_TD) for expert in self.values() if hasattr(expert, "fc1")]
    y_TD = sum(w.unsqueeze(1) * y for w, y in zip(weight_TE.T, outputs, strict=True))
    return y_TD * (1 - self.moe_token_dropout)


def nllb_moe(folder: Path, subwords: Path, **options):
    """A small model of transformers with random weights, in a folder."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    tokens = pretrained.write_tokenizer(folder, subwords, "nllb")
    sizes = {"vocab_size": tokens, "d_model": 16, "encoder_layers": 2, "decoder_layers": 4}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "num_experts": 4}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 32, "init_std": 0.3}
    sizes |= {"encoder_sparse_step": 2, "decoder_sparse_step": 2}
    torch.manual_seed(1)
    model = NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes | options)).eval()
    model.save_pretrained(folder)
    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module.forward = weighted_sum.__get__(module)
    return model


NLLB = {
    "masks": {"normalize_router_prob_before_dropping": True, "scale_embedding": False},
    "apart": {
        "moe_token_dropout": 0.0,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
    },
}


@pytest.mark.parametrize("case", NLLB)
@torch.no_grad()
def test_nllb_moe(nllb, tmp_path, case, capsys):
    subwords = nllb / "sentencepiece.bpe.model"
    model = nllb_moe(tmp_path / "model", subwords, **NLLB[case])
    call("import", tmp_path / "model", "--output", tmp_path / "ours.pt")
    assert "3 MoE layers" in capsys.readouterr().out
    ours = SMoETransformerModel.from_pretrained(tmp_path / "ours.pt").models[0]
    source, given = batch(model.config.vocab_size)
    expected = model(source, (source != 1).long(), given, use_cache=False).logits
    found = ours(source, (source != 1).sum(1), given)[0]
    assert expected.std() > 0.1
    assert torch.allclose(found[given != 1], expected[given != 1], atol=1e-4)


def other_rows(checkpoint: Path, folder: Path, *parts: slice) -> Path:
    """The same model with these rows of its vocabulary."""
    words = (checkpoint.parent / "dict.txt").read_text().splitlines()
    rows = [row for part in parts for row in range(len(words) + 4)[part]]
    folder.mkdir()
    shutil.copy(checkpoint.parent / "spm.model", folder)
    words = [words[row - 4] for row in rows[4:]]
    (folder / "dict.txt").write_text("\n".join(words) + "\n")

    def change(state):
        del state["smoe_dictionaries"]
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"):
            state["model"][f"{name}.weight"] = state["model"][f"{name}.weight"][rows]

    return changed(checkpoint, folder / "checkpoint.pt", change)


@pytest.mark.parametrize("order", ["same", "other"])
def test_export_is_the_imported_folder(kind, imported, theirs, m2m, nllb, tmp_path, order):
    """Bit for bit; transformers has a class for it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    if (kind, order) == ("m2m", "other"):
        pytest.skip("vocab.json has the words in any order")
    source = imported
    if order == "other":  # a piece behind all others, as of a vocabulary that has grown
        parts = (slice(50), slice(51, None), slice(50, 51))
        source = other_rows(imported, tmp_path / "other", *parts)
    call("export", source, "--to", "huggingface", "--output", tmp_path / "model")
    tensors, expected = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", {"m2m": m2m, "nllb": nllb}[kind])
    )
    assert tensors.keys() == expected.keys()
    assert all(same_bits(tensors[name], expected[name]) for name in expected)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert type(model) is type(theirs[1])
    settings = {"src_lang": DIRECTIONS[kind][0]}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", **settings)
    text = pretrained.lines(20, seed=8)
    assert tokenizer(text)["input_ids"] == theirs[0](text)["input_ids"]


def test_export_of_a_vocabulary_without_a_mask(kind, imported, tmp_path):
    from transformers import AutoTokenizer

    if kind == "m2m":
        pytest.skip("its tokenizer has none")
    source = other_rows(imported, tmp_path / "fewer", slice(-3))  # nor rows that no token uses
    call("export", source, "--to", "huggingface", "--output", tmp_path / "model")
    rows = json.loads((tmp_path / "model/config.json").read_text())["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert max(tokenizer("a <mask> b")["input_ids"]) < rows == len(tokenizer)


def test_ctranslate2(kind, imported, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    call("export", imported, "--to", "ctranslate2", "--output", tmp_path / "model")
    ours = SMoETransformerModel.from_pretrained(imported)
    source, target = DIRECTIONS[kind]
    text = pretrained.lines(10, seed=9)
    found = ours.translations(text, source_lang=source, target_lang=target, beam=1)
    translator = ctranslate2.Translator(str(tmp_path / "model"), intra_threads=1)
    results = translator.score_batch(
        [translation.tokens[:-1] for translation in found],
        [translation.hypotheses[0].tokens[:-1] for translation in found],
    )
    for translation, result in zip(found, results, strict=True):
        scores = translation.hypotheses[0].scores
        assert result.log_probs == pytest.approx([s * math.log(2) for s in scores], abs=1e-3)


def shards(folder: Path, copy: Path) -> list[Path]:
    """The same folder with weights in two files of torch; returns these."""
    from safetensors.torch import load_file

    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.embed_positions.weights"] = torch.ones(3, 2)  # of an old version
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    place = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        torch.save({n: t for n, t in tensors.items() if place[n] == file}, copy / file)
    index = json.dumps({"metadata": {}, "weight_map": place})
    (copy / "pytorch_model.bin.index.json").write_text(index)
    return [copy / name for name in names]


def test_other_files_of_the_same_model(imported, kind, theirs, m2m, nllb, tmp_path):
    """Weights in shards of torch; and of NLLB-200 tokenizer.json alone, as transformers 5 saves it."""
    first, second = shards({"m2m": m2m, "nllb": nllb}[kind], folder := tmp_path / "model")
    if kind == "nllb":
        theirs[0].save_pretrained(folder)
        (folder / "sentencepiece.bpe.model").unlink()
    call("import", folder, "--output", tmp_path / "new/ours.pt")
    expected, found = load(imported)["model"], load(tmp_path / "new/ours.pt")["model"]
    assert all(same_bits(found[name], expected[name]) for name in expected)
    for name in ("dict.txt", "langs.txt"):
        content = (tmp_path / "new" / name).read_bytes()
        assert content == (imported.parent / name).read_bytes()
    models = [read_subwords(p.parent / "spm.model") for p in (imported, tmp_path / "new/ours.pt")]
    for line in pretrained.lines(200, seed=4) + SPECIAL:
        assert models[0].encode(line) == models[1].encode(line)
    torch.save({"weights": [Path]}, first)
    assert str(first) in refusal("import", folder, "--output", tmp_path / "x/ours.pt")
    second.unlink()
    torch.save({}, first)
    assert str(second) in refusal("import", folder, "--output", tmp_path / "x/ours.pt")
    assert not (tmp_path / "x").exists()


ADDED = {"added_tokens_decoder": {str(4 + 497 + i): {"content": t} for i, t in enumerate("ab")}}
SETTINGS = "tokenizer_config.json"
# What git clone leaves without git-lfs.
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 99\n"


def bpe(merges: list[str], **others) -> dict:
    """The content of tokenizer.json of a BPE model."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "ab", "ba"]
    vocab = {word: i for i, word in enumerate(words)}
    model = {"type": "BPE", "vocab": vocab, "merges": merges} | others
    return {"added_tokens": [], "pre_tokenizer": {"type": "Metaspace"}, "model": model}


WRONG = [  # a file, the values that it gets or None without it, and what the sentence names
    ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("config.json", {"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
    ("config.json", {"encoder_layers": 3}, "encoder.layers.2"),
    ("config.json", {"d_model": "32"}, "d_model"),
    ("adapter_config.json", {"peft_type": "LORA"}, "adapter_config.json"),
    (SETTINGS, {"legacy_behaviour": True}, "legacy_behaviour"),
    (SETTINGS, {"added_tokens_decoder": {}}, SETTINGS),
    (SETTINGS, ADDED, "'a'"),
    (SETTINGS, {"tokenizer_class": "MBart50Tokenizer"}, "tokenizer_class"),
    ("config.json", {"decoder_start_token_id": 0}, "decoder_start_token_id"),
    ("config.json", {"activation_function": "quick_gelu"}, "activation_function"),
    (SETTINGS, None, SETTINGS),
    ("sentencepiece.bpe.model", None, "sentencepiece.bpe.model"),
    ("sentencepiece.bpe.model", other_subwords(), "model"),
    ("tokenizer.json", {"model": {"type": "WordPiece"}}, "tokenizer.json"),
    *(("tokenizer.json", bpe([*merges]), "model.merges") for merges in (("b a", "a b"), ["a a"])),
    ("tokenizer.json", bpe([], vocab={"a": 1}), "model.vocab"),
    ("tokenizer.json", bpe([], byte_fallback=True), "model.byte_fallback"),
    ("tokenizer.json", bpe([]) | {"pre_tokenizer": {"type": "ByteLevel"}}, "pre_tokenizer"),
    *((name, POINTER, f"{name} is a pointer") for name in ("model.safetensors", "vocab.json")),
]


@pytest.mark.parametrize("name, change, named", WRONG)
def test_what_cannot_be_imported_is_one_sentence(nllb, tmp_path, name, change, named):
    folder = damaged(nllb, tmp_path / "model", name, change)
    sentence = refusal("import", folder, "--output", tmp_path / "new/ours.pt")
    assert named in sentence and str(folder) in sentence
    assert not (tmp_path / "new").exists()


def test_a_language_that_was_added_to_the_tokenizer_is_named(m2m, tmp_path):
    folder = damaged(m2m, tmp_path / "model", "added_tokens.json", {"__mic__": 700})
    assert "'__mic__'" in refusal("import", folder, "--output", tmp_path / "ours.pt")


@pytest.mark.parametrize("told", ["file", "class"])
def test_small100(m2m, tmp_path, told):
    """The token of the target before the source, and none before the translation."""
    if told == "file":
        folder = shutil.copytree(m2m, tmp_path / "model")
        (folder / "tokenization_small100.py").touch()
    else:
        folder = damaged(
            m2m, tmp_path / "model", SETTINGS, {"tokenizer_class": "SMALL100Tokenizer"}
        )
    call("import", folder, "--output", tmp_path / "ours.pt")
    task = config_of(load(tmp_path / "ours.pt"), "task")
    assert (task["encoder_langtok"], task["decoder_langtok"]) == ("tgt", False)


@pytest.mark.parametrize("name", ["lm_head", "model.decoder.embed_tokens"])
def test_embeddings_apart_in_a_folder_that_ties_them(nllb, tmp_path, name):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(nllb, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for more, fits in ((0, True), (1, False)):
        tensors[f"{name}.weight"] = tensors["model.shared.weight"] + more
        save_file(tensors, folder / "model.safetensors")
        if fits:
            call("import", folder, "--output", tmp_path / "ours.pt")
    sentence = refusal("import", folder, "--output", tmp_path / "new/ours.pt")
    assert f"{folder}" in sentence and f"{name.removeprefix('model.')}.weight" in sentence
    assert not (tmp_path / "new").exists()


def test_languages_in_a_file(imported, tmp_path):
    """``--lang-dict`` of training: beside the dictionary, wherever it was."""
    folder = shutil.copytree(imported.parent, tmp_path / "copy")

    def change(state):
        task = config_of(state, "task")
        languages.extend(task["langs"])
        task |= {"langs": None, "lang_dict": "gone/langs.txt"}

    languages = []
    path = changed(folder / imported.name, folder / "checkpoint.pt", change)
    assert SMoETransformerModel.from_pretrained(path).task.langs == languages


# What transformers' class of NLLB-200 cannot split: it merges pairs, without bytes.
OTHER_SUBWORDS = [{"model_type": "unigram", "vocab_size": 360}]
OTHER_SUBWORDS += [{"vocab_size": 700, "byte_fallback": True}]


@pytest.mark.parametrize("options", OTHER_SUBWORDS)
def test_an_export_with_other_subwords_is_of_our_class(nllb, tmp_path, options):
    """Its tokenizer splits text as ours does."""
    from transformers import AutoTokenizer, M2M100Config, M2M100ForConditionalGeneration

    folder = tmp_path / "model"
    subwords = pretrained.write_subwords(tmp_path / "subwords", **options)
    tokens = pretrained.write_tokenizer(folder, subwords, "nllb")
    M2M100ForConditionalGeneration(
        M2M100Config(vocab_size=tokens, **pretrained.SIZES)
    ).save_pretrained(folder)
    call("import", folder, "--output", tmp_path / "ours.pt")
    call("export", tmp_path / "ours.pt", "--to", "huggingface", "--output", tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["model_type"] == "smoe_transformer"
    ours = SMoETransformerModel.from_pretrained(tmp_path / "ours.pt")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    tokenizer.src_lang, tokenizer.tgt_lang = "eng_Latn", "deu_Latn"
    for line in pretrained.lines(20, seed=8):
        expected = list(encoded(ours, line, ours.src_dict))
        assert tokenizer(line)["input_ids"][-len(expected) :] == expected


# fairseq's own files


@pytest.fixture(scope="module")
def published(imported, kind, tmp_path_factory) -> Path:
    """The files as fairseq names them, with a checkpoint of its own transformer."""
    folder = tmp_path_factory.mktemp("published")
    call("export", imported, "--to", "fairseq", "--output", folder / "stock.pt")
    words = (imported.parent / "dict.txt").read_text().splitlines(keepends=True)
    names = {"m2m": ("model_dict.128k.txt", "spm.128k.model")}
    names["nllb"] = ("dictionary.txt", "flores200_sacrebleu_tokenizer_spm.model")
    dictionary, subwords = names[kind]
    shutil.copy(imported.parent / "spm.model", folder / subwords)
    if kind == "nllb":  # which has no languages in its dictionary, and three tags behind them
        words = words[: -3 - len(pretrained.LANGUAGES)]
    (folder / dictionary).write_text("".join(words))

    def change(state):
        langs, tags = (None, False) if kind == "m2m" else (list(pretrained.LANGUAGES), True)
        own = {"langs": langs, "data": "gone", "fixed_dictionary": None}
        config_of(state, "task").update(own, add_data_source_prefix_tags=tags)

    return changed(folder / "stock.pt", folder / "checkpoint.pt", change)


def test_published_files_of_fairseq(kind, imported, published, tmp_path):
    output = tmp_path / "checkpoint.pt"
    call("import", published, "--output", output)
    assert (tmp_path / "langs.txt").read_text() == (imported.parent / "langs.txt").read_text()
    source, target = DIRECTIONS[kind]
    text, options = pretrained.lines(8, seed=6), {"max_len_a": 0, "max_len_b": 20}
    expected, found = (
        [t.hypotheses[0].text for t in ours.translations(text, 2, source, target, **options)]
        for ours in map(SMoETransformerModel.from_pretrained, (imported, output))
    )
    assert found == expected
    dictionary = next(published.parent.glob("*dict*.txt"))
    words = dictionary.read_text()
    try:
        dictionary.write_text(words.partition("\n")[2])
        assert str(published) in refusal("import", published, "--output", tmp_path / "x/c.pt")
        assert not (tmp_path / "x").exists()
    finally:
        dictionary.write_text(words)
