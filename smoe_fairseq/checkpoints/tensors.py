"""A model as safetensors and JSON: weights without executable content, and all options as plain data."""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoints.model import SIDES, known_options, plain_config
from smoe_fairseq.checkpoints.sets import memory_key, weights_of
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_files
from smoe_fairseq.models.options import SMoETransformerConfig

_UNUSED = (".version", "._float_tensor")  # fairseq's buffers without information


def config_file(output: Path) -> Path:
    """The name of the JSON file for the weights ``output``."""
    return output.with_suffix(".json")


def write_safetensors(path: Path, output: Path, force: bool, half: bool) -> None:
    """Write ``output`` and its JSON file, both or none.

    The JSON contains ``model``, all options; ``blocks``, the arguments of `StratifiedMoE` by the prefix of
    each block's parameters; ``tied``, from a name to the name whose tensor it shares; and
    ``dictionaries``, sizes and checksums.

    Args:
        force: replace existing files.
        half: see `to_half`.

    Raises:
        UsageError: ``path`` cannot be read, the files cannot be written, or see `to_half`.
    """
    state = weights_of(path)
    options = known_options(path, state)
    tensors, tied = unique_tensors(state["model"])
    content = {
        "model": plain_config(options),
        "blocks": blocks(SMoETransformerConfig(**options), state["model"]),
        "tied": tied,
        "dictionaries": state.get("smoe_dictionaries", {}),
    }
    files = [output, config_file(output)]
    if half:
        tensors = to_half(path, tensors)
    called = f"--output {output}"
    with whole_files(files, called, parents=True, replace=force) as (weights, config):
        save_tensors(tensors, weights)
        Path(config).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def blocks(config: SMoETransformerConfig, weights: Mapping[str, Tensor]) -> dict[str, dict]:
    """Arguments of the `StratifiedMoE` of each MoE layer, as plain data, by the prefix of its parameters.

    A hash gate's ``hash_table`` is not included: it is ``PREFIX.gates.0.table`` of the weights. Where old
    weights of one stratum lack the output norm of ``norms="released"``, these are the norms of the paper.
    """
    result = {}
    for side in SIDES:
        freq = config.moe_freq_of(side)
        for number, options in enumerate(config.moe_options(side), start=1):
            prefix = f"{side}.layers.{number * freq - 1}.moe"
            options |= {"activation_fn": str(config.activation_fn), "expert_parallel": False}
            sizes = {n: getattr(config, f"{side}_{n}") for n in ("embed_dim", "ffn_embed_dim")}
            if options["strata"].isdigit() and f"{prefix}.layer_norms.1.weight" not in weights:
                options["norms"] = "paper"
            result[prefix] = sizes | options
    return result


def unique_tensors(model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors, and a map from the names of tied tensors to the names that represent them."""
    tensors, tied, owners = {}, {}, {}
    for name, tensor in model.items():
        if name.endswith(_UNUSED):
            continue
        owner = owners.setdefault(memory_key(tensor), name)
        if owner == name:
            tensors[name] = tensor.contiguous()
        else:
            tied[name] = owner
    return tensors, tied


def to_half(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with floating-point ones as float16.

    Raises:
        UsageError: a weight is too large for float16.
    """
    result = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    for name, tensor in result.items():
        if not tensor.isfinite().all():
            most = torch.finfo(torch.float16).max
            raise UsageError(f"{path}: {name} has values above {most:.0f}; leave --fp16 out")
    return result


def save_tensors(tensors: dict, path: str) -> None:
    """safetensors' ``save_file``, with the usual permissions and with OSError for the system's errors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    Path(path).touch()
    mode = stat.S_IMODE(os.stat(path).st_mode)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        os.chmod(path, mode)  # the library lets only the owner read the file
    except SafetensorError as error:
        if number := re.search(r"(?:os error|Os { code:) (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        raise
