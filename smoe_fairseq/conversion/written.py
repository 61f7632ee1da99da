"""The last step of a conversion: one checkpoint, written whole, with progress."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from smoe_fairseq.checkpoint.write import check_output, write_content


def write_converted(state: Mapping, read: Sequence[Path], output: Path, force: bool) -> None:
    """Writes the checkpoint and reads it back.

    Args:
        read: files that it was made of.

    Raises:
        UsageError: ``output`` is there already and not to be overwritten, or the system refuses it.
    """
    check_output(read, [output], force)
    with tqdm(total=len(state["model"]), unit=" tensors", desc=output.name) as bar:
        write_content(state, output, bar.update)


def with_model_options(state: Mapping, options: Mapping) -> dict:
    """The content of a checkpoint that says that its model is of these options (with ``_name``)."""
    if state.get("cfg"):
        return {**state, "cfg": {**state["cfg"], "model": dict(options)}}
    # The flat command line of before fairseq had a config.
    args = vars(state["args"]) | dict(options) | {"arch": options["_name"]}
    return {**state, "args": Namespace(**args)}
