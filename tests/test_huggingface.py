"""``smoe export --to huggingface``: what transformers computes is what fairseq does."""

import json
import re
import shutil
from pathlib import Path

import handmade
import pytest
import torch
from commands import changed, config_of, run_python, untrained, without
from fairseq.data import Dictionary
from sampling import some
from test_expert_parallel_checkpoints import call, refusal
from test_golden import SYSTEMS_WITH_CHECKPOINT, TEXT, TRANSLATED, read_json
from test_malicious_checkpoints import older

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import SMoETransformerModel

pytest.importorskip("transformers", reason="the package transformers is not installed")

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402

from smoe_fairseq.huggingface import SMoEConfig, SMoETokenizer  # noqa: E402
from smoe_fairseq.modules import StratifiedMoE  # noqa: E402


def export(path: Path, output: Path) -> Path:
    call("export", path, "--to", "huggingface", "--output", output)
    return output


@pytest.fixture(scope="session")
def exported(recorded, tmp_path_factory) -> Path:
    """Of two strata."""
    return export(recorded / "strata-4-4.pt", tmp_path_factory.mktemp("exported") / "model")


def test_a_checkpoint_without_its_dictionaries(recorded, exported, tmp_path):
    """Their folder is named by --data, as at smoe translate."""
    shutil.copy(recorded / "strata-4-4.pt", tmp_path / "alone.pt")
    ask = ("export", tmp_path / "alone.pt", "--to", "huggingface", "--output", tmp_path / "model")
    assert "--data" in refusal(*ask)
    call(*ask, "--data", recorded)
    for file in ("vocab.json", "config.json"):
        assert (tmp_path / "model" / file).read_bytes() == (exported / file).read_bytes()
    stock = ("export", recorded / "dense.pt", "--to", "fairseq", "--output", tmp_path / "stock.pt")
    assert "--data" in refusal(*stock, "--data", recorded)


def test_a_checkpoint_of_an_older_fairseq(recorded, exported, tmp_path):
    path = changed(recorded / "strata-4-4.pt", tmp_path / "old.pt", lambda s: s.update(older(s)))
    output = ("--to", "huggingface", "--output", tmp_path / "model")
    call("export", path, "--data", recorded, *output)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "model" / file).read_bytes() == (exported / file).read_bytes()


@pytest.mark.parametrize("change", [lambda words: words[::-1], lambda words: words[1:]])
def test_other_dictionaries_are_named(recorded, tmp_path, change):
    for file in recorded.glob("dict.*.txt"):
        words = file.read_text().splitlines(keepends=True)
        (tmp_path / file.name).write_text("".join(change(words)))
    ask = ("export", recorded / "strata-4-4.pt", "--to", "huggingface", "--data", tmp_path)
    said = refusal(*ask, "--output", tmp_path / "model")
    assert str(recorded / "strata-4-4.pt") in said and str(tmp_path) in said
    assert not (tmp_path / "model").exists()


def both(path: Path, folder: Path, **given):
    """fairseq's interface to the checkpoint, and transformers' model and tokenizer."""
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder, **given).eval()
    ours = SMoETransformerModel.from_pretrained(path, **given)
    return ours, theirs, AutoTokenizer.from_pretrained(folder)


def batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and what the decoder is given, of three sentences, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    source, given = (torch.randint(4, vocabulary, (3, n), generator=generator) for n in (7, 6))
    source[1, 4:], given[1, 3:], given[2, 5:] = 1, 1, 1
    given[:, 0] = 2
    return source, given


def difference(path: Path, folder: Path, **given) -> float:
    """The greatest one between the logits of a batch, where it is no padding."""
    ours, theirs, _ = both(path, folder, **given)
    return difference_of(ours.models[0], theirs)


@torch.no_grad()
def difference_of(model, theirs) -> float:
    source, given = batch(min(len(model.encoder.dictionary), len(model.decoder.dictionary)))
    expected = model(source, (source != 1).sum(1), given)[0]
    found = theirs(source, source != 1, given).logits
    return float((found - expected)[given != 1].abs().max())


