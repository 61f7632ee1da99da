"""``smoe analyze`` on models whose gates are fixed by hand: every number is known on paper."""

import itertools
import json
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from commands import PLUGIN, changed, run, smoe
from fairseq.data import Dictionary, FairseqDataset
from handmade import (
    DIRECTIONS,
    LENGTHS,
    MULTILINGUAL,
    ROUTES,
    SPECIAL,
    class_of,
    one_direction,
    read,
    text,
)
from sentencepiece import SentencePieceTrainer

from smoe_fairseq.analysis import figures, inputs
from smoe_fairseq.analysis.capacity import check_capacity
from smoe_fairseq.analysis.inputs import capacities_of
from smoe_fairseq.analysis.record import BlockRecorder, collect
from smoe_fairseq.cli import main
from smoe_fairseq.modules import StratifiedMoE


class Lines(FairseqDataset):
    """Forty, all of one length."""

    sizes = np.full(40, 5)

    def __len__(self):
        return len(self.sizes)

    def size(self, index):
        return self.sizes[index]

    num_tokens = size


def test_a_sample_is_in_the_order_of_all():
    """Which mixes directions as in training, where those that come first keep their experts."""
    order = np.random.default_rng(3).permutation(40)
    order = order[inputs.drawn(40, 12)]
    found, _ = inputs.batches(Lines(), 1024, max_tokens=20, order=order)
    drawn = np.concatenate(found).tolist()
    assert len(drawn) == 12 and drawn == order.tolist() != sorted(drawn)


@pytest.fixture(scope="module")
def analysis(three_languages, gates_by_hand, tmp_path_factory) -> Path:
    """What ``smoe analyze`` writes of all directions."""
    folder = tmp_path_factory.mktemp("analysis") / "results"
    process = run(
        *("smoe", "analyze", three_languages, "--path", gates_by_hand, "--output", folder, "--cpu"),
        *("--min-count", 1, "--max-tokens", 60),
    )
    assert process.stdout.splitlines()[-1].startswith(f"{folder}/report.html")
    return folder


def pair_of(direction):
    return direction if direction.startswith("aa") else "-".join(reversed(direction.split("-")))


def words_on(direction, side) -> Counter:
    """What a side of a direction's validation set is given, special tokens as "special"."""
    source, target = direction.split("-")
    sentences = text(source if side == "encoder" else target, pair_of(direction) + "valid", LENGTHS)
    counter = Counter(word for sentence in sentences for word in sentence)
    # Language token and </s> in the encoder; </s>, which starts the sentence, in the decoder.
    counter["special"] = len(LENGTHS) * (2 if side == "encoder" else 1)
    return counter


def expected(direction, side, kind) -> Counter:
    """(stratum, expert) of all first choices, by the routes on paper."""
    choices = Counter()
    for word, count in words_on(direction, side).items():
        if (word == "special") == (kind == "special"):
            route = ROUTES[SPECIAL if word == "special" else class_of(word)]
            for choice in route.items():
                choices[choice] += count
    return choices


def cases():
    """(direction, side, layer, kind of tokens)"""
    return itertools.product(DIRECTIONS, ("encoder", "decoder"), (1, 3), ("text", "special"))


def counted(file, number: str, *names: str) -> dict[tuple, Counter]:
    """By case, the numbers of a table that are not 0, by the values of its columns ``names``."""
    found = {case: Counter() for case in cases()}
    for row in read(file):
        case = row["direction"], row["side"], int(row["layer"]), row["kind"]
        if count := int(row[number]):
            found[case][tuple(int(row[name]) for name in names)] = count
    return found


def test_first_choices_are_those_on_paper(analysis):
    found = counted(analysis / "load.csv", "first_choices", "stratum", "expert")
    assert found == {(d, s, la, k): expected(d, s, k) for d, s, la, k in cases()}


def test_requested_capacity_is_weighted_by_tokens(analysis):
    """The sentences, and with 60 tokens the batches, are of very different length."""
    rows = read(analysis / "blocks.csv")
    assert len(rows) == len(list(cases()))
    for row in rows:
        choices = expected(row["direction"], row["side"], row["kind"])
        tokens = sum(count for (stratum, _), count in choices.items() if stratum == 0)
        assert (int(row["tokens"]), int(row["stops"])) == (tokens, choices.total())
        assert row["requested_capacity"] == f"{choices.total() / tokens:.6f}"


