"""Methods: what is trained on a data set, as the training flags that make it."""

import re

from omegaconf import OmegaConf

from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import Flags
from smoe_fairseq.settings.reading import config_folder, read
from smoe_fairseq.system.errors import UsageError

_KEYS = {"train"}
_FAMILY = re.compile(r"(?P<family>.+?)-(?P<strata>((0|[1-9]\d*)-)*[1-9]\d*)")


def method_flags(name: str, dataset: Dataset) -> Flags:
    """The training flags of a method: ``NAME.yaml``, or for ``FAMILY-4-12`` the family's file.

    In a method file ``{experts}`` stands for the data set's number of experts and, in a family's,
    ``{strata}`` for what follows the family's name, or ``{layers}`` for the same with commas. An unknown name
    is a `UsageError`.
    """
    folder = config_folder() / "methods"
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}
    families = {
        stem
        for stem, path in files.items()
        if re.search(r"\{(strata|layers)\}", path.read_text("utf-8", "replace"))
    }
    match = _FAMILY.fullmatch(name)
    if name in files.keys() - families:
        path, strata = files[name], ""
    elif match and match["family"] in families:
        path, strata = files[match["family"]], match["strata"]
    else:
        known = [f"{stem}-A-B-..." if stem in families else stem for stem in files]
        raise UsageError(f"unknown method {name!r}: choose one of {', '.join(known)}")

    def fill(value):
        if not isinstance(value, str):
            return value
        value = value.replace("{strata}", strata).replace("{layers}", strata.replace("-", ","))
        if "{experts}" in value and dataset.experts is None:
            raise UsageError(
                f"configs/datasets/{dataset.name}.yaml: `experts` is missing, of which {name} has so many in "
                "a layer; expected a whole number such as 8"
            )
        return value.replace("{experts}", str(dataset.experts))

    flags = OmegaConf.to_container(read(path, _KEYS)).get("train", {})
    return {key: fill(value) for key, value in flags.items()}


def has_strata(flags: Flags) -> bool:
    """Whether the flags of a method make several strata, at some of which tokens may stop."""
    return "-" in str(flags.get("smoe-strata", "")) and not flags.get("moe-stacked")
