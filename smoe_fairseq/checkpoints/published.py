"""The text of fairseq's own M2M-100 and NLLB-200, whose files lie beside the checkpoint.

The names are those of fairseq's documentation; the files themselves were not available.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from smoe_fairseq.checkpoints.huggingface_m2m_text import Files, data_files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain, read_text
from smoe_fairseq.flags import values_of
from smoe_fairseq.subwords import SPECIAL, check_pieces

_DICTIONARIES = ("model_dict.128k.txt", "dictionary.txt")  # of M2M-100, of NLLB-200
_SUBWORDS = ("spm.128k.model", "flores200_sacrebleu_tokenizer_spm.model")
_TAGS = "<MINED_DATA> <MMT_BT_DATA> <SMT_BT_DATA>".split()  # of --add-data-source-prefix-tags


def published_text(path: Path, state: Mapping, weights: Mapping[str, Tensor]) -> Files | None:
    """See `huggingface_m2m_text.text`; None if no dictionary of a known name lies beside the checkpoint.

    The languages are those of the checkpoint's settings (``--langs``), of ``langs.txt``, or of the tokens in
    the dictionary.

    Raises:
        UsageError: a file is missing, or does not fit the checkpoint.
    """
    folder = path.parent
    dictionary = next((folder / n for n in _DICTIONARIES if (folder / n).exists()), None)
    if dictionary is None:
        return None
    subwords = next((folder / name for name in _SUBWORDS if (folder / name).exists()), None)
    if subwords is None:
        raise UsageError(
            f"{folder} has no {' or '.join(_SUBWORDS)}: expected the sentencepiece model"
        )
    cfg = values_of(state.get("cfg"))
    saved = {
        **values_of(state.get("args")),
        **values_of(cfg.get("model")),
        **values_of(cfg.get("task")),
    }
    words = [line.rsplit(" ", 1)[0] for line in read_text(dictionary).splitlines()]
    languages = saved.get("langs") or [w[2:-2] for w in words if w[:2] == "__" == w[-2:]]
    if (file := folder / "langs.txt").exists():
        languages = read_text(file).split()
    if isinstance(languages, str):
        languages = languages.split(",")
    check_pieces(subwords, words)
    tokens = [f"__{language}__" for language in languages]
    tags = _TAGS if saved.get("add_data_source_prefix_tags") else []
    symbols = list(dict.fromkeys([*SPECIAL, *words, *tokens, *tags]))
    rows = len(weights["encoder.embed_tokens.weight"])
    if len(symbols) != rows or len(languages) < 2:
        raise UsageError(
            f"{path} has {rows} embeddings, and {dictionary.name} with {len(languages)} languages and "
            f"{len(tags)} tags of data sources {len(symbols)} words; expected as many, and the languages in "
            f"{folder / 'langs.txt'} in the order of --langs"
        )
    encoder = saved.get("encoder_langtok", "src")
    return data_files(
        symbols, languages, read_plain(subwords), encoder, saved.get("decoder_langtok", True)
    )
