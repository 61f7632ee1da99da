"""``smoe import`` of M2M-100, NLLB-200 and NLLB-MoE: what transformers computes, with their text."""

from pathlib import Path

import pretrained
import pytest
import torch
from test_expert_parallel_checkpoints import call

from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.translate.readout import encoded

pytest.importorskip("transformers", reason="the package transformers is not installed")

from test_huggingface import batch  # noqa: E402

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
    text = pretrained.lines(100, seed=5)
    task = ours.task_for(source, target)
    for line, ids in zip(text, tokenizer(text)["input_ids"], strict=True):
        language = ours.src_dict.index(f"__{source}__")
        assert [language, *encoded(ours, line, task.source_dictionary)] == ids
    sample = tokenizer(text[:20], return_tensors="pt", padding=True)
    first = tokenizer.convert_tokens_to_ids(f"__{target}__" if kind == "m2m" else target)
    said = model.generate(**sample, forced_bos_token_id=first, num_beams=1, max_length=30)
    options = {"beam": 1, "max_len_a": 0, "max_len_b": 28}
    found = ours.translations(text[:20], source_lang=source, target_lang=target, **options)
    for ids, translation in zip(said.tolist(), found, strict=True):
        tokens = [ours.tgt_dict.index(token) for token in translation.hypotheses[0].tokens]
        expected = ids[1 : ids.index(2, 1) + 1] if 2 in ids[1:] else ids[1:]
        assert tokens[:28] == expected[:28]  # at the limit ours ends


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
    "plain": {"moe_token_dropout": 0.0},
    "masks": {"normalize_router_prob_before_dropping": True, "scale_embedding": False},
    "apart": {"tie_word_embeddings": False, "activation_function": "gelu"},
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
