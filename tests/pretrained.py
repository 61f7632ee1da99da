"""Small M2M-100 and NLLB-200 of transformers, with text of ten scripts."""

import json
import random
import shutil
from pathlib import Path

import sentencepiece
import torch

LANGUAGES = ("eng_Latn", "deu_Latn", "swh_Latn", "zho_Hans")  # of the small NLLB-200
SCRIPTS = {  # the first letter of ten scripts, and how many of its letters the text has
    **{"a": 26, "α": 24, "б": 30, "ა": 30, "ب": 8, "א": 20, "क": 20, "ก": 30, "か": 20, "가": 30},
}
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
SIZES |= {"decoder_ffn_dim": 64, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def lines(number: int, seed: int = 1) -> list[str]:
    """Lines of 1 to 6 words, each of one script."""
    generator, words = random.Random(0), []
    for first, letters in SCRIPTS.items():
        alphabet = [chr(ord(first) + i) for i in range(letters)]
        words.append(["".join(generator.choices(alphabet, k=1 + i % 4)) for i in range(20)])
    generator = random.Random(seed)
    return [
        " ".join(generator.choices(words[i % len(words)], k=generator.randint(1, 6)))
        for i in range(number)
    ]


def write_subwords(folder: Path, **options) -> Path:
    """A sentencepiece model of the text, in BPE as those of M2M-100 and NLLB-200."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_text("\n".join([*lines(400), "0123456789 .,!?-"]))
    file = folder / "sentencepiece.bpe.model"
    options = {"model_type": "bpe", "vocab_size": 500, "character_coverage": 1.0} | options
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(file.with_suffix("")), minloglevel=2, **options
    )
    return file


def write_tokenizer(folder: Path, subwords: Path, kind: str) -> int:
    """The files of the tokenizer under their published names; returns the number of its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(subwords, folder / "sentencepiece.bpe.model")
    model = sentencepiece.SentencePieceProcessor(model_file=str(subwords))
    pieces = [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    if kind == "m2m":
        ids = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
        (folder / "vocab.json").write_text(json.dumps(ids))
        settings = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "en"}
        tokens = len(ids) + 100
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        added = dict(enumerate(special)) | dict(enumerate([*LANGUAGES, "<mask>"], 4 + len(pieces)))
        added = {i: {"content": token, "special": True} for i, token in added.items()}
        settings = {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn"}
        settings |= {"additional_special_tokens": LANGUAGES, "added_tokens_decoder": added}
        tokens = len(added) + len(pieces)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokens


def write_model(folder: Path, kind: str, updates: int = 0) -> Path:
    """A folder as of `save_pretrained`, of a model trained for some updates to repeat its text.

    The embeddings have rows that no token uses.
    """
    from transformers import AutoTokenizer, M2M100Config, M2M100ForConditionalGeneration

    tokens = write_tokenizer(folder, write_subwords(folder.with_name(f"{folder.name}-text")), kind)
    torch.manual_seed(1)
    config = M2M100Config(vocab_size=tokens + (8 if kind == "m2m" else 2), **SIZES)
    config.init_std = 0.02 if updates else 0.3
    model = M2M100ForConditionalGeneration(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    codes = ("en", "de", "sw", "zh") if kind == "m2m" else LANGUAGES
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for update in range(updates):
        tokenizer.src_lang = codes[update % 4]
        tokenizer.tgt_lang = codes[(update + 1 + update % 3) % 4]
        text = lines(32, update)
        sample = tokenizer(text, text_target=text, return_tensors="pt", padding=True)
        sample["labels"][sample["labels"] == 1] = -100
        model(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    return folder
