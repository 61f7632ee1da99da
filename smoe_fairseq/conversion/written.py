"""What conversions share: what a checkpoint says of its model, how it is written."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from smoe_fairseq.checkpoint.write import write_content


def with_model_options(state: Mapping, options: Mapping) -> dict:
    """The content of a checkpoint that says that its model is of these options (with ``_name``)."""
    if state.get("cfg"):
        return {**state, "cfg": {**state["cfg"], "model": dict(options)}}
    # The flat command line of before fairseq had a config.
    args = vars(state["args"]) | dict(options) | {"arch": options["_name"]}
    return {**state, "args": Namespace(**args)}


def write_converted(state: Mapping, output: Path) -> None:
    """Writes a checkpoint whole and reads it back, with progress.

    Raises:
        UsageError: the system refuses ``output``, or what was read back differs.
    """
    with tqdm(total=len(state["model"]), unit=" tensors", desc=output.name) as bar:
        write_content(state, output, bar.update)
