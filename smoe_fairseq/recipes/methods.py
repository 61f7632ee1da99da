"""Methods: their training flags on a data set; the paper's tables."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes.config_files import import_plugins_of, method_file, read
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.program_flags import OF_METHODS, Flags, refuse_keys, value_of

PRETRAINED = "pretrained"  # a data set's pretrained model, which is scored and not trained
MOE_FREQ = 2  # every second layer is an MoE layer, unless the data set sets moe-freq


def method_flags(name: str, dataset: Dataset) -> Flags:
    """The training flags of a method, from ``NAME.yaml``, or for ``FAMILY-4-12`` from ``FAMILY.yaml``.

    In these files ``{experts}`` stands for the data set's number of experts, ``{moe-freq}`` for its
    ``moe-freq`` (default: 2), and ``{ffn-2/3}`` for two thirds of its FFN dimension. In a family's file
    ``{strata}`` stands for the sizes in the method's name (``4-12``), and ``{layers}`` for the same with
    commas. The data set's ``methods`` override the file.

    Raises:
        UsageError: the method is unknown, or needs ``experts`` and the data set does not set it.
    """
    if dataset.start and name == PRETRAINED:
        return dataset.start["experts"]
    configs = dataset.settings.config_dir
    path, strata = method_file(name, configs)

    def fill(value):
        if not isinstance(value, str):
            return value
        value = value.replace("{strata}", strata).replace("{layers}", strata.replace("-", ","))
        value = value.replace("{moe-freq}", str(value_of(dataset.train, "moe-freq", MOE_FREQ)))
        value = re.sub(r"\{ffn-(\d)/(\d)\}", lambda p: _part_of_ffn(dataset, *p.groups()), value)
        if "{experts}" in value and dataset.experts is None:
            needed = f"`experts` is missing, and {name} needs it; expected a number such as 8"
            raise UsageError(f"{dataset.file}: {needed}")
        return value.replace("{experts}", str(dataset.experts))

    content = read(path, {"train", "plugins"})
    import_plugins_of(content, configs)
    flags = content.get("train", {})
    refuse_keys(f"{path}: `train", flags, OF_METHODS)
    flags = flags | dataset.methods.get(name, {})
    # By these a pretrained model scales what experts compute, so that each training keeps them.
    experts = dataset.start["experts"] if dataset.start and "smoe-strata" in flags else {}
    kept = experts.keys() & {"moe-eom", "moe-fom"} - dataset.train.keys()
    flags = {flag: experts[flag] for flag in sorted(kept)} | flags
    return {key: fill(value) for key, value in flags.items()}


def _part_of_ffn(dataset: Dataset, over: str, under: str) -> str:
    """A multiple of 8, as matrix products on GPUs prefer."""
    size = dataset.train.get("encoder-ffn-embed-dim")
    if size is None:
        with quietly():
            from smoe_fairseq.analysis.cost import config_of, parse_model  # imports fairseq

        words = ["--arch", value_of(dataset.train, "arch", "smoe_transformer_base")]
        size = config_of(parse_model(words)).encoder_ffn_embed_dim
    return str(max(1, round(int(size) * int(over) / int(under) / 8)) * 8)


def has_strata(flags: Flags) -> bool:
    """Whether a method's flags make a layer of several strata, so that requested capacity differs."""
    return "-" in str(flags.get("smoe-strata", "")) and not flags.get("moe-stacked")


@cache
def tables() -> dict[str, Any]:
    """The paper's tables (arXiv 2305.02176) by name; parameters and FLOPs are in millions."""
    return OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("paper_tables.yaml")))
