"""Gates in plain loops; share no code with the package. Of the gate ``i`` of a block with ``params``.

Each returns, for inputs that are token vectors: scores by expert, null ones last; the experts that each token
asks for, best first, with their weights; the expert that decides where it goes next.
"""

import functools
import math
from fractions import Fraction
from itertools import zip_longest

import torch


def softmax(logits):
    largest = max(logits)
    powers = [math.e ** (value - largest) for value in logits]
    total = sum(powers)
    return [power / total for power in powers]


def logits_of(params, i, inputs, earlier=None):
    """``earlier``: of each input, logits of another gate, the last for the experts of this one."""
    rows = list(params[f"gates.{i}.weight"])
    rows += list(params.get(f"gates.{i}.simple_weight", []))
    rows += list(params.get(f"gates.{i}.null_weight", []))
    logits = [torch.stack([row @ x for row in rows]) for x in inputs]
    if earlier is None or f"gates.{i}.residual_weight" not in params:
        return logits
    matrix = params[f"gates.{i}.residual_weight"]
    return [own + matrix @ other[-len(rows) :] for own, other in zip(logits, earlier)]


def scores_of(params, i, inputs, earlier=None):
    """Of logits that an exit bias has raised: those of experts in later strata."""
    rows = logits_of(params, i, inputs, earlier)
    raised = params["raised"][i]
    return [softmax([z + r for z, r in zip_longest(row, raised, fillvalue=0)]) for row in rows]


def best(scores, number):
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:number]


def top_k(params, i, inputs, number, experts, bias, earlier):
    """Null experts are asked for with weight 0, constant ones and copies, which come before them, not."""
    weighing = experts + len(params.get(f"gates.{i}.simple_weight", []))
    scores = scores_of(params, i, inputs, earlier)
    biased = [[s.item() + b for s, b in zip(row, bias or [0] * len(row))] for row in scores]
    asked = [best(row, number) for row in biased]
    weights = [[s[e] if e < weighing else 0 for e in a] for s, a in zip(scores, asked)]
    first = [best(row[:experts], 1)[0] for row in biased]
    return scores, asked, weights, first


def sigmoid(params, i, inputs, number, bias):
    """Chosen by ``s + b``, weighted by ``s``; what the loss averages sums to 1."""
    asked, weights, scores = [], [], []
    for x in inputs:
        s = [1 / (1 + torch.exp(-(row @ x))) for row in params[f"gates.{i}.weight"]]
        chosen = best([v.item() + b for v, b in zip(s, bias or [0] * len(s))], number)
        asked.append(chosen)
        weights.append([s[e] for e in chosen])
        scores.append([v / sum(s) for v in s])
    return scores, asked, weights, [a[0] for a in asked]


def relu(params, i, inputs):
    """Every expert of a logit above 0, weighted by it."""
    logits = [[row @ x for row in params[f"gates.{i}.weight"]] for x in inputs]
    asked = [[e for e in best(row, len(row)) if row[e] > 0] for row in logits]
    weights = [[row[e] for e in a] for row, a in zip(logits, asked)]
    return scores_of(params, i, inputs), asked, weights, [best(row, 1)[0] for row in logits]


def relu_l1(params, i, inputs, goal):
    """``sum_e f_e mean(g_e)`` with ``f_e = E / (k T) #{g_te > 0}``."""
    experts = len(params[f"gates.{i}.weight"])
    total = 0
    for e in range(experts):
        g = [torch.relu(params[f"gates.{i}.weight"][e] @ x) for x in inputs]
        busy = sum(value > 0 for value in g)
        total += experts * busy / (goal * len(inputs)) * sum(g) / len(inputs)
    return total


def threshold(params, i, inputs):
    """Every expert whose threshold the logit exceeds, the one that it exceeds by most first."""
    thresholds = params[f"gates.{i}.thresholds"]
    logits = [[row @ x for row in params[f"gates.{i}.weight"]] for x in inputs]
    margins = [[s - c for s, c in zip(row, thresholds)] for row in logits]
    asked = [[e for e in best(row, len(row)) if row[e] > 0] for row in margins]
    weights = [[1 / (1 + torch.exp(-row[e])) for e in a] for row, a in zip(logits, asked)]
    return scores_of(params, i, inputs), asked, weights, [best(row, 1)[0] for row in margins]