# A few systems here, and the others by `make soak`.
SYSTEMS = some(SYSTEMS_WITH_CHECKPOINT, "dense", "strata-4-4", "hash", "expert-choice", "released")


@pytest.mark.parametrize("system", SYSTEMS)
def test_logits_and_translations_are_fairseqs(recorded, tmp_path, system):
    path = recorded / f"{system}.pt"
    folder = export(path, tmp_path / "model")
    ours, model, tokenizer = both(path, folder)
    assert difference_of(ours.models[0], model) < 1e-5
    found = [translate(model, tokenizer, line) for line in TRANSLATED]
    assert found == read_json("translations")[system]["smoe translate"]
    ids = tokenizer(TRANSLATED[0], return_tensors="pt")
    assert model.generate(**ids, max_length=4).shape[1] <= 4


@pytest.mark.parametrize("given", [{"moe_top_k": 1}, {"smoe_exit_bias": 9.0}])
def test_given_options_are_those_of_the_experts(recorded, exported, given):
    assert difference(recorded / "strata-4-4.pt", exported, **given) < 1e-5
    blocks = SMoEConfig.from_pretrained(exported, dropout=0.3, **given).moe_blocks.values()
    assert blocks and all(block["dropout"] == 0.3 for block in blocks)


def translate(model, tokenizer, *text: str, **options) -> str:
    (found,) = tokenizer.batch_decode(
        model.generate(**tokenizer(list(text), return_tensors="pt", padding=True), **options),
        skip_special_tokens=True,
    )
    return found


@torch.no_grad()
def test_the_cache_gives_the_logits_of_a_whole_pass(exported):
    """Step by step, and two steps at a time."""
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    source, given = batch(model.config.vocab_size)
    given[given == 1] = 5
    expected = model(source, source != 1, given).logits
    with pytest.raises(UsageError, match="cache_implementation"):
        model.generate(source, attention_mask=source != 1, cache_implementation="static")
    for inputs, name in (({"labels": given}, "input_ids"), ({"input_ids": source}, "labels")):
        with pytest.raises(ValueError, match=name):
            model(**inputs)
    for width in (1, 2):
        cache, found = None, []
        for start in range(0, given.shape[1], width):
            part = given[:, start : start + width]
            output = model(source, source != 1, part, past_key_values=cache)
            cache = output.past_key_values
            found.append(output.logits)
        assert torch.allclose(torch.cat(found, 1), expected, atol=1e-5)
    assert cache.get_seq_length() == given.shape[1]


@torch.no_grad()
def test_padding_before_the_tokens_in_the_cache_has_no_position(exported):
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    source, given = batch(model.config.vocab_size)
    given[given == 1] = 5
    given[1, :2] = 1
    mask = (given != 1).long()
    expected = model(source, source != 1, given, mask).logits
    cache = model(source, source != 1, given[:, :4], mask[:, :4]).past_key_values
    found = model(source, source != 1, given[:, 4:], mask, past_key_values=cache).logits
    assert torch.allclose(found, expected[:, 4:], atol=1e-5)


@pytest.mark.parametrize("system", some(["dense", "top-p", "null"], "top-p"))
def test_the_loss_is_the_criterions(recorded, tmp_path, system):
    """Mean over the tokens of label-smoothed cross entropy and the losses of the gates."""
    path = recorded / f"{system}.pt"
    ours, model, _ = both(path, export(path, tmp_path / "model"))
    source, given = batch(model.config.vocab_size)
    given[given == 1] = 5
    labels = torch.cat([given[:, 1:], torch.full_like(given[:, :1], 2)], 1)
    net_input = {"src_tokens": source, "src_lengths": (source != 1).sum(1)}
    net_input["prev_output_tokens"] = given
    sample = {"net_input": net_input, "target": labels, "ntokens": labels.numel()}
    criterion = ours.task.build_criterion(ours.cfg.criterion)
    loss, _, log = criterion(ours.models[0], sample)
    with torch.no_grad():
        output = model(source, source != 1, labels=labels)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), given)
    assert float(output.loss) == pytest.approx(float(loss.detach()) / labels.numel(), rel=1e-5)
    gates = 0.01 * log.get("moe_gate_loss", 0) + 1e-4 * log.get("moe_entropy_loss", 0)
    parts = output.encoder_aux_loss + output.decoder_aux_loss
    assert float(parts) == pytest.approx(float(gates) / labels.numel(), rel=1e-4)
    assert (output.encoder_aux_loss > 0) == (system != "dense")


