"""Section 3 of the paper in plain loops over tokens; shares no code with the package.

Slow and simple on purpose. `params` is the state dict of a block, in float64.
"""

import math
from fractions import Fraction

import reference_gates as gates
import torch


def activated(params, h):
    """With a gated activation, the second half of the numbers times the activated first half."""
    gated = params.get("gated")
    if gated is None:
        return torch.relu(h)
    half = len(h) // 2
    gate = {
        "swiglu": h[:half] * torch.sigmoid(h[:half]),
        "geglu": h[:half] * (1 + torch.erf(h[:half] / math.sqrt(2))) / 2,
        "reglu": torch.relu(h[:half]),
    }[gated]
    return gate * h[half:]


def ffn(params, expert, x):
    h = params["experts.w1"][expert] @ x + params["experts.b1"][expert]
    return params["experts.w2"][expert] @ activated(params, h) + params["experts.b2"][expert]


def layer_norm(params, index, x):
    centred = x - x.mean()
    normed = centred / torch.sqrt((centred * centred).mean() + 1e-5)
    return normed * params[f"layer_norms.{index}.weight"] + params[f"layer_norms.{index}.bias"]


def network(params, name, x):
    h = activated(params, params[f"{name}.fc1.weight"] @ x + params[f"{name}.fc1.bias"])
    return params[f"{name}.fc2.weight"] @ h + params[f"{name}.fc2.bias"]


def simple_expert(params, number, x):
    """Constant experts, then copies."""
    if number >= len(params.get("simple.constant", [])):
        return x
    of_x, of_v = gates.softmax(
        [row @ x for row in params["simple.mix"][2 * number : 2 * number + 2]]
    )
    return of_x * x + of_v * params["simple.constant"][number]


def ask(params, i, inputs, tokens, options):
    """What gate i answers to these inputs, which are the block's ``tokens``: see reference_gates.py."""
    gate, experts = options["gate"], options["visible"][i]
    if gate == "hash":
        return gates.hashed(params["gates.0.table"], [options["ids"][t] for t in tokens], experts)
    if gate == "hash-topk":
        first = [int(params["gates.0.table"][options["ids"][t]]) for t in tokens]
        return gates.hashed_first(params, i, inputs, first, options["top_k"])
    if gate == "base":
        return gates.base(params, i, inputs, options["training"])
    if gate == "expert-choice":
        sentences = [0 if options["training"] else options["sentences"][t] for t in tokens]
        return gates.expert_choice(params, i, inputs, sentences, options["factor"])
    if gate == "depths":
        sentences = options["training"] and [options["sentences"][t] for t in tokens]
        return gates.depths(params, i, inputs, sentences, options["factor"])
    if gate == "top-p":
        return gates.top_p(params, i, inputs, options["top_p"])
    if gate == "threshold":
        return gates.threshold(params, i, inputs)
    if gate == "relu":
        return gates.relu(params, i, inputs)
    bias = options["bias"] and options["bias"][i]
    if options["scores"] == "sigmoid":
        return gates.sigmoid(params, i, inputs, options["top_k"], bias)
    earlier = options["earlier"] and [options["earlier"][t] for t in tokens]
    return gates.top_k(params, i, inputs, options["top_k"], experts, bias, earlier)


def run_gate(params, i, inputs, tokens, options):
    """Route the inputs of gate i; its experts are numbered from 0 here.

    Capacity is given in the order of the inputs ("sentence") or from the highest score on ("score").

    Returns the kept (expert, weight) pairs of each token, first choices, balance loss, dropped copies.
    """
    num_experts, normalization = options["visible"][i], options["normalization"]
    capacity = math.inf
    if options["capacity_factor"] and options["gate"] in (
        *("topk", "hash-topk", "top-p", "relu", "threshold"),
    ):
        capacity = math.ceil(Fraction(str(options["capacity_factor"])) * len(inputs) / num_experts)
    scores, chosen, weights, first = ask(params, i, inputs, tokens, options)
    normalizes = options["gate"] in ("topk", "hash-topk") and options["top_k"] > 1
    if normalizes and normalization == "before-drop":
        weights = [[w / (sum(row) or 1) for w in row] for row in weights]

    order = list(range(len(inputs)))
    if options["drop_order"] == "score":
        order.sort(key=lambda t: -max(scores[t][:num_experts]))
    load = [0] * num_experts
    kept = [[] for _ in inputs]
    simple = len(params.get(f"gates.{i}.simple_weight", []))
    dropped = set()
    for k in range(max(map(len, chosen), default=0)):
        for t in order:
            if k >= len(chosen[t]) or chosen[t][k] >= num_experts + simple:  # a null expert
                continue
            expert = chosen[t][k]
            if expert >= num_experts:
                kept[t].append((expert, weights[t][k]))
            elif load[expert] < capacity:
                load[expert] += 1
                kept[t].append((expert, weights[t][k]))
            else:
                dropped.add((t, k))
    if normalizes and normalization == "after-drop":
        kept = [[(e, w / sum(w for _, w in pairs)) for e, w in pairs] for pairs in kept]
    loss = gate_loss(scores, chosen, first, num_experts, options["copies"], simple)
    return kept, first, loss, dropped


