"""The routing metrics of each layer: in TensorBoard and in the log, not on the console."""

from pathlib import Path

import pytest
from commands import run
from handmade import MULTILINGUAL, training

from smoe_fairseq.analysis import training_log


def events_of(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_routing_metrics_reach_the_loggers(multilingual):
    blocks = [f"{side}.layer.{layer}" for side in ("encoder", "decoder") for layer in (1, 3)]
    names = {f"{block}/requested_capacity" for block in blocks}
    metrics = "tokens load_max experts_per_token overflow_expert1 overflow_expert2"
    for metric in f"{metrics} unused_expert1_count".split():
        names |= {f"{block}/stratum.{i}/{metric}" for block in blocks for i in range(4)}
    for tag in ("train_inner", "valid"):
        found = {name for name in events_of(multilingual.parent / "events" / tag) if "/" in name}
        assert found == names
    series = training_log.read(multilingual.parent / "train.log")
    assert names <= series.keys() and set(series["requested_capacity"]) == {1, 2}
    shares = [series[f"encoder.layer.1/stratum.{i}/tokens"][2] for i in range(4)]
    assert shares[0] == 100
    mean = series["encoder.layer.1/requested_capacity"][2]
    assert sum(shares) / 100 == pytest.approx(mean, abs=0.003)


def test_console_lines_stay_short(three_languages, tmp_path):
    command = training(three_languages, tmp_path, *MULTILINGUAL, "--log-format", "simple")
    output = run(*command).stdout
    assert "requested_capacity=" in output and "encoder.layer.1/" not in output
    assert set(training_log.read(tmp_path / "train.log")["requested_capacity"]) == {1, 2}