def test_router_logits_attention_and_hidden_states(exported):
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    source, given = batch(model.config.vocab_size)
    asked = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": True}
    output = model(source, source != 1, given, **asked)
    plain = model(source, source != 1, given)
    assert torch.allclose(output.logits, plain.logits, atol=1e-5)
    assert plain.encoder_router_logits is None and plain.cross_attentions is None
    for logits in (output.encoder_router_logits, output.decoder_router_logits):
        ((first, second),) = logits  # one MoE layer, of two strata: 4-4
        assert first.shape[1] == 8 and second.shape[1] == 4
    assert len(output.decoder_hidden_states) == len(output.encoder_hidden_states) == 3
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    for attention in (output.decoder_attentions[0], output.cross_attentions[0]):
        assert torch.allclose(attention.sum(-1), torch.ones(()), atol=1e-5)
    assert isinstance(model(source, source != 1, given, return_dict=False), tuple)


def test_gradient_checkpointing_changes_no_gradient(exported):
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).train()
    source, labels = batch(model.config.vocab_size)
    labels[labels == 1] = -100

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        model(source, source != 1, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    for reentrant in (False, True):  # the second recomputes the losses of the gates, too
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert model.is_gradient_checkpointing
        for name, gradient in gradients().items():
            assert torch.allclose(gradient, expected[name], atol=1e-6), name


def test_what_is_saved_is_loaded_again(recorded, tmp_path):
    export(recorded / "hash.pt", tmp_path / "model")
    kinds = (AutoModelForSeq2SeqLM, AutoTokenizer)
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in kinds)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "again")
    again, tokenizer_again = (kind.from_pretrained(tmp_path / "again") for kind in kinds)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert tokenizer_again(TRANSLATED)["input_ids"] == tokenizer(TRANSLATED)["input_ids"]
    fresh = AutoModelForSeq2SeqLM.from_config(model.config)  # with new weights
    source, given = batch(model.config.vocab_size)
    assert fresh(source, source != 1, given).logits.isfinite().all()


def test_experts_that_accelerate_offloads_are_refused(exported):
    model = AutoModelForSeq2SeqLM.from_pretrained(exported)
    source, given = batch(model.config.vocab_size)
    for block in filter(lambda module: isinstance(module, StratifiedMoE), model.modules()):
        block.experts.to("meta")
    with pytest.raises(ValueError, match="device_map"):
        model(source, source != 1, given)


def test_weights_in_float16(recorded, exported, tmp_path):
    """Half as large; the model computes in float32, near the exact one."""
    path = recorded / "strata-4-4.pt"
    call("export", path, "--to", "huggingface", "--fp16", "--output", tmp_path / "model")
    files = [folder / "model.safetensors" for folder in (exported, tmp_path / "model")]
    assert files[1].stat().st_size < 0.6 * files[0].stat().st_size
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert 0 < difference(path, tmp_path / "model") < 0.05


