"""``smoe analyze`` on models whose gates are fixed by hand: every number is known on paper."""

import csv
import errno
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from commands import run
from handmade import (
    DIRECTIONS,
    LANGUAGES,
    LENGTHS,
    MULTILINGUAL,
    PLUGIN,
    ROUTES,
    SPECIAL,
    class_of,
    fix_gates,
    symbols,
    text,
    train,
    training,
    words_of,
)
from test_compat import run_without

from smoe_fairseq.analysis import capacity_check, inputs, training_log
from smoe_fairseq.cli import main
from smoe_fairseq.modules.drops import capacities_of


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two language pairs with one dictionary; ``data / "text"`` has their text."""
    folder = tmp_path_factory.mktemp("three-languages")
    raw, binary = folder / "raw", folder / "bin"
    raw.mkdir()
    dictionary = []
    for pair in ("aa-bb", "aa-cc"):
        for language in pair.split("-"):
            for split, lengths in (
                ("train", [5] * (20 if pair == "aa-bb" else 10)),
                ("valid", LENGTHS),
            ):
                lines = text(language, pair + split, lengths)
                content = "".join(" ".join(line) + "\n" for line in lines)
                (raw / f"{split}.{pair}.{language}").write_text(content)
    words = "".join(f"{word} 1\n" for language in LANGUAGES for word in words_of(language))
    (raw / "dict.txt").write_text(words)
    dictionary = ["--srcdict", raw / "dict.txt", "--tgtdict", raw / "dict.txt"]
    for pair in ("aa-bb", "aa-cc"):
        source, target = pair.split("-")
        run(
            *("fairseq-preprocess", "-s", source, "-t", target, *dictionary),
            *("--trainpref", raw / f"train.{pair}", "--validpref", raw / f"valid.{pair}"),
            *("--destdir", binary),
        )
    return binary


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """A checkpoint of all directions after two updates, with its log and TensorBoard's events."""
    folder = tmp_path_factory.mktemp("multilingual")
    train(data, folder, *MULTILINGUAL, "--tensorboard-logdir", folder / "events")
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def by_hand(trained) -> Path:
    return fix_gates(trained, symbols(len(LANGUAGES)))


@pytest.fixture(scope="module")
def analysis(data, by_hand, tmp_path_factory) -> Path:
    """What ``smoe analyze`` writes of all directions."""
    folder = tmp_path_factory.mktemp("analysis") / "results"
    process = run(
        *("smoe", "analyze", data, "--path", by_hand, "--output", folder, "--cpu"),
        *("--min-count", 1, "--max-tokens", 60),
    )
    assert process.stdout.splitlines()[-1].startswith(f"{folder}/report.html")
    return folder