def test_flow_is_the_one_on_paper(analysis):
    found = counted(analysis / "flow.csv", "tokens", "stratum", "chosen_stratum")
    for case in cases():
        want = Counter()
        for (stratum, expert), count in expected(*case[:2], case[3]).items():
            want[stratum, expert // 2] += count
        assert found[case] == want


def test_token_types(analysis):
    rows = read(analysis / "tokens.csv")
    for direction, side, layer, kind in cases():
        words = words_on(direction, side)
        those = [
            row
            for row in rows
            if (row["direction"], row["side"], int(row["layer"]), row["kind"])
            == (direction, side, layer, kind)
        ]
        counts = Counter({row["token"]: int(row["occurrences"]) for row in those})
        if kind == "special":
            target = direction.split("-")[1]
            tokens = ["</s>", f"__{target}__"] if side == "encoder" else ["</s>"]
            assert counts == dict.fromkeys(tokens, len(LENGTHS))
            continue
        del words["special"]
        assert counts == words
        for row in those:
            route = ROUTES[class_of(row["token"])]
            assert float(row["requested_capacity"]) == len(route)
            chosen = {
                (int(name[7]), int(name[15])): int(value)
                for name, value in row.items()
                if name.startswith("stratum") and int(value)
            }
            assert chosen == dict.fromkeys(route.items(), int(row["occurrences"]))


def test_frequency_ranks_are_of_the_training_text(analysis):
    count = Counter()
    for pair, sentences in (("aa-bb", 20), ("aa-cc", 10)):
        for language in pair.split("-"):
            for sentence in text(language, pair + "train", [5] * sentences):
                count.update(sentence)
    rank = {
        r["token"]: int(r["frequency_rank"])
        for r in read(analysis / "tokens.csv")
        if r["frequency_rank"]
    }
    ordered = [count[token] for token in sorted(rank, key=rank.get)]
    assert len(set(rank.values())) == len(rank) and min(rank.values()) > 1  # </s> is the first
    assert ordered == sorted(ordered, reverse=True)


def test_run_is_described(analysis, gates_by_hand):
    described = json.loads((analysis / "run.json").read_text())
    assert described["checkpoint"] == str(gates_by_hand) and described["subset"] == "valid"
    assert described["sentences"] == dict.fromkeys(DIRECTIONS, len(LENGTHS))
    assert described["strata"]["encoder.layer.1"] == "2-2-2-2"


def test_report_is_one_file(analysis):
    page = (analysis / "report.html").read_text()
    names = "by_direction frequency by_depth load flow positions sentence training".split()
    for name in names:
        assert f'<section id="{name}">' in page
        assert all((analysis / f"{name}.{kind}").stat().st_size for kind in ("png", "svg"))
    assert page.count('src="data:image/png;base64,') == len(names)
    assert "://" not in page and 'name="viewport"' in page


@pytest.fixture(scope="module")
def loaded(multilingual, three_languages):
    return inputs.load(multilingual, three_languages)


def collected(loaded, **options):
    samples = inputs.Samples(*loaded, DIRECTIONS[0], inputs.Subset(**options))
    return [(block.types.tolist(), block.first_choices.tolist()) for block in collect(samples)]


def test_numbers_do_not_depend_on_the_batch_size(loaded):
    assert collected(loaded, max_tokens=50) == collected(loaded, max_tokens=4000)


def test_memory_of_the_counters_does_not_grow_with_the_dictionary():
    block, dictionary = StratifiedMoE(8, 16, "2-2").eval(), Dictionary()
    dictionary.add_symbol("one")
    dictionary.symbols *= 10_000
    recorder = BlockRecorder(block, dictionary)
    for stratum, gate in enumerate(block.gates):
        gate.register_forward_hook(partial(recorder.record, stratum))
    for tokens in ([[5, 40_000, 5]], [[7, 5, 6]]):
        recorder.begin(torch.tensor(tokens))
        block(torch.randn(1, 3, 8))
    types, counts = recorder.counts()
    assert types.tolist() == [5, 6, 7, 40_000] and counts[:, 0].sum(1).tolist() == [3, 1, 1, 1]


def test_a_sample_is_drawn_from_all_shards(multilingual, three_languages, tmp_path):
    """Of two equal shards, as many sentences as one of them has: some twice, others never."""
    shard = shutil.copytree(three_languages, tmp_path / "shard")
    loaded = inputs.load(multilingual, f"{three_languages}:{shard}")
    size = len(next(inputs.datasets(loaded[1], "aa-bb", "train")))
    samples = inputs.Samples(*loaded, "aa-bb", inputs.Subset("train", sentences=size))
    ids = [i for sample in samples for i in sample["id"].tolist()]
    assert len(ids) == samples.seen == size and 1 < len(set(ids)) < size


@pytest.mark.parametrize("named", [[], ["--lang-pairs", "eng-zho"]])
def test_codes_of_languages_may_have_hyphens(hyphens, tmp_path, named):
    with mock.patch("smoe_fairseq.analysis.report.write") as write:
        words = ("analyze", hyphens, "--path", hyphens, "--cpu", *named)  # the folder of a run
        assert main([*map(str, words), "--output", str(tmp_path / "out")]) == 0
    found = write.call_args.args[1]
    languages = {block.side: [*figures.loads(found, block)] for block in found.blocks}
    assert languages == {"encoder": ["en"], "decoder": ["zh-CN"]}
    ranks = [row["frequency_rank"] for row in read(tmp_path / "out/tokens.csv")]
    assert any(ranks) and found.sizes == {"en-zh-CN": 50}
    words = str(sum(3 + i % 6 for i in range(50)))  # of either side of `small_corpus`
    rows = read(tmp_path / "out/blocks.csv")
    assert {row["tokens"] for row in rows if row["kind"] == "text"} == {words}
    assert {row["direction"] for row in rows} == {"en-zh-CN"}


@pytest.mark.soak
def test_losses_with_and_without_the_limit_are_those_of_validation(three_languages, multilingual):
    """One batch of all directions, as `fairseq-validate` makes it but for the order of its rows."""
    model, task = inputs.load(multilingual, str(three_languages))
    for capacity in capacities_of(model):
        capacity.order = "score"

    def validation(**overrides):
        settings = {"moe_drop_order": "score", **overrides}
        output = run(
            *("fairseq-validate", three_languages, "--user-dir", PLUGIN, "--path", multilingual),
            *("--cpu", *MULTILINGUAL, "--max-tokens", 4096, "--num-workers", 0),
            *("--log-format", "json", "--model-overrides", str(settings)),
        ).stdout
        line = json.loads(re.findall(r"^.*(\{.*valid_nll_loss.*\})", output, re.MULTILINE)[-1])
        return float(line["valid_nll_loss"]), float(line["valid_overflow_expert1"])

    found = check_capacity(model, task, DIRECTIONS, inputs.Subset())
    limited, overflow = validation(moe_eval_capacity_factor=capacity.factor)
    assert found.limited_nll_loss == pytest.approx(limited, abs=6e-4)
    chosen, dropped = sum(found.fifths.values()).sum(1)
    assert 100 * dropped / chosen == pytest.approx(overflow, abs=0.002)
    assert found.nll_loss == pytest.approx(validation()[0], abs=0.0006)
    assert found.gap != 0 and capacity.eval_factor == 0


def test_a_sentence(three_languages, gates_by_hand, tmp_path):
    words = ("--sentence", "aa0 aa4 aa5", "--output", tmp_path / "one")
    lines = smoe(*one_direction(three_languages, gates_by_hand), *words).stdout.splitlines()
    assert lines[0] == "aa-bb"
    assert lines[1] == "encoder layer 1: requested capacity of 1 to 4, mean 2.40"
    assert lines[2].split() == ["__bb__", "aa0", "aa4", "aa5", "</s>"]
    assert lines[3].split() == ["2", "1", "3", "4", "2"]
    assert sum(line.startswith(("encoder", "decoder")) for line in lines) == 4
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["sentence.png", "sentence.svg"]
    words = ("--sentence", " ".join(["aa0 aa4 aa5"] * 8))
    lines = smoe(*one_direction(three_languages, gates_by_hand), *words, COLUMNS="50").stdout
    assert 44 < max(len(line) for line in lines.splitlines() if "aa0" in line) <= 50


def test_a_sentence_of_a_decoder_whose_language_replaces_the_end(
    three_languages, gates_by_hand, tmp_path
):
    def change(state):
        task = state["cfg"]["task"]
        task.decoder_langtok = task.lang_tok_replacing_bos_eos = True
        task.langtoks = {"main": ("tgt", "tgt")}

    checkpoint = changed(gates_by_hand, tmp_path / "replacing.pt", change)
    words = (*one_direction(three_languages, checkpoint), "--sentence", "aa0 aa4 aa5")
    lines = smoe(*words).stdout.splitlines()
    decoder = next(i for i, line in enumerate(lines) if line.startswith("decoder"))
    assert lines[decoder + 1].split()[0] == "__bb__"


def test_a_sentence_is_segmented_by_the_model_beside_sharded_data(
    three_languages, gates_by_hand, tmp_path
):
    """By either of its usual names; test_analyze_faults.py has the other one."""
    shard = shutil.copytree(three_languages, tmp_path / "shard0")
    words = [line.split()[0] for line in (shard / "dict.aa.txt").read_text().splitlines()]
    with open(tmp_path / "sentencepiece.bpe.model", "wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter([*words, "other"]),
            model_writer=file,
            user_defined_symbols=words,
            add_dummy_prefix=False,
            hard_vocab_limit=False,
        )
    words = (*one_direction(shard, gates_by_hand), "--sentence", "aa0aa4aa5")
    lines = smoe(*words).stdout.splitlines()
    assert lines[2].split() == ["__bb__", "aa0", "aa4", "aa5", "</s>"]


def test_positions_are_of_all_first_choices(analysis):
    """In five fifths as many as in all directions together; some are dropped on each side."""
    load = Counter()
    for row in read(analysis / "load.csv"):
        load[row["side"], row["layer"]] += int(row["first_choices"])
    positions, dropped = Counter(), Counter()
    for row in read(analysis / "positions.csv"):
        assert 0 <= int(row["dropped"]) <= int(row["first_choices"])
        positions[row["side"], row["layer"]] += int(row["first_choices"])
        dropped[row["side"]] += int(row["dropped"])
    assert positions == load and len(dropped) == 2 and all(dropped.values())
    assert 'id="positions"' in (analysis / "report.html").read_text()