OPTIONS = {
    "post-norm": {f"{side}_normalize_before": False for side in ("encoder", "decoder")},
    "learned": {"encoder_learned_pos": True, "decoder_learned_pos": True}
    | {"max_source_positions": 20, "moe_gate_residual": "layers", "encoder_moe_freq": 1},
    "apart": {"share_all_embeddings": False, "encoder_embed_dim": 24, "activation_fn": "swiglu"}
    | {"moe_gate": "threshold"},
    "output": {"share_all_embeddings": False, "share_decoder_input_output_embed": True}
    | {"moe_gate": "depths"},
    "others": {"no_token_positional_embeddings": True, "no_scale_embedding": True}
    | {"layernorm_embedding": True, "activation_fn": "gelu_accurate"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_the_transformer(recorded, tmp_path, case):
    """Embeddings that are not shared have dictionaries of different sizes here."""
    path = link_text(tmp_path / "run") / "checkpoint_last.pt"
    system = {"post-norm": "dense", "output": "expert-choice"}.get(case, "strata-4-4")
    shared = OPTIONS[case].get("share_all_embeddings", True)
    if not shared:
        words = (path.parent / "dict.tgt.txt").read_text().splitlines(keepends=True)
        (path.parent / "dict.tgt.txt").unlink()
        (path.parent / "dict.tgt.txt").write_text("".join(words[:-2]))
    untrained(recorded / f"{system}.pt", path, path.parent, **OPTIONS[case])
    changed(path, path, lambda state: state.pop("smoe_dictionaries", None))
    folder = export(tmp_path / "run", tmp_path / "model")
    assert (folder / "target_vocab.json").exists() != shared
    assert difference(path, folder) < 1e-5


def test_a_short_limit_is_that_of_smoe_translate(recorded, tmp_path):
    path = link_text(tmp_path / "run") / "checkpoint_last.pt"
    limit = lambda state: state["cfg"]["model"].update(max_target_positions=9)  # noqa: E731
    changed(recorded / "strata-4-4.pt", path, limit)
    ours, model, tokenizer = both(path, export(path, tmp_path / "model"))
    (found,) = ours.translations(TRANSLATED[0], min_len=8, max_len_b=99)
    ids = tokenizer(TRANSLATED[0], return_tensors="pt")
    tokens = model.generate(**ids, min_new_tokens=8)[0, 1:]  # without the first, which is given
    assert len(tokens) == len(found.hypotheses[0].tokens) == 9


def test_an_old_checkpoint_without_its_output_norm(recorded, tmp_path):
    """Its export is taken back, too."""
    path = link_text(tmp_path / "run") / "checkpoint_last.pt"
    options = {"smoe_strata": "8", "decoder_smoe_strata": "4-4", "smoe_norm": "released"}
    untrained(recorded / "strata-4-4.pt", path, path.parent, **options)
    gone = [f"encoder.layers.1.moe.layer_norms.1.{name}" for name in ("weight", "bias")]
    changed(path, path, lambda state: [state["model"].pop(name) for name in gone])
    folder = export(path, tmp_path / "model")
    assert difference(path, folder) < 1e-5
    call("import", folder, "--output", tmp_path / "back.pt")


def link_text(folder: Path) -> Path:
    folder.mkdir()
    for file in TEXT.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_a_config_by_hand_has_the_defaults_of_the_block():
    sizes = {f"{side}_embed_dim": 16 for side in ("encoder", "decoder")}
    moe = {"encoder.layers.1.moe": {"strata": "2-2"}, "decoder.layers.0.moe": {"top_k": 1}}
    config = SMoEConfig(vocab_size=30, encoder_ffn_embed_dim=24, **sizes, moe_blocks=moe)
    model = AutoModelForSeq2SeqLM.from_config(config)
    first, second = model.encoder.layers[1].moe, model.decoder.layers[0].moe
    assert str(first.strata) == "2-2" and first.experts.w1.shape == (4, 24, 16)
    assert str(second.strata) == StratifiedMoE(16, 24).config.strata and second.choices == 1
    ids = torch.tensor([[5, 6, 2]])
    model(ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"activation_fn": "os.system"}, "activation_fn"),
        ({"moe_blocks": [1]}, "moe_blocks"),
        ({"moe_blocks": {"encoder.layers.0.moe": {"gate": "foo"}}}, "encoder.layers.0.moe.gate"),
        ({"moe_blocks": {"encoder.layers.0.moe": {"activation_fn": "foo"}}}, "moe.activation_fn"),
        ({"encoder_attention_heads": 3}, "encoder_attention_heads"),
        ({"decoder_attention_heads": 0}, "decoder_attention_heads"),
        ({"decoder_layers": "2"}, "decoder_layers"),
        ({"dropout": float("nan")}, "dropout"),
    ],
)
def test_a_config_that_makes_no_model_is_named(change, named):
    with pytest.raises(UsageError, match=named.replace(".", r"\.")):
        AutoModelForSeq2SeqLM.from_config(SMoEConfig(vocab_size=30, **change))


