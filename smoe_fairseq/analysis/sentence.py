"""The requested capacity of one sentence's tokens."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.counts import Block
from smoe_fairseq.analysis.recorder import Recorder, given
from smoe_fairseq.analysis.visible import visible
from smoe_fairseq.system.errors import UsageError

BEAM = 5
# Background colours of a 256-colour terminal, from low to high, with a text colour that is read on them.
SHADES = ((255, 16), (153, 16), (111, 16), (68, 231), (25, 231), (17, 231))


@dataclass(frozen=True)
class SentenceSide:
    """One side of a sentence pair.

    Args:
        side: "encoder" or "decoder".
        tokens: what the side was given, special tokens included; as they are to be shown.
        blocks: its MoE layers.
        requested: strata stopped at, ``requested[b][t]`` of token t in block b.
    """

    side: str
    tokens: list[str]
    blocks: list[Block]
    requested: list[list[int]]


def run_pair(model: nn.Module, task, net_input: dict) -> list[SentenceSide]:
    """Requested capacity in the first sentence pair of a batch, or the first text of a language model."""
    recorder = Recorder(model, task)
    with recorder.recording():
        recorder.run(net_input)
    sides = []
    for side in inputs.sides(task):
        dictionary = inputs.dictionary_of(task, side)
        tokens = given(net_input, side)[0]
        real = tokens != dictionary.pad()
        recorders = {n: r for n, r in recorder.blocks.items() if n.startswith(side)}
        sides.append(
            SentenceSide(
                side,
                [visible(dictionary[i]) for i in tokens[real].tolist()],
                [Block(name, r.block.strata) for name, r in recorders.items()],
                [r.requested_BS[0][real].tolist() for r in recorders.values()],
            )
        )
    return [side for side in sides if side.blocks]


def run_sentence(
    model: nn.Module, task, direction: str, sentence: str, folder: Path
) -> list[SentenceSide]:
    """Requested capacity of a source sentence's tokens and of the model's own translation of it.

    A language model is given the sentence and adds nothing.
    The sentence is text where the data's folder has its ``spm.model``, else tokens joined by spaces.
    """
    segmenter = folder / "spm.model"
    if segmenter.exists():
        processor = sentencepiece.SentencePieceProcessor(model_file=str(segmenter))
        sentence = " ".join(processor.encode(sentence, out_type=str))
    if inputs.is_multilingual(task):
        task.args.source_lang, task.args.target_lang = direction.split("-")
    tokens = task.source_dictionary.encode_line(sentence, add_if_not_exist=False).long()
    if len(tokens) < 2:
        raise UsageError("--sentence: expected a sentence with at least one word")
    longest = np.min(inputs.longest(model, task))
    if len(tokens) >= longest:
        raise UsageError(f"--sentence: {len(tokens)} tokens, the model takes fewer than {longest}")
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    device = next(model.parameters()).device
    sample = dataset.collater([dataset[0]])
    sample["net_input"] = {k: v.to(device) for k, v in sample["net_input"].items() if v is not None}
    if inputs.is_language_model(task):
        return run_pair(model, task, sample["net_input"])
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=BEAM)
    with torch.no_grad():
        best = task.inference_step(generator, [model], sample)[0][0]["tokens"]
    given = torch.cat([best[-1:], best[:-1]])  # as in training: </s> first, shifted by one
    sample["net_input"]["prev_output_tokens"] = given.unsqueeze(0)
    return run_pair(model, task, sample["net_input"])


def show(sides: list[SentenceSide], colour: bool) -> str:
    """For a terminal: the tokens, under each what it asked for, block by block."""
    lines = []
    for side in sides:
        for block, requested in zip(side.blocks, side.requested):
            strata = len(block.strata)
            mean = sum(requested) / len(requested)
            lines.append(f"{block.title}: requested capacity of 1 to {strata}, mean {mean:.2f}")
            lines += _wrapped(side.tokens, requested, strata, colour)
            lines.append("")
    return "\n".join(lines[:-1])


def wants_colour(stream) -> bool:
    """Whether a stream is a terminal of a user who has not asked for no colour (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _wrapped(tokens: list[str], requested: list[int], strata: int, colour: bool) -> list[str]:
    columns = max(40, int(os.environ.get("COLUMNS") or 80) - 2)
    rows, width = [[]], 0
    for token, value in zip(tokens, requested):
        size = max(len(token), 1) + 1
        if width + size > columns and rows[-1]:
            rows.append([])
            width = 0
        rows[-1].append((token, value))
        width += size
    lines = []
    for row in rows:
        lines.append("  " + " ".join(_paint(token, value, strata, colour) for token, value in row))
        lines.append("  " + " ".join(str(value).ljust(len(token)) for token, value in row).rstrip())
    return lines


def _paint(token: str, value: int, strata: int, colour: bool) -> str:
    if not colour:
        return token
    level = round((value - 1) / max(strata - 1, 1) * (len(SHADES) - 1))
    background, text = SHADES[level]
    return f"\033[48;5;{background};38;5;{text}m{token}\033[0m"
