"""A tokenizer of transformers from a run's sentencepiece model, dictionaries and language tokens."""

import re
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedTokenizer

from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import read_json
from smoe_fairseq.subwords import (
    BEGINS_WORD,
    check_order,
    check_pieces,
    composer,
    read_subwords,
    read_vocabulary,
)

_HALF = re.compile("[\ud800-\udfff]")  # of a pair of surrogates
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece of sentencepiece's byte fallback


class SMoETokenizer(PreTrainedTokenizer):
    """Encodes text as fairseq does, and decodes it.

    Special tokens in the text, such as ``</s>``, count as text. ``tokenizer(text, text_target=...)`` also
    returns labels.

    Args:
        vocab_file: JSON, the source dictionary's entries in order.
        target_vocab_file: the target dictionary's entries; None: it is shared.
        sp_model_file: the sentencepiece model; None: subwords are separated by spaces.
        language_tokens: the token of each language; empty: the model has one direction.
        encoder_langtok: the language whose token begins a source, "src" or "tgt"; None: no token.
        decoder_langtok: whether a translation begins with the token of its language.
        lang_pairs: the directions that were trained, ``en-de``.
        src_lang, tgt_lang: the direction; attributes that may be changed.
        vocab_checksum: of the entries in order, as saved; None: not known.
    """

    vocab_files_names = {
        "vocab_file": "vocab.json",
        "target_vocab_file": "target_vocab.json",
        "sp_model_file": "spm.model",
    }
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file: str,
        target_vocab_file: str | None = None,
        sp_model_file: str | None = None,
        language_tokens: Mapping[str, str] | None = None,
        encoder_langtok: str | None = None,
        decoder_langtok: bool = False,
        lang_pairs: list[str] | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        vocab_checksum: str | None = None,
        **options,
    ):
        self.files = {
            "vocab_file": vocab_file,
            "target_vocab_file": target_vocab_file,
            "sp_model_file": sp_model_file,
        }
        if vocab_file is None:
            raise UsageError("vocab.json is missing in the tokenizer's folder")
        self.source = read_vocabulary(vocab_file)
        self.target = read_vocabulary(target_vocab_file) if target_vocab_file else self.source
        own = check_order(vocab_file, vocab_checksum, self.source, self.target)
        self._source_ids = {token: i for i, token in enumerate(self.source)}
        self._target_ids = {token: i for i, token in enumerate(self.target)}
        self._is_target = False
        self.language_tokens = dict(language_tokens or {})
        self._spm = None
        if sp_model_file:
            languages = {*self.language_tokens.values()}
            check_pieces(sp_model_file, [t for t in self.source[4:] if t not in languages])
            self._spm = read_subwords(sp_model_file)
            self._composed = composer(self._spm)
        elif any(token.startswith(BEGINS_WORD) for token in self.source):
            raise UsageError(f"{vocab_file} has pieces of words: expected spm.model in its folder")
        self.encoder_langtok, self.decoder_langtok = encoder_langtok, decoder_langtok
        self.lang_pairs = list(lang_pairs or [])
        special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
        options = {f"{name}_token": token for name, token in special.items()} | options
        options.setdefault("split_special_tokens", True)
        super().__init__(
            language_tokens=self.language_tokens,
            encoder_langtok=encoder_langtok,
            decoder_langtok=decoder_langtok,
            lang_pairs=self.lang_pairs,
            src_lang=src_lang,
            tgt_lang=tgt_lang,
            vocab_checksum=own,
            **self.files,
            **options,
        )
        self.src_lang, self.tgt_lang = src_lang, tgt_lang
        self._check_rows()

    def _check_rows(self) -> None:
        """Raise UsageError unless the model in the same folder, if any, has a row per token."""
        if not (config := Path(self.files["vocab_file"]).with_name("config.json")).is_file():
            return
        sizes = read_json(config, {f"{n}vocab_size?": (None, int) for n in ("", "source_")})
        if not (target := sizes.get("vocab_size")):
            return
        # Embeddings may be resized later for tokens that were added, and may get more rows then.
        added = len(self._added())
        rows = {"vocab.json": sizes.get("source_vocab_size") or target, "target_vocab.json": target}
        for (name, number), symbols in zip(rows.items(), (self.source, self.target)):
            if number != len(symbols) + added and not (added and number >= len(symbols)):
                raise UsageError(
                    f"{config.with_name(name)} has {len(symbols)} entries, and the embeddings {number}; "
                    "expected as many"
                )

    def __setattr__(self, name: str, value) -> None:
        if name in ("src_lang", "tgt_lang"):
            value = self._known(value)
        super().__setattr__(name, value)

    def _known(self, language: str | None) -> str | None:
        if language is not None and self.language_tokens and language not in self.language_tokens:
            known = ", ".join(self.language_tokens)
            raise UsageError(f"{language}: unknown language; expected one of {known}")
        return language

    def get_lang_id(self, language: str) -> int:
        """The id of a language's token, for ``generate(forced_bos_token_id=...)`` with ``decoder_langtok``.

        Raises:
            UsageError: the tokenizer has no such language.
        """
        if not self.language_tokens:
            raise UsageError(f"{language}: this tokenizer has no language tokens")
        return self._target_ids[self.language_tokens[self._known(language)]]

    @property
    def vocab_size(self) -> int:
        return len(self.source)

    def get_vocab(self) -> dict[str, int]:
        return self._source_ids | self._added_tokens_encoder

    def tokenize(self, text: str, **options) -> list[str]:
        """The subwords of a text; tokens that were added to the tokenizer are not split."""
        for name in {"src_lang", "tgt_lang"} & options.keys():
            raise UsageError(
                f"{name}={options[name]!r}: expected tokenizer.{name} to be set, instead"
            )
        added = self._added()
        if not added:
            return self._tokenize(text)
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", text)
        subwords = ([part] if part in added else self._tokenize(part) for part in parts)
        return [token for tokens in subwords for token in tokens]

    def _added(self) -> set[str]:
        return {t for t, i in self._added_tokens_encoder.items() if i >= len(self.source)}

    def _tokenize(self, text: str, **_) -> list[str]:
        text = _HALF.sub("", text)  # which no dictionary has, and sentencepiece refuses
        if self._spm is not None:
            text = " ".join(self._spm.encode(self._composed(text), out_type=str))
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        ids = self._target_ids if self._is_target else self._source_ids
        return ids.get(token, ids["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(self.target):
            advice = "; replace the -100 of labels by tokenizer.pad_token_id" * (index == -100)
            raise UsageError(f"id {index}: expected one of 0 to {len(self.target) - 1}{advice}")
        return self.target[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text; tokens that were added to the tokenizer begin words."""
        if self._spm is None:
            return " ".join(tokens)
        joined, added = "", self._added()
        tokens = [f"{BEGINS_WORD}{token}" if token in added else token for token in tokens]
        for are_bytes, run in groupby(tokens, lambda token: _BYTE.fullmatch(token) is not None):
            text = "".join(run)
            if are_bytes:
                text = bytes.fromhex(re.sub("<0x|>", "", text)).decode("utf-8", "replace")
                text = re.sub("[\r\n]", " ", text)  # as in `smoe translate`
            joined += text
        return joined.replace(BEGINS_WORD, " ").strip()

    def _decode(self, token_ids, skip_special_tokens: bool = False, **_) -> str:
        """Like fairseq, this keeps ``<unk>`` even with ``skip_special_tokens``."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        tokens = self.convert_ids_to_tokens(ids)
        if skip_special_tokens:
            skipped = {"<s>", "<pad>", "</s>", *self.language_tokens.values()}
            skipped.update(map(str, self.extra_special_tokens))
            tokens = [token for token in tokens if token not in skipped]
        return self.convert_tokens_to_string(tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Adds the language's token, if there is one, and the end of sentence."""
        begin = []
        side = "tgt" if self.decoder_langtok else None
        if not self._is_target:
            side = self.encoder_langtok and self.encoder_langtok[:3]
        if side and self.language_tokens:
            if (language := getattr(self, f"{side}_lang")) is None:
                known = ", ".join(self.language_tokens)
                raise UsageError(f"tokenizer.{side}_lang is not set; expected one of {known}")
            begin = [self._convert_token_to_id(self.language_tokens[language])]
        return [*begin, *token_ids_0, *(token_ids_1 or []), self._convert_token_to_id("</s>")]

    def get_special_tokens_mask(
        self, token_ids_0, token_ids_1=None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 for special tokens, 0 for text."""
        if not already_has_special_tokens:
            with_all = self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
            text = len(token_ids_0) + len(token_ids_1 or [])
            return [1] * (len(with_all) - 1 - text) + [0] * text + [1]
        special = {0, 1, 2, *map(self._convert_token_to_id, self.language_tokens.values())}
        return [int(i in special) for i in token_ids_0]

    def _switch_to_input_mode(self) -> None:
        self._is_target = False

    def _switch_to_target_mode(self) -> None:
        self._is_target = True

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        written = []
        for name, source in self.files.items():
            if source:
                prefix = f"{filename_prefix}-" if filename_prefix else ""
                target = Path(save_directory, prefix + self.vocab_files_names[name])
                if not target.exists() or not target.samefile(source):
                    shutil.copyfile(source, target)
                written.append(str(target))
        return tuple(written)
