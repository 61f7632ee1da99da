"""README.md and docs/: every link leads somewhere, and docs/flags.md has every flag of ours."""

import argparse
import re
import runpy
from pathlib import Path

import pytest

from smoe_fairseq.criterions import smoe_label_smoothed_cross_entropy as criterion
from smoe_fairseq.models import SMoETransformerModel

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's titles, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_flags_of_the_model_and_the_criterion():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    SMoETransformerModel.add_args(parser)
    loss = argparse.ArgumentParser(allow_abbrev=False)
    criterion.SMoELabelSmoothedCrossEntropyCriterion.add_args(loss)
    flags = {
        flag
        for action in (*parser._actions, *loss._actions)
        for flag in action.option_strings
        if re.match(r"--((en|de)coder-)?(s?moe|cmr|expert)-", flag) and action.help
    }
    assert len(flags) > 40
    page = (ROOT / "docs/flags.md").read_text("utf-8")
    assert not {flag for flag in flags if f"`{flag}`" not in page}


def test_tables_of_flags_are_as_declared():
    """`python docs/flags.py` makes them anew."""
    page = (ROOT / "docs/flags.md").read_text("utf-8")
    with_tables = runpy.run_path(str(ROOT / "docs/flags.py"))["with_tables"]
    assert with_tables(page) == page
    assert with_tables(page.replace("| `--moe-top-k` | `2` |", "| `--moe-top-k` | `3` |")) == page