@torch.no_grad()
def test_embeddings_are_given_as_to_other_models(exported):
    """As the model's own ones return them, which captum and PEFT's prompts rely on."""
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    source, target = batch(model.config.vocab_size)
    expected = model(source, source != 1, target).logits
    embeds = model.get_input_embeddings()(source)
    assert torch.equal(model(None, source != 1, target, inputs_embeds=embeds).logits, expected)
    embeds = model.decoder.embed_tokens(target)
    found = model(source, source != 1, None, target != 1, decoder_inputs_embeds=embeds).logits
    assert torch.equal(found, expected)


def test_the_loss_of_an_update_of_several_batches(exported):
    """Divided by the labels of all batches, their losses add up to that of the whole."""
    model = AutoModelForSeq2SeqLM.from_pretrained(exported)  # nothing is dropped in evaluation
    model.config.router_aux_loss_coef = 0.0  # whose products are of each batch by itself
    source, labels = batch(model.config.vocab_size)
    labels[labels == 1] = -100
    whole = model(source, source != 1, labels=labels).loss
    items = (labels != -100).sum()
    parts = [
        model(s, s != 1, labels=y, num_items_in_batch=items).loss
        for s, y in ((source[:1], labels[:1]), (source[1:], labels[1:]))
    ]
    assert torch.allclose(sum(parts), whole, atol=1e-5)


def make_trainer(model, folder: Path, tokenizer, **settings):
    """transformers' Trainer, which learns to write in capital letters."""
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    settings |= {"output_dir": str(folder), "report_to": [], "use_cpu": True, "max_steps": 3}
    data = [tokenizer(line, text_target=line.upper()) for line in TRANSLATED]
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    return Seq2SeqTrainer(model, Seq2SeqTrainingArguments(**settings), collator, data)


