"""A model as safetensors and JSON: weights that no program can hide in, and all options as plain data."""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smoe_fairseq.checkpoint.average import check_plain, place_of, weights_of
from smoe_fairseq.checkpoint.shards import same_bits
from smoe_fairseq.conversion.model_settings import SIDES, known_options
from smoe_fairseq.conversion.target_model import plain_config
from smoe_fairseq.models.config import SMoETransformerConfig
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_files

_UNUSED = (".version", "._float_tensor")  # buffers that say nothing of the model


def config_file(output: Path) -> Path:
    """The JSON beside the weights."""
    return output.with_suffix(".json")


def write_safetensors(path: Path, output: Path) -> None:
    """Writes ``output`` and the JSON beside it, both or none.

    The JSON has ``model``, all options; ``blocks``, the arguments of `StratifiedMoE` by the prefix of each
    block's parameters; ``tied``, names whose tensor is another name's and is there once; and
    ``dictionaries``, what the checkpoint says of them (words and checksum).

    Raises:
        UsageError: ``path`` cannot be read, or the system refuses the files.
    """
    state = weights_of(path)
    check_plain(path, state["model"])
    options = known_options(path, state)
    tensors, tied = _once_each(state["model"])
    content = {
        "model": plain_config(options),
        "blocks": blocks(path, SMoETransformerConfig(**options), tensors),
        "tied": tied,
        "dictionaries": state.get("smoe_dictionaries", {}),
    }
    files = [output, config_file(output)]
    with whole_files(files, called=f"--output {output}") as (weights, config):
        output.parent.mkdir(parents=True, exist_ok=True)
        _save(tensors, weights)
        Path(config).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        written = load_file(weights)
        for name, tensor in tensors.items():
            if not same_bits(written[name], tensor):
                raise UsageError(
                    f"{output}: {name} was not written as it was read; is the disk sound?"
                )


def blocks(
    path: Path, config: SMoETransformerConfig, tensors: Mapping[str, Tensor]
) -> dict[str, dict]:
    """Arguments of the `StratifiedMoE` of each MoE layer, as plain data, by the prefix of its parameters.

    A hash gate's ``hash_table`` is not among them: it is ``PREFIX.gates.0.table`` of the weights.
    """
    found = {}
    for side in SIDES:
        freq = config.moe_freq_of(side)
        for number, options in enumerate(config.moe_options(side), start=1):
            prefix = f"{side}.layers.{number * freq - 1}.moe"
            options |= {"activation_fn": str(config.activation_fn), "expert_parallel": False}
            sizes = {
                name: getattr(config, f"{side}_{name}") for name in ("embed_dim", "ffn_embed_dim")
            }
            found[prefix] = sizes | options
    missing = {name.partition(".moe.")[0] + ".moe" for name in tensors if ".moe." in name} ^ set(
        found
    )
    if missing:
        raise UsageError(f"{path}: {min(missing)} is not where its options have a MoE layer")
    return found


def _once_each(model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in order, and by name those that are another one, such as tied embeddings."""
    tensors, tied, places = {}, {}, {}
    for name, tensor in model.items():
        if name.endswith(_UNUSED):
            continue
        owner = places.setdefault(place_of(tensor), name)
        if owner == name:
            tensors[name] = tensor.contiguous()
        else:
            tied[name] = owner
    return tensors, tied


def _save(tensors: dict, path: str) -> None:
    """As the library does, with the rights of any new file; what the system says is an OSError."""
    Path(path).touch()
    rights = stat.S_IMODE(os.stat(path).st_mode)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        os.chmod(path, rights)  # the library's are the owner's alone
    except SafetensorError as error:
        if number := re.search(r"(?:os error|Os { code:) (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        raise