def gate_loss(scores, chosen, first, num_experts, copies=0, simple=0):
    """By first choices or, with free experts, by all, of which null ones have the same, and copies."""
    loss = torch.zeros((), dtype=torch.float64)
    if not scores:
        return loss
    columns = len(scores[0])
    counts = [first.count(e) for e in range(columns)]
    if columns > num_experts:
        asked = [e for row in chosen for e in row]
        counts = [asked.count(e) for e in range(columns)]
        end = num_experts + simple
        for alike in (range(end - copies, end), range(end, columns)):
            mean = sum(counts[e] for e in alike) / max(len(alike), 1)
            for e in alike:
                counts[e] = mean
    for e in range(columns):
        mean = sum(s[e] for s in scores) / len(scores)
        loss = loss + columns * counts[e] / sum(counts) * mean
    return loss


DEFAULTS = {
    **{"gate": "topk", "top_k": 2, "normalization": "after-drop", "capacity_factor": 0},
    **{"stacked": False, "chain": 1, "drop_order": "sentence", "norms": "paper", "gated": None},
    **{"scores": "softmax", "copies": 0, "top_p": 0.4, "factor": 2.0, "training": True},
    # Of each gate a bias per expert; of each token its id and sentence, and the logits of another layer's
    # gate, which gates with a residual add.
    **{"exit_bias": 0, "bias": None, "ids": None, "sentences": None, "earlier": None},
}


def reference(params, strata, x, padding, **options):
    """x (T, D), padding (T,); options as in `DEFAULTS`.

    Returns y, balance loss, requested capacity, dropped {(stratum, t, k)}, and of each stratum the first
    choices of its tokens and the number of copies that they choose.
    """
    assert options.keys() <= DEFAULTS.keys()
    options = {**DEFAULTS, **options}
    stacked, chain, earlier = (options[name] for name in ("stacked", "chain", "earlier"))
    sizes = [int(size) for size in strata.split("-")]
    num_strata = max(len(sizes), chain)
    fixed = stacked or chain > 1  # all tokens go from each gate to the next
    home = [i for i, size in enumerate(sizes) for _ in range(size)]
    released = options["norms"] == "released"
    ahead = [sum(sizes[i : i + 1] if stacked else sizes[i:]) for i in range(num_strata)]
    ahead = [sum(sizes)] * chain if chain > 1 else ahead
    exit_bias = 0 if options["training"] else options["exit_bias"]
    later = [[exit_bias * (s > i) for s in home if s >= i][:n] for i, n in enumerate(ahead)]
    params = {**params, "gated": options["gated"], "raised": later}
    options["visible"] = ahead
    state = [row for row in x]
    if stacked:
        state = [layer_norm(params, 0, row) for row in x]
    place = [num_strata if pad else 0 for pad in padding.tolist()]
    requested = [0] * len(place)
    losses, dropped, firsts, copies = [], set(), [], []

    for i in range(num_strata):
        offset = sum(sizes[:i]) if chain == 1 else 0
        tokens = [t for t in range(len(place)) if place[t] == i]
        inputs = [state[t] if stacked else layer_norm(params, i, state[t]) for t in tokens]
        options["earlier"] = earlier
        kept, first, loss, lost = run_gate(params, i, inputs, tokens, options)
        firsts.append([offset + expert for expert in first])
        copies.append(len(lost) + sum(expert < ahead[i] for pairs in kept for expert, _ in pairs))
        if earlier is not None:
            seen = [earlier[t] for t in tokens]
            earlier = list(earlier)
            for t, row in zip(tokens, gates.logits_of(params, i, inputs, seen)):
                unseen = row.new_zeros(len(earlier[t]) - len(row))
                earlier[t] = torch.cat([unseen, row])
        losses.append(loss)
        dropped |= {(i, tokens[t], k) for t, k in lost}
        for t, h, pairs, best in zip(tokens, inputs, kept, first):
            mixed = torch.zeros_like(h)
            for expert, weight in pairs:
                out = simple_expert(params, expert - ahead[i], h) if expert >= ahead[i] else None
                mixed = mixed + weight * (ffn(params, offset + expert, h) if out is None else out)
            if "shared.fc1.weight" in params:
                mixed = mixed + network(params, "shared", h)
            if "cmr.fc1.weight" in params:
                share = 1 / (1 + torch.exp(-(params["cmr.gate.weight"][0] @ h)))
                mixed = share * mixed + (1 - share) * network(params, "cmr", h)
            if "residual.fc1.weight" in params:
                logits = params["residual.mix.weight"] @ h + params["residual.mix.bias"]
                moe, own = gates.softmax(list(logits))
                mixed = moe * mixed + own * network(params, "residual", h)
            residual = h if released and i > 0 else state[t]
            state[t] = mixed if stacked else residual + mixed
            requested[t] += 1
            place[t] = i + 1 if fixed else home[offset + best] + 1

    if stacked:
        state = [row if pad else row + s for row, s, pad in zip(x, state, padding.tolist())]
    if released:
        state = [
            row if pad else layer_norm(params, num_strata, row)
            for row, pad in zip(state, padding.tolist())
        ]
    loss = sum(losses) / num_strata
    return torch.stack(state), loss, torch.tensor(requested), dropped, firsts, copies