def test_trainer_lowers_the_loss_and_lora_trains(exported, tmp_path):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForSeq2SeqLM.from_pretrained(exported, device_map="auto")
    trainer = make_trainer(model, tmp_path, tokenizer, learning_rate=0.005, logging_steps=1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    # Without labels the gates would be trained without their losses.
    with pytest.raises(UsageError, match="config.label_smoothing"):
        make_trainer(model, tmp_path, tokenizer, label_smoothing_factor=0.1).train()
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj", "v_proj"])
    lora = peft.get_peft_model(model, config)
    lora(**trainer.data_collator(trainer.train_dataset)).loss.backward()
    assert {name for name, p in lora.named_parameters() if p.grad is not None} == {
        name for name, _ in lora.named_parameters() if "lora_" in name
    }


# The tokenizer


def test_subwords_are_sentencepieces(tmp_path):
    """As fairseq encodes them, unknown ones and what looks like a special token too."""
    import sentencepiece
    from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

    lines = [f"the {word} dog's house, number {i}" for i, word in enumerate("big red old".split())]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 9), model_prefix=str(tmp_path / "spm"), vocab_size=24
    )
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(tmp_path / "spm.model")))
    dictionary = Dictionary()
    for piece in sorted({piece for line in lines for piece in bpe.encode(line).split()})[2:]:
        dictionary.add_symbol(piece)
    (tmp_path / "vocab.json").write_text(json.dumps(dictionary.symbols))
    tokenizer = SMoETokenizer(
        str(tmp_path / "vocab.json"), sp_model_file=str(tmp_path / "spm.model")
    )
    for text in (*lines, "the </s> zebra", " two   blanks ", "", "<unk> <pad>", "the\u3000old"):
        ids = tokenizer(text)["input_ids"]
        expected = dictionary.encode_line(bpe.encode(text), add_if_not_exist=False)
        assert ids == expected.tolist(), text
        shown = bpe.decode(dictionary.string(torch.tensor(ids)))
        assert tokenizer.decode(ids, skip_special_tokens=True) == shown
    tokenizer.add_tokens(["[NAME]"])
    for text in ("the [NAME] house", "[NAME] the [NAME] [NAME]"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer("the \ud800old")["input_ids"] == tokenizer("the old")["input_ids"]
    for index in (-100, 9999):  # -100: a label that is not counted
        with pytest.raises(UsageError, match=str(index)):
            tokenizer.batch_decode([[5, index, 2]], skip_special_tokens=True)
    with pytest.raises(UsageError, match="spm.model"):
        SMoETokenizer(str(tmp_path / "vocab.json"))
    tokenizer.save_pretrained(tmp_path)
    SMoETokenizer.from_pretrained(tmp_path)
    symbols = [*dictionary.symbols[:4], *dictionary.symbols[:3:-1]]
    (tmp_path / "vocab.json").write_text(json.dumps(symbols))
    with pytest.raises(UsageError, match="vocab.json"):
        SMoETokenizer.from_pretrained(tmp_path)


def test_a_language_that_all_pairs_have_is_the_tokenizers(multilingual, tmp_path):
    """What else it has of the task, too."""
    pairs = ["aa-bb", "aa-cc"]
    change = lambda state: config_of(state, "task").update(lang_pairs=pairs)  # noqa: E731
    folder = export(changed(multilingual, tmp_path / "aa.pt", change), tmp_path / "model")
    found = AutoTokenizer.from_pretrained(folder)
    assert (found.src_lang, found.tgt_lang, found.lang_pairs) == ("aa", None, pairs)
    assert (found.encoder_langtok, found.decoder_langtok) == ("tgt", False)
    assert found.language_tokens == {name: f"__{name}__" for name in handmade.LANGUAGES}
    with pytest.raises(UsageError, match="tgt_lang is not set; expected one of aa"):
        found("aa1")
    with pytest.raises(UsageError, match="dd: .*.* aa, bb, cc"):
        found.tgt_lang = "dd"
    with pytest.raises(UsageError, match="tgt_lang='cc'"):
        found("aa1", tgt_lang="cc")
    found.tgt_lang = "bb"
    assert found.encode("aa1") == found.convert_tokens_to_ids(["__bb__", "aa1", "</s>"])


PROGRAM = """
import smoe_fairseq.huggingface
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
found = model.generate(**tokenizer(sys.argv[2], return_tensors="pt"))
print("found:", tokenizer.decode(found[0], skip_special_tokens=True))
"""


def test_it_works_without_fairseq(exported):
    program = without("fairseq", "hydra", "omegaconf") + PROGRAM
    said = run_python(program, exported, TRANSLATED[0]).stdout
    words = read_json("translations")["strata-4-4"]["smoe translate"][0]
    assert f"found: {words}" in said.splitlines()


# The folder


def test_the_card_has_the_runs_scores(recorded, tmp_path):
    folder = link_text(tmp_path / "run")
    (folder / "checkpoint_best.pt").symlink_to(recorded / "strata-4-4.pt")
    score = {"bleu": 12.345, "signature": "nrefs:1", "sentences": 8}
    score["others"] = {"chrF++": [40.125, "nc:6"]}
    content = {"checkpoint": "checkpoint_best.pt", "generate": "--beam 5"}
    content["scores"] = {"src-tgt": score}
    (folder / "scores.json").write_text(json.dumps(content))
    flags = {"method": "m", "dictionary": "d", "flags": {"--lr": "0.006", "--moe-stacked": ""}}
    (folder / "identity.json").write_text(json.dumps(flags))
    card = (export(folder, tmp_path / "model") / "README.md").read_text()
    assert "```\n--lr 0.006\n--moe-stacked\n```\n" in card
    assert "| src-tgt | 12.35 | 40.12 | 8 |\n" in card and "strata 4-4" in card
    assert "BLEU: `nrefs:1`; chrF++: `nc:6`\n" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(code.replace('"model"', repr(str(tmp_path / "model"))), {})
    # Of another checkpoint of the run, or of the one that had this name, they are no scores.
    shutil.copyfile(folder / "checkpoint_best.pt", folder / "checkpoint_last.pt")
    other = export(folder / "checkpoint_last.pt", tmp_path / "last")
    content["contents"] = {"checkpoint_best.pt": "0"}
    (folder / "scores.json").write_text(json.dumps(content))
    changed = export(folder, tmp_path / "changed")
    assert not any("12.35" in (made / "README.md").read_text() for made in (other, changed))


def test_the_card_of_a_language_with_a_hyphen(hyphens, tmp_path):
    card = (export(hyphens / "checkpoint_last.pt", tmp_path / "model") / "README.md").read_text()
    assert 'language: ["en", "zh-CN"]\n' in card and "en-zh-CN" in card


def test_what_cannot_be_exported_is_one_sentence(recorded, tmp_path):
    cases = {  # by what the sentence names
        "denoising": lambda s: s["cfg"]["task"].update(_name="denoising"),
        "--bpe gpt2": lambda s: s["cfg"].update(bpe={"_name": "gpt2"}),
        "decoder.layer_norm.bias": lambda s: s["model"].pop("decoder.layer_norm.bias"),
    }
    for number, (named, change) in enumerate(cases.items()):
        path = link_text(tmp_path / str(number)) / "checkpoint_last.pt"
        changed(recorded / "strata-4-4.pt", path, change)
        ask = ("export", path, "--to", "huggingface", "--output", tmp_path / "model")
        assert named in refusal(*ask)
    assert not (tmp_path / "model").exists()


def test_tokens_that_are_added(exported, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.add_tokens(["<new>", "<new2>"])
    word = TRANSLATED[0].split()[0]
    ids = tokenizer(f"{word} <new2> {word} </s>")["input_ids"]
    assert ids[1] == tokenizer.vocab_size + 1 and ids[0] == ids[2]
    assert ids[3:] == tokenizer("</s>")["input_ids"] and len(ids) == 5  # text, as in fairseq
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(f"{word} <new2> {word} </s>")["input_ids"] == ids
    assert again.get_vocab() == tokenizer.get_vocab() and "<new>" in again.get_vocab()
    assert again.decode(ids[:3]) == f"{word} <new2> {word}"
    at_once = AutoTokenizer.from_pretrained(exported, additional_special_tokens=["<new>"])
    assert at_once(f"{word} <new>")["input_ids"][1] == tokenizer.vocab_size
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    batch = {name: torch.tensor([ids]) for name in ("input_ids", "labels")}
    assert loaded(**batch).logits.shape == (1, len(ids), len(tokenizer))
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_a_hash_gate_gets_the_tokens_that_are_added(recorded, tmp_path):
    folder = export(recorded / "hash.pt", tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tables = {name: table for name, table in model.state_dict().items() if name.endswith(".table")}
    old = model.config.vocab_size
    for new in (old + 3, old - 2):
        model.resize_token_embeddings(new)
        model.save_pretrained(folder)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        batch = {name: torch.tensor([[new - 1, 2]]) for name in ("input_ids", "labels")}
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
        kept = min(old, new)
        state = loaded.state_dict()
        assert all(torch.equal(state[name][:kept], tables[name][:kept]) for name in tables)
    assert tables
