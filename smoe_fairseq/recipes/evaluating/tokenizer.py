"""The sentencepiece models that sacreBLEU's flores tokenizers need and fetch at first use."""

from pathlib import Path

from smoe_fairseq.recipes.preparing.download import Remote, download
from smoe_fairseq.system.errors import UsageError


def fetch_tokenizer(name: str) -> None:
    """Puts the model of a sacreBLEU tokenizer (``flores200``) where sacreBLEU looks for it.

    sacreBLEU would fetch it too, but only after everything is translated, and a download that fails
    leaves an empty file, which it later takes for the model.
    """
    url, target = _place(name)
    if tokenizer_file(name):
        return
    try:
        download(Remote(url, target.name), target)
    except OSError as error:
        raise UsageError(
            f"cannot fetch sacreBLEU's {name} tokenizer ({error}): download {url} where there is a "
            f"network and put it at {target} (the folder is $SACREBLEU, or else ~/.sacrebleu)"
        ) from None


def tokenizer_file(name: str) -> Path | None:
    """The model, where it is there."""
    file = _place(name)[1]
    return file if file.exists() and file.stat().st_size else None


def _place(name: str) -> tuple[str, Path]:
    """Its address, and where sacreBLEU looks for it."""
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    url = SPM_MODELS[name]["url"]
    return url, Path(SACREBLEU_DIR) / "models" / Path(url).name
