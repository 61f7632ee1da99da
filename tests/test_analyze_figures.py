"""What the pictures of an analysis draw, from results made by hand."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from fairseq.data import Dictionary

from smoe_fairseq.analysis import figures, report, training_log
from smoe_fairseq.analysis.capacity import CapacityCheck
from smoe_fairseq.analysis.record import Block, TypeCounts
from smoe_fairseq.analysis.results import Results
from smoe_fairseq.analysis.sentence import SentenceSide, Stop, show, visible
from smoe_fairseq.modules.strata import Strata


@pytest.fixture(scope="module")
def results():
    """Results of one block of two strata with two experts each, and two directions, by hand."""
    block = Block("decoder.layer.1", Strata.parse("2-2"))
    types = np.array([4, 5])
    routes = np.zeros((2, 2, 4), dtype=np.int64)  # type, stratum, expert
    routes[0, 0] = [0, 0, 3, 0]  # three leave at once
    routes[1, 0], routes[1, 1] = [1, 0, 0, 0], [0, 0, 0, 1]  # one goes through both strata
    found = Results(
        run={},
        dictionaries={"encoder": Dictionary(), "decoder": Dictionary()},
        ranks={"decoder": np.array([1, 2, 3, 4, 50, 7])},
        sizes={"aa-bb": 5, "bb-aa": 9},
    )
    special = np.zeros(2, dtype=bool)
    found.add("aa-bb", [TypeCounts(block, types, special, routes)])
    found.add("bb-aa", [TypeCounts(block, types[:1], special[:1], routes[:1])])
    return found


@pytest.mark.soak
def test_the_backend_of_a_notebook_does_not_matter():
    """Jupyter sets one that other environments lack, and it stays the process's."""
    program = """
import os, matplotlib
from smoe_fairseq.analysis import figures
figures.new()[0].savefig(os.devnull, format="png")
assert {os.environ["MPLBACKEND"], matplotlib.rcParams["backend"]} == {"module://none.inline"}
"""
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=os.environ | {"MPLBACKEND": "module://none.inline"}, check=True)


def test_picture_of_directions(results, monkeypatch):
    monkeypatch.setattr(type(results), "pivot", lambda results: "aa")
    decoder = figures.draw_by_direction(results).axes[0]
    assert [label.get_text() for label in decoder.get_yticklabels()] == ["bb-aa", "aa-bb"]
    assert [bar.get_width() for bar in decoder.patches] == [1.0, 1.25]  # 5 stops of 4 tokens
    rows = {
        each.get_label(): [round(bar.get_center()[1]) for bar in each]
        for each in decoder.containers
    }
    assert rows == {"into aa": [0], "out of aa": [1]}


def test_picture_of_depth(results):
    lines = figures.draw_by_depth(results).axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [1.25, 1.0, 8 / 7]


def test_picture_of_frequency(results):
    block = results.blocks[0]
    groups = figures.groups(results, block, min_count=1)
    assert groups["all"].tolist() == [7, 50]
    assert figures.groups(results, block, min_count=2)["lowest"].tolist() == [50]
    medians = [line.get_ydata()[0] for line in figures.draw_frequency(results, 2).axes[0].lines]
    assert medians == [50, 50, 50]


def test_picture_of_load(results):
    axes = figures.draw_load(results).axes
    drawn = axes[0].images[0].get_array()
    # into bb: 1, 0, 3, 1 first choices; into aa: 0, 0, 3, 0
    assert drawn.tolist() == [[0.8, 0.0, 2.4, 0.8], [0.0, 0.0, 4.0, 0.0]]


def test_picture_of_flow(results):
    counts = results.over(results.directions, results.blocks[0])
    moves = figures.shares(counts)
    assert moves == {(0, 1): 1 / 7, (0, 2): 6 / 7, (1, 2): 1 / 7}


def test_block_whose_name_begins_like_another():
    """As the log of a deep model has them: layer 1 is not layers 10 and 11."""
    series = {
        "encoder.layer.11/stratum.0/load_max": {100: 9.0},
        "encoder.layer.1/stratum.0/load_max": {100: 3.0, 200: 1.2},
        "encoder.layer.10/stratum.0/load_max": {200: 8.0},
        "encoder.layer.1/stratum.1/load_max": {200: 1.4, 300: 2.0},
    }
    assert figures.busiest(series, "encoder.layer.1") == {100: 3.0, 200: 1.4, 300: 2.0}
    assert figures.busiest(series, "encoder.layer.10") == {200: 8.0}
    figures.draw_training(series)


def side_of(side: str, tokens: list[str], blocks: list, requested: list[list[int]]):
    """Of a sentence whose tokens stop as often as `requested` says."""
    stops = [[[Stop(i, 0, []) for i in range(n)] for n in of_block] for of_block in requested]
    special = [token.startswith(("__", "<")) for token in tokens]
    return SentenceSide(side, tokens, special, blocks, stops)


TOKENS = {  # and how they are shown
    "$$": "$$",
    "a$_$b": "a$_$b",
    r"$\frac{": r"$\frac{",
    "<&>": "<&>",
    "\x1b[31mred": r"\x1b[31mred",
    "\x9b2J": r"\x9b2J",
    "a\nb\t\x00": r"a\nb\t\x00",
    "\u202etxt": r"\u202etxt",
    "\u2028": r"\u2028",
    "\ud800\uffff\U0001ffff": r"\ud800\uffff\U0001ffff",
    "▁نمی\u200cخواهم": "▁نمی\u200cخواهم",
}


