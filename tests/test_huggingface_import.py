"""``smoe import`` of folders of transformers: the same model again, and NLLB-MoE's layout."""

import json
from pathlib import Path

import handmade
import pytest
import torch
from sampling import some
from test_checkpoint_files import contents
from test_expert_parallel_checkpoints import call, refusal
from test_golden import SYSTEMS_WITH_CHECKPOINT, TRANSLATED, read_json

from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.translate.translator import BatchTranslator

pytest.importorskip("transformers", reason="the package transformers is not installed")

from test_huggingface import batch, export, trained  # noqa: E402, F401

SYSTEMS = some(SYSTEMS_WITH_CHECKPOINT, "dense", "strata-4-4", "hash", "released")


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_export_is_taken_back(trained, tmp_path, system):  # noqa: F811
    """All tensors, all options, and the translations, with nothing but what the folder has."""
    source = trained / f"{system}.pt"
    folder = export(source, tmp_path / "model")
    output = tmp_path / "new/ours.pt"
    call("import", folder, "--output", output)
    expected, found = load(source)["model"], load(output)["model"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if not name.endswith("._float_tensor"):  # a buffer that fairseq leaves uninitialised
            assert torch.equal(tensor, expected[name]), name
    ours = SMoETransformerModel.from_pretrained(output)
    translator = BatchTranslator(ours)
    said = [t.hypotheses[0].text for t in translator.translate_batch(TRANSLATED, "src", "tgt")]
    assert said == read_json("translations")[system]["smoe translate"]


def test_languages_and_settings_are_taken_back(three_languages, tmp_path):
    """And what transformers has saved again is taken, in several files too."""
    from transformers import AutoModelForSeq2SeqLM

    more = (*handmade.MULTILINGUAL, "--decoder-langtok", "--label-smoothing", 0.2)
    handmade.train(three_languages, tmp_path, *more)
    source = tmp_path / "checkpoint_last.pt"
    folder = export(source, tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    output = tmp_path / "new/ours.pt"
    call("import", folder, "--output", output)
    assert load(output)["cfg"]["criterion"]["label_smoothing"] == 0.2
    translators = [
        BatchTranslator(SMoETransformerModel.from_pretrained(path)) for path in (source, output)
    ]
    text = [" ".join(handmade.words_of("aa")[:n]) for n in (2, 5)]
    for target in ("bb", "cc"):
        expected, found = (
            [t.hypotheses[0].tokens for t in each.translate_batch(text, "aa", target)]
            for each in translators
        )
        assert found == expected


def test_what_cannot_be_imported_is_one_sentence(trained, tmp_path):  # noqa: F811
    folder = export(trained / "strata-4-4.pt", tmp_path / "model")
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    ask = ("import", folder, "--output", tmp_path / "new/ours.pt")

    def changed(name: str, **values) -> bytes:
        return json.dumps(json.loads(kept[name]) | values).encode()

    cases = {
        "config.json is missing: expected a folder of smoe export": ("config.json", None),
        "is of a model_type bert; expected smoe_transformer": (
            "config.json",
            changed("config.json", model_type="bert"),
        ),
        "config.json cannot be read": ("config.json", b"{"),
        "model.safetensors is missing: expected weights": ("model.safetensors", None),
        "model.safetensors is damaged": ("model.safetensors", kept["model.safetensors"][:1000]),
        "vocab.json cannot be read": ("vocab.json", None),
        "has no lang_pairs, such as en-de": (
            "tokenizer_config.json",
            changed("tokenizer_config.json", lang_pairs=[]),
        ),
        "and its options make it": ("config.json", changed("config.json", encoder_ffn_embed_dim=9)),
    }
    for words, (name, content) in cases.items():
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        assert words in refusal(*ask)
        (folder / name).write_bytes(kept[name])
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/dict.src.txt").write_text("another 1\n")
    before = contents(tmp_path / "new")
    assert "dict.src.txt is there already and differs; choose another folder" in refusal(*ask)
    assert contents(tmp_path / "new") == before


# NLLB-MoE


def weighted_sum(self, x_TD, first_TE, weight_TE):
    """``sum_e G_e FFN_e(x)``, without what is masked on average (NLLB team 2022, section 6.2).

    transformers 5 takes the mask of first choices for numbers of experts, so that only two ever compute.
    """
    outputs = [expert(x_TD) for expert in self.values() if hasattr(expert, "fc1")]
    y_TD = sum(w.unsqueeze(1) * y for w, y in zip(weight_TE.T, outputs, strict=True))
    return y_TD * (1 - self.moe_token_dropout)


def nllb(folder: Path, **options):
    """A small model of transformers with random weights, in a folder."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    sizes = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 4}
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
    "plain": {"moe_token_dropout": 0.0},
    "masks": {"normalize_router_prob_before_dropping": True, "scale_embedding": False},
    "apart": {"tie_word_embeddings": False, "activation_function": "gelu"},
}


@pytest.mark.parametrize("case", NLLB)
@torch.no_grad()
def test_nllb_moe(tmp_path, case, capsys):
    model = nllb(tmp_path / "model", **NLLB[case])
    call("import", tmp_path / "model", "--output", tmp_path / "ours.pt")
    assert "3 MoE layers" in capsys.readouterr().out
    for language in ("src", "tgt"):
        words = "".join(f"w{n} 1\n" for n in range(36))
        (tmp_path / f"dict.{language}.txt").write_text(words)
    ours = SMoETransformerModel.from_pretrained(tmp_path / "ours.pt").models[0]
    source, given = batch(40)
    expected = model(source, (source != 1).long(), given, use_cache=False).logits
    found = ours(source, (source != 1).sum(1), given)[0]
    assert expected.std() > 0.1
    assert torch.allclose(found[given != 1], expected[given != 1], atol=1e-4)
