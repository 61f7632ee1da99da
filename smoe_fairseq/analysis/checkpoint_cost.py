"""The cost of a checkpoint's model, at the requested capacity expected or measured."""

from argparse import Namespace
from pathlib import Path

from smoe_fairseq.analysis.cost import Cost, count
from smoe_fairseq.analysis.inputs import load
from smoe_fairseq.analysis.meta_model import ARCHITECTURES, build_meta_model, is_language_model
from smoe_fairseq.analysis.requested_capacity import requested_capacity
from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.system.errors import UsageError


def expected(checkpoint: Path, context: int) -> Cost:
    """Under uniform routing; of the checkpoint only the options and one shape are used.

    Raises:
        UsageError: the checkpoint cannot be read, or holds another model.
    """
    state = open_checkpoint(checkpoint)
    # Before fairseq had a config, checkpoints held the flat command line.
    config = state["cfg"]["model"] if state.get("cfg") else state.get("args")
    values = vars(config) if isinstance(config, Namespace) else config or {}
    arch = values.get("arch") or values.get("_name")
    if arch not in ARCHITECTURES:
        raise UsageError(
            f"{checkpoint} holds a model of architecture {arch}: expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    args = Namespace(**values | {"arch": arch})
    weights = state["model"]
    vocabulary = len(weights["decoder.embed_tokens.weight"])
    outputs = len(weights["decoder.output_projection.weight"]) if is_language_model(args) else None
    model = build_meta_model(args, vocabulary, None if outputs == vocabulary else outputs)
    return count(model, context)


def measured(checkpoint: Path, data: Path, subset: str, context: int) -> Cost:
    """At the requested capacity of a subset's tokens, by teacher forcing."""
    model, task = load(checkpoint, data)
    return count(model, context, requested_capacity(model, task, subset))
