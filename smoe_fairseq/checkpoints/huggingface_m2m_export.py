"""``smoe export --to huggingface`` of a dense model with the text of M2M-100 or NLLB-200, as their class.

transformers loads the folder without this package.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoints.huggingface_m2m import OF_SIDE
from smoe_fairseq.checkpoints.huggingface_m2m_text import CODES, LANGUAGE
from smoe_fairseq.checkpoints.model import SIDES, check_fit
from smoe_fairseq.checkpoints.pieces import is_bpe
from smoe_fairseq.checkpoints.sets import UNSET
from smoe_fairseq.files import read_plain
from smoe_fairseq.modules.activation import GATED
from smoe_fairseq.subwords import CODES as subword_nmt
from smoe_fairseq.subwords import SPECIAL, checked_subwords, read_subwords

_PLAIN = {  # what the class of transformers supports
    **{f"{side}_normalize_before": True for side in SIDES},
    **{f"{side}_learned_pos": False for side in SIDES},
    **{"layernorm_embedding": False, "no_token_positional_embeddings": False},
    "share_all_embeddings": True,
}


@dataclass(frozen=True)
class Text:
    """The vocabulary of a tokenizer of transformers.

    Args:
        words: its first tokens, by id.
        tokens: those of languages, as fairseq writes them, and ``<mask>``, which follow.
        rows: the row of the embeddings of each id; those of no token last.
        kind: the name of M2M-100's list of languages; None for NLLB-200.
        subwords: the file of the sentencepiece model.
    """

    words: list[str]
    tokens: list[str]
    rows: list[int]
    kind: str | None
    subwords: Path

    @classmethod
    def of(cls, task, options: Mapping, weights: Mapping[str, Tensor]) -> "Text | None":
        """That of a model, if it is a dense one of this family and has languages of its tokenizers."""
        args = getattr(task, "args", None)
        differs = any(options[name] != value for name, value in _PLAIN.items())
        if differs or any(".moe." in name for name in weights) or not hasattr(task, "data_manager"):
            return None
        if args.langtoks["main"] != ("src", "tgt") or args.lang_tok_style != "multilingual":
            return None
        if options["encoder_embed_dim"] != options["decoder_embed_dim"]:
            return None
        if options["activation_fn"] in GATED:
            return None
        symbols = task.source_dictionary.symbols
        if symbols != task.target_dictionary.symbols or symbols[:4] != SPECIAL:
            return None
        subwords = checked_subwords(args.data, task.source_dictionary)
        if subwords is None or subwords.name in subword_nmt:
            return None
        model = read_subwords(subwords)
        pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        tokens = [s for s in symbols if LANGUAGE[True].fullmatch(s) and s not in pieces]
        languages = [token.strip("_") for token in tokens]
        by_list = {tuple(codes.split()): kind for kind, codes in CODES.items()}
        kind = by_list.get(tuple(languages))
        if len(languages) < 2 or not (kind or all(map(LANGUAGE[False].fullmatch, languages))):
            return None
        if not kind and ("<0x00>" in pieces or not is_bpe(read_plain(subwords))):
            return None  # NllbTokenizer would split otherwise
        row = {symbol: i for i, symbol in enumerate(symbols)}
        known = {*pieces, *SPECIAL}
        words = [s for s in symbols if s in known] if kind else SPECIAL + pieces[3:]
        if not row.keys() >= {*words} or not kind and pieces[:3] != ["<unk>", "<s>", "</s>"]:
            return None
        if not kind and "<mask>" in row:
            tokens = sorted([*tokens, "<mask>"], key=row.get)
        rows = [row[symbol] for symbol in (*words, *tokens)]
        others = sorted({*row.values()} - {*rows})
        if not kind and "<mask>" not in row and others:
            tokens.append("<mask>")
        return cls(words, tokens, rows + others, kind, subwords)

    @property
    def languages(self) -> list[str]:
        return [token.strip("_") for token in self.tokens if token != "<mask>"]

    def example(self, source: str, target: str) -> tuple[str, str]:
        """Of the model card: the line that sets the languages, and the argument of ``generate``."""
        tokens = '"__{}__"' if self.kind else '"{}"'
        token = f"tokenizer.convert_tokens_to_ids({tokens.format(target)})"
        return f'tokenizer.src_lang = "{source}"\n', f", forced_bos_token_id={token}"

    def write(self, folder: Path, longest: int) -> None:
        """Write the files of the tokenizer; ``longest`` is the number of tokens that the model takes."""
        (folder / "sentencepiece.bpe.model").write_bytes(read_plain(self.subwords))
        special = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>"}
        settings = {f"{name}_token": token for name, token in special.items()}
        first = next((code for code in self.languages if code[:2] == "en"), self.languages[0])
        settings |= {"model_max_length": longest, "src_lang": first, "tgt_lang": None}
        if self.kind:
            ids = {word: i for i, word in enumerate(self.words)}
            (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), "utf-8")
            settings |= {"tokenizer_class": "M2M100Tokenizer", "language_codes": self.kind}
            settings["num_madeup_words"] = len(self.rows) - len(ids) - len(self.tokens)
            special = self.tokens
        else:
            special = self.languages
            tokens = (token.strip("_") for token in self.tokens)
            added = dict(enumerate(SPECIAL)) | dict(enumerate(tokens, len(self.words)))
            settings |= {"tokenizer_class": "NllbTokenizer", "legacy_behaviour": False}
            settings |= {"cls_token": "<s>"}
            settings |= {"mask_token": "<mask>" if "<mask>" in self.tokens else None}
            settings["added_tokens_decoder"] = {
                i: {"content": token, "special": True, "normalized": False, "single_word": False}
                | {"lstrip": token == "<mask>", "rstrip": False}
                for i, token in added.items()
            }
        settings["additional_special_tokens"] = special
        content = json.dumps(settings, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(content + "\n", "utf-8")


def config_of(options: Mapping, vocab_size: int):
    """The config of ``M2M100ForConditionalGeneration``; ``smoe_fairseq`` marks it as an export."""
    from transformers import M2M100Config

    return M2M100Config(
        vocab_size=vocab_size,
        **{t.format(side=s): options[f"{s}_{ours}"] for s in SIDES for ours, t in OF_SIDE.items()},
        **{f"{side}_layerdrop": options[f"{side}_layerdrop"] for side in SIDES},
        **{n: options[n] for n in ("dropout", "attention_dropout", "activation_dropout")},
        activation_function=str(options["activation_fn"]),
        scale_embedding=not options["no_scale_embedding"],
        max_position_embeddings=min(options[f"max_{n}_positions"] for n in ("source", "target")),
        architectures=["M2M100ForConditionalGeneration"],
        smoe_fairseq=True,
    )


def weights_of(path: Path, config, model: Mapping[str, Tensor], rows: Sequence[int]) -> dict:
    """The tensors of the file under transformers' names; raises UsageError unless they fit the config."""
    from transformers import M2M100ForConditionalGeneration

    with torch.device("meta"):
        target = M2M100ForConditionalGeneration(config)
    embedding = model["encoder.embed_tokens.weight"]
    if rows != list(range(len(rows))):
        embedding = embedding[list(rows)]
    unused = ("embed_tokens.weight", "output_projection.weight", ".version", UNSET)
    tensors = {
        f"model.{name}": tensor.contiguous()
        for name, tensor in model.items()
        if not name.endswith(unused)
    }
    tensors["model.shared.weight"] = embedding.contiguous()
    tied = target._tied_weights_keys | {f"model.{side}.embed_tokens.weight": "" for side in SIDES}
    check_fit(path, tensors, {n: t for n, t in target.state_dict().items() if n not in tied})
    return tensors
