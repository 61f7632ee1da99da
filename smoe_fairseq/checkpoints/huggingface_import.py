"""``smoe import``: folders for transformers, of ``smoe export --to huggingface`` or of other models.

`_LAYOUTS` lists them by ``model_type``. transformers itself is not needed to read them.
"""

from pathlib import Path
from types import ModuleType

from smoe_fairseq.checkpoints import huggingface_m2m, huggingface_ours
from smoe_fairseq.checkpoints.foreign import new_checkpoint
from smoe_fairseq.checkpoints.huggingface_weights import read_weights, refuse_pointers
from smoe_fairseq.checkpoints.model import OURS
from smoe_fairseq.checkpoints.sets import check_tensors
from smoe_fairseq.checkpoints.trained_with import DICTIONARIES
from smoe_fairseq.compat.safe_load import check_content
from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import check, read_json

# For each ``model_type`` of config.json a module with FORM, of config.json; ``model``, our options and the
# weights under our names; and ``text``, files for the checkpoint's folder, flags of the task, and checksums.
_LAYOUTS: dict[str, ModuleType] = {
    OURS: huggingface_ours,
    **dict.fromkeys(huggingface_m2m.KINDS, huggingface_m2m),
}
# Settings of any config that are refused, and what is expected.
_REFUSED = {
    "quantization_config": "weights that are not quantised",
    "auto_map": "a model of transformers itself, since no code of a folder is run",
}


def read_folder(folder: Path) -> tuple[dict, dict[str, bytes]]:
    """The content of a checkpoint of ``smoe_transformer``, and the text files that belong beside it, by name.

    The files of our own exports are ``dict.LANG.txt`` and ``spm.model``. Those of M2M-100 and NLLB-200 are
    described at `huggingface_m2m.text`.

    Raises:
        UsageError: a file is missing or damaged, or the folder holds another model.
    """
    refuse_pointers(folder)
    file, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.exists():
        raise UsageError(
            f"{adapter}: expected a whole model; merge_and_unload of PEFT makes one of LoRA"
        )
    config = read_json(file)
    for option, what in _REFUSED.items():
        if config.get(option):
            raise UsageError(f"{file}: {option} is set; expected {what}")
    kind = config.get("model_type")
    if kind not in _LAYOUTS:
        known = ", ".join([f"{OURS} (smoe export)", *huggingface_m2m.KINDS])
        raise UsageError(f"{file}: model_type is {kind}; expected one of {known}")
    layout = _LAYOUTS[kind]
    check(config, layout.FORM[kind], file)
    weights = read_weights(folder)
    check_content(folder, {"model": weights}, has_config=False)
    check_tensors(folder, weights)
    options, weights = layout.model(folder, config, weights)
    files, task, checksums = layout.text(folder, weights)
    return new_checkpoint(folder, options, config, weights, task) | {DICTIONARIES: checksums}, files
