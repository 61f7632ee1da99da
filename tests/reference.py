"""Section 3 of the paper in plain loops over tokens; shares no code with the package.

Slow and simple on purpose. `params` is the state dict of a block, in float64.
"""

import math

import torch


def ffn(params, expert, x):
    h = params["experts.w1"][expert] @ x + params["experts.b1"][expert]
    return params["experts.w2"][expert] @ torch.relu(h) + params["experts.b2"][expert]


def layer_norm(params, index, x):
    centred = x - x.mean()
    normed = centred / torch.sqrt((centred * centred).mean() + 1e-5)
    return normed * params[f"layer_norms.{index}.weight"] + params[f"layer_norms.{index}.bias"]


def softmax(logits):
    largest = max(logits)
    powers = [math.e ** (value - largest) for value in logits]
    total = sum(powers)
    return [power / total for power in powers]


def run_gate(params, i, inputs, top_k, normalization, capacity_factor, drop_order):
    """Route the inputs of gate i; its experts are numbered from 0 here.

    Capacity is given in the order of the inputs ("sentence") or from the highest score on ("score").

    Returns the kept (expert, weight) pairs of each token, first choices, balance loss, dropped copies.
    """
    gate = params[f"gates.{i}.weight"]
    num_experts = gate.shape[0]
    capacity = math.inf
    if capacity_factor:
        capacity = math.ceil(capacity_factor * len(inputs) / num_experts)
    scores = [softmax([row @ x for row in gate]) for x in inputs]
    chosen = [sorted(range(num_experts), key=lambda e, s=s: -s[e])[:top_k] for s in scores]
    weights = [[s[e] for e in experts] for s, experts in zip(scores, chosen)]
    if normalization == "before-drop" and top_k == 2:
        weights = [[w / sum(pair) for w in pair] for pair in weights]

    order = list(range(len(inputs)))
    if drop_order == "score":
        order.sort(key=lambda t: -max(scores[t]))
    load = [0] * num_experts
    kept = [[] for _ in inputs]
    dropped = set()
    for k in range(top_k):
        for t in order:
            expert = chosen[t][k]
            if load[expert] < capacity:
                load[expert] += 1
                kept[t].append((expert, weights[t][k]))
            else:
                dropped.add((t, k))
    if normalization == "after-drop" and top_k == 2:
        kept = [[(e, w / sum(w for _, w in pairs)) for e, w in pairs] for pairs in kept]

    loss = torch.zeros((), dtype=torch.float64)
    first = [experts[0] for experts in chosen]
    for e in range(num_experts if inputs else 0):
        fraction = first.count(e) / len(inputs)
        loss = loss + num_experts * fraction * sum(s[e] for s in scores) / len(inputs)
    return kept, first, loss, dropped


def reference(
    params,
    strata,
    x,
    padding,
    top_k=2,
    normalization="after-drop",
    capacity_factor=0,
    stacked=False,
    drop_order="sentence",
    norms="paper",
):
    """x (T, D), padding (T,).

    Returns y, balance loss, requested capacity, dropped {(stratum, t, k)}, tokens of each stratum.
    """
    sizes = [int(size) for size in strata.split("-")]
    num_strata = len(sizes)
    home = [i for i, size in enumerate(sizes) for _ in range(size)]
    released = norms == "released" and num_strata > 1
    state = [row for row in x]
    if stacked:
        state = [layer_norm(params, 0, row) for row in x]
    place = [num_strata if pad else 0 for pad in padding.tolist()]
    requested = [0] * len(place)
    losses, dropped, visits = [], set(), []

    for i in range(num_strata):
        offset = sum(sizes[:i])
        tokens = [t for t in range(len(place)) if place[t] == i]
        inputs = [state[t] if stacked else layer_norm(params, i, state[t]) for t in tokens]
        kept, first, loss, lost = run_gate(
            params, i, inputs, top_k, normalization, capacity_factor, drop_order
        )
        losses.append(loss)
        visits.append(tokens)
        dropped |= {(i, tokens[t], k) for t, k in lost}
        for t, h, pairs, best in zip(tokens, inputs, kept, first):
            mixed = torch.zeros_like(h)
            for expert, weight in pairs:
                mixed = mixed + weight * ffn(params, offset + expert, h)
            residual = h if released and i > 0 else state[t]
            state[t] = mixed if stacked else residual + mixed
            requested[t] += 1
            place[t] = i + 1 if stacked else home[offset + best] + 1

    if stacked:
        state = [row if pad else row + s for row, s, pad in zip(x, state, padding.tolist())]
    if released:
        state = [
            row if pad else layer_norm(params, num_strata, row)
            for row, pad in zip(state, padding.tolist())
        ]
    loss = sum(losses) / num_strata
    return torch.stack(state), loss, torch.tensor(requested), dropped, visits
