"""A loaded model for requests: what it can translate, and texts in, answers fit for JSON out."""

from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq.data.data_utils import collate_tokens

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.stops import SideStops, StopFinder
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.models.smoe_transformer import SMoETransformerModel
from smoe_fairseq.serving.asked import Search
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly
from smoe_fairseq.translation.batch_translator import BatchTranslator, Options
from smoe_fairseq.translation.hypothesis import Translation
from smoe_fairseq.translation.readout import Readout


class Engine:
    """A model that is asked by one thread at a time; `check` and `description` by any.

    Args:
        model: whose texts are translated.
        name: what it is called.
        max_tokens: of a text, in subwords.
    """

    def __init__(self, model: BatchTranslator, name: str, max_tokens: int):
        self.model, self.name = model, name
        translator = self.translator = model.translator
        self.max_tokens = min(max_tokens, translator.max_positions[0] - 2)
        self.max_len = max(Options().max_len_b, self.max_tokens)
        task = self.task = translator.task
        self.directions = inputs.directions(task)
        self.any_pair = inputs.is_multilingual(task)
        self.languages = list(dict.fromkeys(x for pair in self.directions for x in pair.split("-")))
        self.blocks = moe_blocks(translator.models[0])
        self.finder = StopFinder(translator.models[0], task)

    @classmethod
    def of_run(
        cls,
        run: Path,
        data: Path | None = None,
        source: str | None = None,
        target: str | None = None,
        max_tokens: int = 200,
        device: torch.device | str = "cpu",
    ) -> "Engine":
        """As `SMoETransformerModel.from_pretrained` finds it, which says what is missing."""
        translator = SMoETransformerModel.from_pretrained(
            run, data_name_or_path=data, source_lang=source, target_lang=target
        )
        path = Path(run).resolve()
        if path.is_file():
            path = path.parent
        return cls(BatchTranslator(translator.to(device)), path.name, max_tokens)

    def description(self) -> dict:
        """What ``GET /languages`` says."""
        return {
            "model": self.name,
            "directions": self.directions,
            "languages": self.languages,
            "any_pair": self.any_pair,
            "strata": {
                name: list(map(int, block.strata.sizes)) for name, block in self.blocks.items()
            },
            "max_tokens": self.max_tokens,
        }

    def check(self, texts: Sequence[str], search: Search) -> None:
        """Before they wait for anything.

        Raises:
            UsageError: the model has no such direction, or a text is too long.
        """
        source, target = search.source, search.target
        known = set(self.languages)
        unseen = self.any_pair and source != target and {source, target} <= known
        if f"{source}-{target}" not in self.directions and not unseen:
            raise UsageError(
                f"from {source[:20]!r} to {target[:20]!r}: no such direction; expected one of "
                f"{', '.join(self.directions)}"
            )
        for text in texts:
            if not self.translator.has_words(text):
                raise UsageError("a text is empty: expected at least one word")
            tokens = len(self.translator.encode(text)) - 1
            if tokens > self.max_tokens:
                raise UsageError(
                    f"a text of {tokens} tokens is longer than this server takes ({self.max_tokens}): "
                    f"divide it; it begins with {text[:40]!r}"
                )

    def translate(self, texts: list[str], search: Search) -> list[dict]:
        """An answer for each text, as JSON has it."""
        options = Options(
            beam=search.beam,
            nbest=search.nbest,
            lenpen=search.lenpen,
            max_len_b=self.max_len,
            divide_above=self.max_tokens,
        )
        with quietly():
            found = self.model.translate_batch(texts, search.source, search.target, options)
            routing = self._routing(found) if search.routing else None
        answers = [_answer(translation) for translation in found]
        for answer, of_text in zip(answers, routing or (), strict=False):
            answer["routing"] = of_text
        return answers

    def _routing(self, found: list[Translation]) -> list[dict]:
        """Each token's way through the experts, of the texts and their best translations: one more pass."""
        source, target = self.task.source_dictionary, self.task.target_dictionary
        first = Readout(self.translator).first
        read = [_ids(source, translation.tokens) for translation in found]
        given = [
            _ids(target, translation.hypotheses[0].tokens[:-1], first) for translation in found
        ]
        device = self.translator.device
        net_input = {
            "src_tokens": collate_tokens(read, source.pad()).to(device),
            "src_lengths": torch.tensor([len(ids) for ids in read], device=device),
            "prev_output_tokens": collate_tokens(given, target.pad()).to(device),
        }
        return [{s.side: _side(s) for s in sides} for sides in self.finder.run(net_input)]


def _ids(dictionary, tokens: list[str], *first: int) -> torch.Tensor:
    return torch.tensor([*first, *map(dictionary.index, tokens)])


def _answer(translation: Translation) -> dict:
    hypotheses = [
        {"text": h.text, "score": h.score, "tokens": h.tokens, "scores": h.scores}
        for h in translation.hypotheses
    ]
    return {
        "text": translation.source,
        "translation": hypotheses[0]["text"],
        "tokens": translation.tokens,
        "hypotheses": hypotheses,
    }


def _side(side: SideStops) -> dict:
    return {
        "tokens": side.tokens,
        "special": side.special,
        "layers": [
            {
                "name": block.name,
                "strata": list(block.strata.sizes) * block.strata.chain,
                "fixed_depth": block.strata.fixed_depth,
                "first_experts": block.strata.first_experts,
                "stops": [[_stop(stop) for stop in of_token] for of_token in of_block],
            }
            for block, of_block in zip(side.blocks, side.stops, strict=True)
        ],
    }


def _stop(stop) -> dict:
    experts = [{"expert": expert, "weight": round(weight, 4)} for expert, weight in stop.experts]
    return {"stratum": stop.stratum, "first": stop.first, "experts": experts}
