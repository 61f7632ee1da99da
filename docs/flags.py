"""Writes the tables of docs/flags.md, each between two comments: `python docs/flags.py`."""

import re
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path

from smoe_fairseq.criterions.smoe_label_smoothed_cross_entropy import (
    SMoELabelSmoothedCrossEntropyCriterionConfig as CriterionConfig,
)
from smoe_fairseq.flags import flag_of
from smoe_fairseq.models.options import MoEOptions, SMoETransformerConfig

PAGE = Path(__file__).with_suffix(".md")
# Pages that explain a flag.
PAGES = {
    "moe_gate": "family.md",
    "smoe_capacity_budget": "family.md",
    "expert_parallel": "distributed.md",
    "validate_sentences": "recipes.md",
    "subword_sampling": "recipes.md",
}


def options() -> dict[str, list[Field]]:
    """Ours, by the name of the table that shows them."""
    of_models = {each.name for each in fields(MoEOptions)}
    model = [f for f in fields(SMoETransformerConfig) if f.name in of_models or "moe_" in f.name]
    model = [f for f in model if not f.name.startswith("_")]
    place = {f.name: number for number, f in enumerate(model)}
    model.sort(key=lambda f: place[re.sub("^(en|de)coder_", "", f.name)])  # sides behind both
    criterion = [
        f
        for f in fields(CriterionConfig)
        if re.match("s?moe_|cmr_|validate_|subword_|save_", f.name)
    ]
    return {"model": model, "criterion": criterion}


def table(kind: str, rows: Iterable[Field]) -> str:
    lines = [f"| {kind} flag | default | meaning |", "|---|---|---|"]
    lines += [f"| `{flag_of(f.name)}` | {_default(f)} | {_meaning(f)} |" for f in rows]
    return "\n".join(lines)


def _default(option: Field) -> str:
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return f"`{option.default}`" if str(option.default) else ""


def _meaning(option: Field) -> str:
    text = re.sub(r"(--[a-z][\w-]*( [a-z][\w-]*(?=:|\)))?)", r"`\1`", option.metadata["help"])
    choices = [choice.value for choice in getattr(option.type, "__members__", {}).values()]
    if not all(re.search(rf"\b{choice}\b", text) for choice in choices):
        text += "; " + ", ".join(f"`{choice}`" for choice in choices)
    if alias := option.metadata.get("argparse_alias"):
        text += f" (former name: `{alias}`)"
    if page := PAGES.get(option.name):
        text += f" ([docs/{page}]({page}))"
    return text.replace("|", "\\|")


def with_tables(page: str) -> str:
    """The text of the page with its tables made anew."""
    for kind, rows in options().items():
        start, end = f"<!-- {kind} flags, made by docs/flags.py -->", "<!-- end -->"
        before, after = page.split(start)
        page = f"{before}{start}\n{table(kind, rows)}\n{end}{after.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
