"""Routes of a sentence's tokens through the strata."""

import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regex
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.record import Block, BlockFollower, follow, input_tokens
from smoe_fairseq.errors import UsageError
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.subwords import checked_subwords
from smoe_fairseq.translate.directions import is_multilingual
from smoe_fairseq.translate.load import segmenter
from smoe_fairseq.translate.readout import Readout

# Terminals act on control characters, SVG must not contain them, and some change the order of text.
_HIDDEN = regex.compile(r"[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Bidi_Control}\p{Noncharacter_Code_Point}]")


def visible(text: str) -> str:
    r"""The text with such characters escaped, as ``\x1b`` or ``\u202e``."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


BEAM = 5
# Background colours of a 256-colour terminal, from low to high, with a readable text colour.
SHADES = ((255, 16), (153, 16), (111, 16), (68, 231), (25, 231), (17, 231))


# Stops of single tokens, with the experts that compute them and their weights.
#
# Shapes: B sentences, S positions, T tokens, N of them in a stratum, K choices.


@dataclass(frozen=True)
class Stop:
    """One token at one stratum."""

    stratum: int  # counted from 0
    first: int  # the expert of its first choice, which determines its next stratum
    # Those that compute it, with weights, best first; may be empty.
    experts: list[tuple[int, float]]


@dataclass(frozen=True)
class SentenceSide:
    """One side of a sentence pair, or the text of a language model."""

    side: str  # "encoder" or "decoder"
    tokens: list[str]  # its input, including special tokens; see `visible`
    special: list[bool]  # see `inputs.special`
    blocks: list[Block]  # its MoE layers
    stops: list[list[list[Stop]]]  # ``stops[b][t]`` of token t in block b, in their order

    @property
    def requested(self) -> list[list[int]]:
        """The requested capacity, ``requested[b][t]`` of token t in block b."""
        return [[len(stops) for stops in block] for block in self.stops]


class StopRecorder(BlockFollower):
    """Records ``stops``, a list for each of the ``B * S`` tokens of the last batch."""

    def begin(self, tokens_BS: Tensor) -> None:
        super().begin(tokens_BS)
        self.stops: list[list[Stop]] = [[] for _ in range(tokens_BS.numel())]

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        offset = self.block.strata.first_experts[stratum]
        decisions = zip(
            index_N.tolist(),
            expert_N.tolist(),
            routing.expert_TK[row_N].tolist(),
            routing.weight_TK[row_N].tolist(),
            strict=True,
        )
        for token, first, expert_K, weight_K in decisions:
            experts = [
                (offset + expert, weight)
                for expert, weight in zip(expert_K, weight_K, strict=True)
                if expert < routing.num_experts
            ]
            self.stops[token].append(Stop(stratum, first, experts))


@torch.inference_mode()
def run_batch(model: nn.Module, task, net_input: dict) -> list[list[SentenceSide]]:
    """The sides of each sentence pair of a batch, from one forward pass.

    Args:
        net_input: fairseq's; for a translation model with ``prev_output_tokens``.
    """
    recorders = follow(model, task, [net_input], StopRecorder)
    sides = [_sides(side, task, net_input, recorders) for side in inputs.sides(task)]
    return list(map(list, zip(*sides, strict=True)))


def _sides(side: str, task, net_input: dict, recorders: dict) -> Iterator[SentenceSide]:
    """One side of each sentence pair."""
    dictionary = inputs.dictionary_of(task, side)
    special = inputs.special(dictionary, task)
    blocks = {name: block for name, block in recorders.items() if name.startswith(side)}
    for sentence, tokens in enumerate(input_tokens(net_input, side).tolist()):
        real = [s for s, token in enumerate(tokens) if token != dictionary.pad()]
        start = sentence * len(tokens)
        yield SentenceSide(
            side,
            [visible(dictionary[tokens[s]]) for s in real],
            [bool(special[tokens[s]]) for s in real],
            [Block(name, block.block.strata) for name, block in blocks.items()],
            [[block.stops[start + s] for s in real] for block in blocks.values()],
        )


def run_pair(model: nn.Module, task, net_input: dict) -> list[SentenceSide]:
    """The sides with MoE layers of a batch's first sentence pair, or of its first text."""
    return [side for side in run_batch(model, task, net_input)[0] if side.blocks]


def run_sentence(
    model: nn.Module, task, direction: str, sentence: str, folder: Path
) -> list[SentenceSide]:
    """The stops of a source sentence's tokens and of the model's translation of it.

    A language model only reads the sentence. The sentence is text if the folder of the dictionaries has a
    model of subwords (`subwords_of`), else tokens separated by spaces.
    """
    if (subwords := checked_subwords(str(folder), task.source_dictionary)) is not None:
        sentence = segmenter(subwords).encode(sentence)
    if is_multilingual(task):
        task.args.source_lang, task.args.target_lang = direction.split("-")
    tokens = task.source_dictionary.encode_line(sentence, add_if_not_exist=False).long()
    if len(tokens) < 2:
        raise UsageError("--sentence: expected a sentence with at least one word")
    longest = np.min(inputs.longest(model, task))
    if len(tokens) >= longest:
        raise UsageError(f"--sentence: {len(tokens)} tokens; expected fewer than {longest}")
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    sample = inputs.on_device(model, dataset.collater([dataset[0]]))
    if inputs.is_language_model(task):
        return run_pair(model, task, sample["net_input"])
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=BEAM)
    with torch.no_grad():
        best = task.inference_step(generator, [model], sample)[0][0]["tokens"]
    first = Readout(None, [model], task).first  # as in training: </s> or the language's token
    shifted = torch.cat([best.new_tensor([first]), best[:-1]])
    sample["net_input"]["prev_output_tokens"] = shifted.unsqueeze(0)
    return run_pair(model, task, sample["net_input"])


def show(sides: list[SentenceSide], colour: bool) -> str:
    """For a terminal: the tokens with their requested capacity below, block by block."""
    lines = []
    most = max((len(block.strata) for side in sides for block in side.blocks), default=1)
    for side in sides:
        for block, requested in zip(side.blocks, side.requested):
            strata = len(block.strata)
            mean = sum(requested) / len(requested)
            lines.append(f"{block.title}: requested capacity of 1 to {strata}, mean {mean:.2f}")
            lines += _wrap(side.tokens, requested, most, colour)
            lines.append("")
    return "\n".join(lines[:-1])


def wants_colour(stream) -> bool:
    """Whether a stream is a terminal with colours; ``NO_COLOR`` disables them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _wrap(tokens: list[str], requested: list[int], most: int, colour: bool) -> list[str]:
    columns = max(40, int(os.environ.get("COLUMNS") or 80) - 2)
    rows, width = [[]], 0
    for token, value in zip(tokens, requested):
        size = max(_width(token), len(str(value)))
        if width + size + 1 > columns and rows[-1]:
            rows.append([])
            width = 0
        painted = _paint(token, value, most, colour) + " " * (size - _width(token))
        rows[-1].append((painted, str(value).ljust(size)))
        width += size + 1
    return ["  " + " ".join(line).rstrip() for row in rows for line in zip(*row)]


def _width(text: str) -> int:
    """Columns of a terminal: two for wide characters, none for those that combine with others."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(each) in ("Mn", "Me", "Cf") for each in text)


def _paint(token: str, value: int, most: int, colour: bool) -> str:
    if not colour:
        return token
    level = round((value - 1) / max(most - 1, 1) * (len(SHADES) - 1))
    background, text = SHADES[level]
    return f"\033[48;5;{background};38;5;{text}m{token}\033[0m"
