"""What ``smoe prune`` counts, and which experts stay by it: on models whose gates are known on paper."""

import math
import shutil
from collections import Counter
from pathlib import Path

import handmade
import pytest
from commands import changed
from sampling import soak
from test_analyze import words_on
from test_expert_parallel_checkpoints import call
from test_prune import SIDES, kept_of, prune, strata_of


@pytest.fixture(scope="module")
def by_hand(gates_by_hand, tmp_path_factory) -> Path:
    """Gates of 2-2-2-2 as on paper, with layer norms that scale nothing."""

    def change(state):
        for name, weight in state["model"].items():
            if ".moe.layer_norms." in name:
                weight.fill_(float(name.endswith("weight")))

    return changed(gates_by_hand, tmp_path_factory.mktemp("by-hand") / "by_hand.pt", change)


def importance(direction: str, side: str) -> list[float]:
    """Of each expert on paper, by the routes.

    Of 16 components, normalised, the one of a token's class stands out; a gate reads those of the classes
    that have a route there.
    """
    high, low = math.sqrt(15), -1 / math.sqrt(15)
    tokens, firsts, confidence = 0, Counter(), Counter()
    for word, count in words_on(direction, side).items():
        tokens += count
        own = handmade.SPECIAL if word == "special" else handmade.class_of(word)
        for stratum, expert in handmade.ROUTES[own].items():
            logits = dict.fromkeys(range(2 * stratum, 8), 0.0)
            for kind, route in handmade.ROUTES.items():
                if stratum in route:
                    logits[route[stratum]] += high if kind == own else low
            firsts[expert] += count
            confidence[expert] += count * math.exp(high) / sum(map(math.exp, logits.values()))
    return [firsts[e] / tokens * math.exp(confidence[e] / max(firsts[e], 1)) for e in range(8)]


def best(importance: list[float], number: int) -> list[int]:
    """Experts 6 and 7, which the last gate chooses between, and the best others."""
    others = sorted(range(6), key=lambda expert: -importance[expert])
    return sorted([*others[: max(number - 2, 0)], 6, 7])


@pytest.mark.soak
def test_the_most_important_experts_stay(three_languages, by_hand, tmp_path):
    directions = ("aa-bb", "cc-aa")
    for eighths in (1, 4, 5, 7):
        output = tmp_path / f"{eighths}.pt"
        words = ("--keep", eighths / 8, "--lang-pairs", ",".join(directions), "--max-tokens", 60)
        call("prune", by_hand, three_languages, *words, "--cpu", "--output", output)
        for side, strata in zip(SIDES, strata_of(output), strict=True):
            scores = map(sum, zip(*(importance(d, side) for d in directions), strict=True))
            kept = best(list(scores), eighths)
            sizes = [sum(e // 2 == stratum for e in kept) for stratum in range(4)]
            assert strata.split(",") == 2 * ["-".join(map(str, sizes))]


@pytest.mark.soak
def test_over_all_layers_the_best_of_all_stay(three_languages, by_hand, tmp_path):
    """Both layers of a side have the same routes, so that they stay the same, and the sides do not."""
    direction, differ = "aa-bb", 0
    scores = {side: importance(direction, side) for side in SIDES}
    others = sorted(((scores[side][e], side) for side in SIDES for e in range(6)), reverse=True)
    for more in (0, 3, 8, 12):
        output, share = tmp_path / f"{more}.pt", (8 + 2 * more) / 32
        words = ("--keep", share, "--over", "all", "--lang-pairs", direction)
        call("prune", by_hand, three_languages, *words, "--cpu", "--output", output)
        numbers = [2 + sum(side == s for _, s in others[:more]) for side in SIDES]
        differ += numbers[0] != numbers[1]
        found = [strata.split(",") for strata in strata_of(output)]
        for number, layers, side in zip(numbers, found, SIDES, strict=True):
            kept = best(scores[side], number)
            assert layers[0] == layers[1]
            assert layers[0] == "-".join(str(sum(e // 2 == s for e in kept)) for s in range(4))
    assert differ


@pytest.fixture
def by_language(multilingual, tmp_path, monkeypatch) -> Path:
    """Switch gates by which each language goes another way."""
    monkeypatch.setattr(handmade, "class_of", lambda word: "abc".index(word[0]))
    shutil.copy(multilingual, tmp_path / "trained.pt")
    path = handmade.fix_gates(tmp_path / "trained.pt", handmade.symbols(3))

    def change(state):
        state["cfg"]["model"]["moe_top_k"] = 1

    return changed(path, path, change)


LANGUAGE = {"aa": {7}, "bb": {1, 4, 6}, "cc": {0, 3, 5, 7}}
SPECIAL = {2, 6}


@pytest.mark.parametrize("pairs", ["aa-bb,cc-aa", soak(None)])
def test_what_any_direction_uses_stays(three_languages, by_language, tmp_path, pairs):
    pruned = tmp_path / "pruned.pt"
    words = ("--lang-pairs", pairs) if pairs else ()
    printed = prune(three_languages, by_language, pruned, "--min-load", 0, *words)
    directions = pairs.split(",") if pairs else handmade.DIRECTIONS
    assert f"choices were counted over valid of {', '.join(directions)}" in printed
    kept = kept_of(printed)
    for place, side in enumerate(SIDES):
        languages = {direction.split("-")[place] for direction in directions}
        used = set.union(SPECIAL, *(LANGUAGE[language] for language in languages))
        for layer in (1, 3):
            # One in the last stratum would do; two of it are on all ways here.
            assert kept[f"{side} layer {layer}"] == sorted(used)


@pytest.mark.soak
def test_a_load_is_that_of_the_direction_where_it_is_highest(
    three_languages, by_language, tmp_path
):
    """What only cc uses has in cc-aa a load that it has not in both directions together."""
    printed = {}
    for pairs in ("cc-aa", "cc-aa,aa-bb"):
        words = ("--min-load", 0.6, "--lang-pairs", pairs, "--force")
        printed[pairs] = kept_of(prune(three_languages, by_language, tmp_path / "p.pt", *words))
    one, both = (kept["encoder layer 1"] for kept in printed.values())
    assert {0, 3, 5, 7} <= {*one} <= {*both}