def score_of_rank(scores, number, goal):
    """Of the tokens' scores for one expert among ``number``, the one that ``k T / E`` are above."""
    rank = round(goal * len(scores) / number)
    return sorted(scores, reverse=True)[rank] if rank < len(scores) else -(2.0**15)


def top_p(params, i, inputs, p):
    scores = scores_of(params, i, inputs)
    asked = []
    for row in scores:
        number, total = 0, 0
        while total < p and number < len(row):
            number += 1
            total = sum(row[e].item() for e in best(row, number))
        asked.append(best(row, number))
    weights = [[s[e] for e in a] for s, a in zip(scores, asked)]
    return scores, asked, weights, [a[0] for a in asked]


def hashed(table, ids, experts):
    asked = [[int(table[i])] for i in ids]
    one = torch.ones((), dtype=torch.float64)
    scores = [[one if e == a[0] else 0 * one for e in range(experts)] for a in asked]
    return scores, asked, [[one] for _ in asked], [a[0] for a in asked]


def hashed_first(params, i, inputs, first, number):
    """The given expert, then those of highest score among the others."""
    scores = scores_of(params, i, inputs)
    asked = []
    for row, given in zip(scores, first):
        others = [e for e in best(row, len(row)) if e != given]
        asked.append([given, *others[: number - 1]])
    return scores, asked, [[s[e] for e in a] for s, a in zip(scores, asked)], first


def base(params, i, inputs, training):
    affinities = [[row @ x for row in params[f"gates.{i}.weight"]] for x in inputs]
    plain = [[a.item() for a in row] for row in affinities]
    chosen = best_balanced(plain) if training else [best(row, 1)[0] for row in plain]
    weights = [[1 / (1 + torch.exp(-row[e]))] for row, e in zip(affinities, chosen)]
    return [softmax(row) for row in affinities], [[e] for e in chosen], weights, chosen


def best_balanced(affinities):
    """The best of all balanced assignments, by trying for each token every expert with room."""
    tokens, experts = len(affinities), len(affinities[0]) if affinities else 0
    if not tokens:
        return []
    most, larger = -(-tokens // experts), tokens % experts or experts  # experts that may have most

    @functools.cache
    def rest(t, loads):
        if t == tokens:
            return 0.0, ()
        found = (-math.inf, ())
        for e in range(experts):
            load = loads[e] + 1
            if load > most or (load == most and sum(n == most for n in loads) == larger):
                continue
            value, others = rest(t + 1, (*loads[:e], load, *loads[e + 1 :]))
            found = max(found, (affinities[t][e] + value, (e, *others)))
        return found

    return list(rest(0, (0,) * experts)[1])


def depths(params, i, inputs, sentences, factor):
    """In training the best tokens of each sentence, else (without sentences) those above the thresholds."""
    weight, thresholds = params[f"gates.{i}.weight"], params[f"gates.{i}.thresholds"]
    logits = [[row @ x for row in weight] for x in inputs]
    if sentences:
        taken = best_of_sentences(logits, len(weight), sentences, factor)
    else:
        taken = [[e for e, s in enumerate(row) if s > thresholds[e]] for row in logits]
    weights = [[row[e] for e in a] for row, a in zip(logits, taken)]
    first = [max(a or [0], key=lambda e: row[e].item()) for row, a in zip(logits, taken)]
    return scores_of(params, i, inputs), taken, weights, first


def best_of_sentences(scores, experts, sentences, factor):
    """Each expert takes the ``ceil(factor T / E)`` best tokens of each sentence."""
    taken = [[] for _ in scores]
    for sentence in set(sentences):
        members = [t for t, s in enumerate(sentences) if s == sentence]
        number = math.ceil(Fraction(str(factor)) * len(members) / experts)
        for e in range(experts):
            members.sort(key=lambda t: -scores[t][e].item())
            for t in members[:number]:
                taken[t].append(e)
    return taken


def expert_choice(params, i, inputs, sentences, factor):
    """Experts take the tokens of each sentence by themselves; of one in training."""
    scores = scores_of(params, i, inputs)
    experts = params[f"gates.{i}.weight"].shape[0]
    taken = best_of_sentences(scores, experts, sentences, factor)
    weights = [[s[e] for e in a] for s, a in zip(scores, taken)]
    first = [max(a or range(experts), key=lambda e: s[e].item()) for s, a in zip(scores, taken)]
    return scores, taken, weights, first
