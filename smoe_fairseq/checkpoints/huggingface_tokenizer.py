"""``tokenizer.json`` of transformers, read as the sentencepiece model of which it was made."""

from base64 import b64decode
from binascii import Error
from collections.abc import Iterable
from pathlib import Path

from smoe_fairseq.checkpoints.pieces import new_model
from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import Number, read_json

_ID = Number(0, 10_000_000, whole=True)
_BPE = {"type": {"BPE"}, "vocab": {str: _ID}, "merges": [(str, [str, str])]}
_UNIGRAM = {"type": {"Unigram"}, "vocab": [[str, float]]}
_FORM = {
    "added_tokens": [{"id": _ID, "content": str}],
    "model": (_BPE, _UNIGRAM),
    "normalizer?": (None, dict),
    "pre_tokenizer": dict,
}


def read_tokenizer(file: Path) -> tuple[list[str], dict[int, str], bytes]:
    """The tokens by id up to the first that was added after the pieces; those; the sentencepiece model.

    Raises:
        UsageError: the file is missing or damaged, or was not made of a sentencepiece model.
    """
    content = read_json(file, _FORM)
    model, added = content["model"], {t["id"]: t["content"] for t in content["added_tokens"]}
    is_bpe = isinstance(model["vocab"], dict)
    if is_bpe:
        vocabulary = sorted(model["vocab"], key=model["vocab"].get)
        if list(map(model["vocab"].get, vocabulary)) != list(range(len(vocabulary))):
            raise UsageError(
                f"{file}: model.vocab has gaps; expected the ids 0 to {len(vocabulary) - 1}"
            )
        # In BPE of sentencepiece, scores fall with the id.
        scores = {token: float(4 - i) for i, token in enumerate(vocabulary)}
        _check_merges(file, model)
    else:
        scores = dict(map(tuple, model["vocab"]))
        vocabulary = list(scores)
    added = {i: token for i, token in added.items() if i > 3}
    pieces = vocabulary[: min(added, default=len(vocabulary))]
    if model.get("byte_fallback"):
        raise UsageError(f"{file}: model.byte_fallback is not supported; expected false")
    steps = [*_steps(content["pre_tokenizer"], "pretokenizers")]
    metaspace = next((step for step in steps if step.get("type") == "Metaspace"), {})
    in_front = metaspace.get("add_prefix_space", bool(metaspace))
    if not in_front or metaspace.get("prepend_scheme", "always") != "always":
        raise UsageError(
            f"{file}: pre_tokenizer is {steps!r:.80}; expected Metaspace, as of sentencepiece"
        )
    scores = {piece: scores[piece] for piece in pieces[4:]}
    return pieces, added, new_model(is_bpe, _rules(file, content), scores)


def _check_merges(file: Path, model: dict) -> None:
    """Raise UsageError unless merges are in the order of what they make, as in sentencepiece."""
    last = 0
    for merge in model["merges"]:
        is_text = isinstance(merge, str) and merge.count(" ") == 1
        left, right = merge.split(" ") if is_text else merge
        made = model["vocab"].get(left + right, -1)
        if made < last:
            raise UsageError(
                f"{file}: model.merges has {left + right!r:.40} out of the order of model.vocab; expected "
                "a tokenizer made of a sentencepiece model, or sentencepiece.bpe.model"
            )
        last = made


def _steps(part: dict | None, name: str) -> Iterable[dict]:
    """The steps of a normalizer or pre-tokenizer."""
    return (part or {}).get(name) or [part or {}]


def _rules(file: Path, content: dict) -> bytes:
    """The compiled rules of normalisation; empty: none."""
    for step in _steps(content.get("normalizer"), "normalizers"):
        if step.get("type") == "Precompiled":
            try:
                return b64decode(step["precompiled_charsmap"], validate=True)
            except (Error, KeyError, TypeError):
                raise UsageError(f"{file}: normalizer.precompiled_charsmap is damaged") from None
    return b""