def read(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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
    for direction in DIRECTIONS:
        for side in ("encoder", "decoder"):
            for layer in (1, 3):
                for kind in ("text", "special"):
                    yield direction, side, layer, kind


def test_first_choices_are_those_on_paper(analysis):
    found = {case: Counter() for case in cases()}
    for row in read(analysis / "load.csv"):
        case = row["direction"], row["side"], int(row["layer"]), row["kind"]
        if count := int(row["first_choices"]):
            found[case][int(row["stratum"]), int(row["expert"])] = count
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
    found = {case: Counter() for case in cases()}
    for row in read(analysis / "flow.csv"):
        case = row["direction"], row["side"], int(row["layer"]), row["kind"]
        if count := int(row["tokens"]):
            found[case][int(row["stratum"]), int(row["chosen_stratum"])] = count
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


def test_run_is_described(analysis, by_hand):
    described = json.loads((analysis / "run.json").read_text())
    assert described["checkpoint"] == str(by_hand) and described["subset"] == "valid"
    assert described["sentences"] == dict.fromkeys(DIRECTIONS, len(LENGTHS))
    assert described["strata"]["encoder.layer.1"] == "2-2-2-2"


def test_report_is_one_file(analysis):
    page = (analysis / "report.html").read_text()
    names = [
        "by_direction",
        "frequency",
        "by_depth",
        "load",
        "flow",
        "positions",
        "sentence",
        "training",
    ]
    for name in names:
        assert f'<section id="{name}">' in page
        assert (analysis / f"{name}.png").stat().st_size and (
            analysis / f"{name}.svg"
        ).stat().st_size
    assert page.count('src="data:image/png;base64,') == len(names)
    assert "http" not in page and 'name="viewport"' in page


@pytest.fixture(scope="module")
def loaded(trained, data):
    from smoe_fairseq.analysis.inputs import load

    return load(trained, data)


def collected(loaded, **options):
    from smoe_fairseq.analysis.collect import collect

    return [
        (d.name, d.sentences, [(b.types.tolist(), b.first_choices.tolist()) for b in d.blocks])
        for d in collect(*loaded, DIRECTIONS, progress=False, **options)
    ]


def test_numbers_do_not_depend_on_the_batch_size(loaded):
    assert collected(loaded, max_tokens=50) == collected(loaded, max_tokens=4000)


def test_a_sample_is_the_same_every_time(loaded):
    first = collected(loaded, sentences=3)
    assert [sentences for _, sentences, _ in first] == [3] * len(DIRECTIONS)
    assert collected(loaded, sentences=3) == first


def test_shapes_that_do_not_depend_on_the_routing(loaded):
    """As on a GPU, where the gates see all tokens and a mask."""
    from smoe_fairseq.models.moe_layers import moe_blocks

    want = collected(loaded)
    blocks = moe_blocks(loaded[0]).values()
    for block in blocks:
        block.execution = "grouped"
    try:
        assert collected(loaded) == want
    finally:
        for block in blocks:
            block.execution = "auto"


def test_one_direction_with_the_translation_task(data, tmp_path):
    train(data, tmp_path, "--task", "translation", "-s", "bb", "-t", "aa")
    checkpoint = fix_gates(tmp_path / "checkpoint_last.pt", symbols(0))
    main(
        [
            "analyze",
            str(data),
            "--path",
            str(checkpoint),
            "--output",
            str(tmp_path / "out"),
            "--cpu",
        ]
    )
    rows = [row for row in read(tmp_path / "out" / "blocks.csv") if row["kind"] == "text"]
    assert [row["direction"] for row in rows] == ["bb-aa"] * 4
    for row in rows:
        assert int(row["stops"]) == expected("bb-aa", row["side"], "text").total()


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


def test_losses_with_and_without_the_limit_are_those_of_validation(data, trained):
    """One batch of all directions, as `fairseq-validate` makes it but for the order of its rows."""
    output = run(
        *("fairseq-validate", data, "--user-dir", PLUGIN, "--path", trained, "--cpu"),
        *(*MULTILINGUAL, "--max-tokens", 4096, "--num-workers", 0, "--log-format", "json"),
        *("--model-overrides", "{'moe_drop_order': 'score'}"),
    ).stdout
    line = json.loads(re.findall(r"^.*(\{.*valid_nll_loss.*\})", output, re.MULTILINE)[-1])
    model, task = inputs.load(trained, str(data))
    for capacity in capacities_of(model):
        capacity.order = "score"
    found = capacity_check.check(model, task, DIRECTIONS)
    assert found.nll_loss == pytest.approx(float(line["valid_nll_loss"]), abs=0.0006)
    assert found.limited_nll_loss == pytest.approx(float(line["valid_capacity_nll_loss"]), abs=6e-4)
    table = sum(found.fifths.values())
    percent = 100 * table[1] / table[0]
    logged = [float(line[f"valid_capacity_overflow_fifth{i}"]) for i in range(1, 6)]
    assert percent.tolist() == pytest.approx(logged, abs=0.002)
    assert found.gap != 0 and model.encoder.layers[1].moe.gates[0].capacity.eval_factor == 0


def test_naive_stacking(data, tmp_path):
    train(data, tmp_path, *MULTILINGUAL, "--moe-stacked", "--smoe-strata", "4-4")
    checkpoint = str(tmp_path / "checkpoint_last.pt")
    main(["analyze", str(data), "--path", checkpoint, "--output", str(tmp_path / "out"), "--cpu"])
    rows = read(tmp_path / "out" / "flow.csv")
    assert {(row["stratum"], row["chosen_stratum"]) for row in rows} == {("0", "0"), ("1", "1")}
    assert {row["requested_capacity"] for row in read(tmp_path / "out" / "blocks.csv")} == {
        "2.000000"
    }


def test_a_sentence(data, by_hand, tmp_path, capsys):
    arguments = ["analyze", str(data), "--path", str(by_hand), "--cpu", "--lang-pairs", "aa-bb"]
    main([*arguments, "--sentence", "aa0 aa4 aa5", "--output", str(tmp_path / "one")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "aa-bb"
    assert lines[1] == "encoder layer 1: requested capacity of 1 to 4, mean 2.40"
    assert lines[2].split() == ["__bb__", "aa0", "aa4", "aa5", "</s>"]
    assert lines[3].split() == ["2", "1", "3", "4", "2"]
    assert sum(line.startswith(("encoder", "decoder")) for line in lines) == 4
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "sentence.png",
        "sentence.svg",
    ]


def test_a_sentence_whose_tokens_are_commands(data, by_hand, tmp_path, capsys, monkeypatch):
    from fairseq.data import Dictionary

    def symbol(self, i):
        return "\x1b[2J$$" if self.symbols[i] == "aa4" else self.symbols[i]

    monkeypatch.setattr(Dictionary, "__getitem__", symbol)
    arguments = ["analyze", str(data), "--path", str(by_hand), "--cpu", "--lang-pairs", "aa-bb"]
    main([*arguments, "--sentence", "aa0 aa4", "--output", str(tmp_path / "one")])
    output = capsys.readouterr().out
    assert r"\x1b[2J$$" in output and "\x1b" not in output
    assert r"\x1b[2J$$" in (tmp_path / "one/sentence.svg").read_text()


def test_numbers_stay_where_a_picture_fails(data, by_hand, tmp_path, monkeypatch):
    from smoe_fairseq.analysis import pictures

    def draw(*_):
        raise ValueError("no ink\nleft")

    monkeypatch.setattr(pictures, "draw", draw)
    folder = tmp_path / "out"
    given = ["analyze", str(data), "--path", str(by_hand), "--cpu", "--lang-pairs", "aa-bb"]
    with pytest.raises(SystemExit, match="has all numbers, but .* not be drawn: no ink left") as e:
        main([*given, "--output", str(folder)])
    assert str(e.value).startswith(f"error: {folder} ")
    assert read(folder / "blocks.csv") and read(folder / "tokens.csv")
    assert json.loads((folder / "run.json").read_text())["subset"] == "valid"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_room_for_a_picture_the_numbers_and_the_others_stay(
    data, by_hand, tmp_path, monkeypatch
):
    from matplotlib.figure import Figure

    savefig = Figure.savefig

    def full(figure, path, **options):
        savefig(figure, path, **options)
        if "load.svg" in str(path):
            no_room()

    monkeypatch.setattr(Figure, "savefig", full)
    given = ["analyze", str(data), "--path", str(by_hand), "--cpu", "--lang-pairs", "aa-bb"]
    with pytest.raises(SystemExit) as error:
        main([*given, "--output", str(tmp_path / "out")])
    reason = (
        "load.svg cannot be saved: No space left on device; files saved before are as they were"
    )
    assert str(error.value).endswith(f"the report could not be drawn: {reason}")
    assert read(tmp_path / "out/tokens.csv")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"by_direction.png", "by_depth.svg", "load.png"} <= names
    assert not any("load.svg" in name or name == "report.html" for name in names)


def test_without_room_for_the_numbers_there_is_no_folder(data, by_hand, tmp_path, monkeypatch):
    from smoe_fairseq.analysis import results

    monkeypatch.setattr(results, "write", no_room)
    given = ["analyze", str(data), "--path", str(by_hand), "--cpu", "--lang-pairs", "aa-bb"]
    with pytest.raises(SystemExit) as error:
        main([*given, "--output", str(tmp_path / "out")])
    words = f"error: --output {tmp_path / 'out'} cannot be saved: No space left on device"
    assert str(error.value).startswith(words) and not list(tmp_path.iterdir())


def bad_inputs(tmp_path):
    return {
        "--lang-pairs aa-dd": "--lang-pairs aa-dd: the model knows bb-aa, cc-aa",
        "--gen-subset test": "--gen-subset test: ",
        f"--output {tmp_path}": f"--output {tmp_path} exists already",
        f"--log {tmp_path}/none": f"--log {tmp_path}/none cannot be read",
        f"--log {__file__}": f"--log {__file__} has no routing metrics",
    }


@pytest.mark.parametrize("number", range(5))
def test_bad_input_gets_one_sentence(data, by_hand, tmp_path, number):
    flags, sentence = list(bad_inputs(tmp_path).items())[number]
    given = ["analyze", str(data), "--path", str(by_hand), "--output", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as error:
        main([*given, *flags.split(), "--cpu"])
    assert str(error.value).startswith(f"error: {sentence}") and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_bad_checkpoint_gets_one_sentence(data, tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    train(data, folder, *MULTILINGUAL, "--moe-freq", 0)
    dense = folder / "checkpoint_last.pt"
    (tmp_path / "text.pt").write_text("no checkpoint")
    for path, words in (
        (dense, "is a dense model: expected one with MoE layers"),
        (tmp_path / "text.pt", "is cut off or not a checkpoint"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none.pt", "is missing"),
    ):
        process = run(
            *("smoe", "analyze", data, "--path", path, "--output", tmp_path / "new", "--cpu"),
            check=False,
        )
        assert process.returncode == 1
        assert process.stdout.startswith(f"error: {path}") and words in process.stdout
        assert len(process.stdout.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def events_of(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_routing_metrics_reach_the_loggers(trained):
    blocks = [f"{side}.layer.{layer}" for side in ("encoder", "decoder") for layer in (1, 3)]
    names = {f"{block}/requested_capacity" for block in blocks}
    for metric in (
        "tokens",
        "load_max",
        "overflow_expert1",
        "overflow_expert2",
        "unused_expert1_count",
    ):
        names |= {f"{block}/stratum.{i}/{metric}" for block in blocks for i in range(4)}
    for tag in ("train_inner", "valid"):
        found = {name for name in events_of(trained.parent / "events" / tag) if "/" in name}
        fifths = {f"{block}/overflow_fifth{i}" for block in blocks for i in range(1, 6)}
        assert found == (
            names | fifths if tag == "train_inner" else names
        )  # where there is a limit
    series = training_log.read(trained.parent / "train.log")
    assert names <= series.keys() and set(series["requested_capacity"]) == {1, 2}
    shares = [series[f"encoder.layer.1/stratum.{i}/tokens"][2] for i in range(4)]
    assert shares[0] == 100
    mean = series["encoder.layer.1/requested_capacity"][2]
    assert sum(shares) / 100 == pytest.approx(mean, abs=0.003)


def test_console_lines_stay_short(data, tmp_path):
    command = training(data, tmp_path, *MULTILINGUAL, "--log-format", "simple")
    output = run(*command).stdout
    assert "requested_capacity=" in output and "encoder.layer.1/" not in output
    assert set(training_log.read(tmp_path / "train.log")["requested_capacity"]) == {1, 2}
    (tmp_path / "checkpoint_last.pt").unlink()
    program, *arguments = map(str, command)
    assert "encoder.layer.1/" in run_without("keep_lines_short", program, *arguments).stdout