@pytest.mark.filterwarnings("ignore:Glyph .* missing")
def test_tokens_are_text(results, tmp_path):
    """Neither mathematics nor commands, in pictures and on a terminal."""
    shown = [visible(token) for token in TOKENS]
    assert shown == list(TOKENS.values())
    side = side_of("decoder", shown, results.blocks, [[1] * len(shown)])
    figures.save(figures.draw_sentence([side]), tmp_path / "one")
    texts = {element.text for element in ElementTree.parse(tmp_path / "one.svg").iter()}
    assert texts >= set(shown)


def test_numbers_are_below_their_tokens():
    """On a terminal, where a letter may take two columns, or none."""
    tokens = ["a", "▁这是", "कु", "b", "c"]
    block = Block("decoder.layer.1", Strata.parse("-".join("2" * 12)))
    side = side_of("decoder", tokens, [block], [[12, 3, 4, 10, 1]])
    lines = ["  a  ▁这是 कु b  c", "  12 3     4 10 1"]
    assert show([side], colour=False).splitlines()[1:] == lines


def test_a_number_has_one_shade():
    """On sides with different strata."""
    few, many = (Block(f"{n}.layer.1", Strata.parse("-".join("2" * n))) for n in (2, 4))
    sides = [side_of(str(len(each.strata)), ["a"], [each], [[2]]) for each in (few, many)]
    limits = [ax.images[0].get_clim() for ax in figures.draw_sentence(sides).axes]
    assert limits == [(0.5, 4)] * 2
    painted = [line for line in show(sides, colour=True).splitlines() if "\033" in line]
    assert len(painted) == 2 and len(set(painted)) == 1


def test_fonts_of_other_scripts(tmp_path, capsys):
    """Installed ones follow matplotlib's own; what none has is named."""
    installed = ["Noto Sans Thai", "Other", "Noto Sans CJK JP", "DejaVu Sans"]
    assert figures.fonts(installed) == ["DejaVu Sans", "Noto Sans CJK JP", "Noto Sans Thai"]
    figure, _ = figures.new()
    figure.text(0.5, 0.5, "a \ue000")  # a code that stands for no character
    missing = figures.save(figure, tmp_path / "picture")
    assert missing == {"\ue000"} and (tmp_path / "picture.svg").exists()
    figures.warn_of_missing(missing)
    figures.warn_of_missing(set())
    assert len(capsys.readouterr().err.splitlines()) == 1


LINES = [  # of a log, none of which says anything
    "train_inner | epoch 001: 1 / 2 requested_capacity=1.5, num_updates=nan",
    "| train_inner | epoch 001: requested_capacity=1.2.3, num_updates=5",
    '{"num_updates": NaN, "requested_capacity": 2}',
    '{"num_updates": 1e999, "requested_capacity": 2}',
    '{"num_updates": 3, "requested_capacity": [2], "foo/bar": 1, "encoder.layer.x/load": 2}',
    '{"num_updates": 3, "requested_capacity": "Infinity"}',
    '{"num_updates": 3, "requested_capacity": ' + "9" * 5000 + "}",
    '{"a":' * 100_000 + "}",
    '{"num_updates": 3, "requested_cap',
    "\x00\x1b[31m",
    "epoch 1: | num_updates ٣ | requested_capacity ٣",
]


def test_malformed_log(tmp_path):
    log = tmp_path / "train.log"
    for line in LINES:
        log.write_text(f"{line}\n")
        assert training_log.read(log) == {}, line[:80]
    good = '{"num_updates": "3", "requested_capacity": "1.5", "decoder.layer.1/load_max": 2}'
    log.write_text("\n".join([*LINES, good]))
    series = training_log.read(log)
    assert series == {"requested_capacity": {3: 1.5}, "decoder.layer.1/load_max": {3: 2.0}}
    figures.draw_training(series)


def test_what_has_nothing_to_show_is_left_out(results):
    """One layer has no depth, and limits that drop nothing no positions."""

    def names(found):
        return list(report.pictures(found, [], {}, 1))

    fifths = np.stack([np.full(5, 9), np.zeros(5, dtype=int)])
    none_dropped = replace(results, capacity=CapacityCheck(4, fifths={"decoder.layer.1": fifths}))
    assert names(none_dropped) == ["by_direction", "frequency", "load", "flow"]
    assert "frequency" not in report.pictures(results, [], {}, 99)
    some = fifths + np.eye(2, 5, -1, dtype=int)
    dropping = replace(results, capacity=CapacityCheck(4, fifths={"decoder.layer.1": some}))
    assert "positions" in names(dropping)
    assert len(figures_of_training({"overflow_expert1": {100: 0.0, 200: 0.0}})) == 1
    assert len(figures_of_training({"overflow_expert1": {100: 3.0, 200: 0.0}})) == 2


@pytest.mark.filterwarnings("ignore:No artists with labels")
def figures_of_training(series):
    return figures.draw_training({"requested_capacity": {100: 2.0, 200: 1.5}} | series).axes


def test_the_page_escapes_what_it_is_given(results):
    run = {"checkpoint": "a<b", "updates": 4000, "strata": {"decoder.layer.1": "2-2"}}
    run |= {"data": "a & b", "subset": "valid", "sentences": {"aa-bb": 3, "bb-aa": 4}}
    run |= {"too_long": {}, "sample": None, "device": "cpu", "smoe_fairseq": "1"}
    found = replace(results, run=run)
    made = report.page(found, Path("<runs>/best.pt"), {"load": "d2lkZQ=="}, min_count=1)
    page = " ".join(made.split())
    assert "&lt;runs&gt;/best.pt" in page and "a &amp; b, valid" in page
    assert "<td>a&lt;b, 4,000 updates</td>" in page
    assert " 7 sentence pairs in 2 " in page and " 1.14 strata " in page
    assert 'src="data:image/png;base64,d2lkZQ=="' in page and 'id="frequency"' not in page
