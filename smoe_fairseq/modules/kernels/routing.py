"""Kernels before the experts: layer norm, choice, places within experts, rows. Shapes: see the package."""

import triton
import triton.language as tl


@triton.jit
def _moments(rows_T, live_T, EPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mean and reciprocal standard deviation of the rows at these addresses."""
    total_T = tl.zeros([rows_T.shape[0]], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(rows_T[:, None] + d[None, :], live_T[:, None] & (d < D)[None, :], 0.0)
        total_T += tl.sum(x.to(tl.float32), 1)
    mean_T = total_T / D
    square_T = mean_T * 0
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = live_T[:, None] & (d < D)[None, :]
        x = tl.load(rows_T[:, None] + d[None, :], inside, 0.0).to(tl.float32)
        x = tl.where(inside, x - mean_T[:, None], 0.0)
        square_T += tl.sum(x * x, 1)
    return mean_T, 1 / tl.sqrt(square_T / D + EPS)


@triton.jit
def normed(
    rows_T, d, live_T, mean_T, scale_T, norm_weight, norm_bias, D: tl.constexpr, ROUND: tl.constexpr
):
    """Columns ``d`` of the layer norm of rows; with ``ROUND`` rounded to their type."""
    inside = live_T[:, None] & (d < D)[None, :]
    x = tl.load(rows_T[:, None] + d[None, :], inside, 0.0)
    h = (x.to(tl.float32) - mean_T[:, None]) * scale_T[:, None]
    weight = tl.load(norm_weight + d, d < D, 0.0).to(tl.float32)
    bias = tl.load(norm_bias + d, d < D, 0.0).to(tl.float32)
    h = h * weight[None, :] + bias[None, :]
    if ROUND:
        h = h.to(x.dtype).to(tl.float32)
    return h


@triton.jit
def _column(x_TK, k: tl.constexpr, BLOCK_K: tl.constexpr):
    """Column ``k`` of a tile."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_K)[None, :] == k, x_TK, 0), 1)


@triton.jit
def _of_expert(value_E, index_TK, BLOCK_E: tl.constexpr):
    """``value[index]``."""
    e = tl.arange(0, BLOCK_E)
    return tl.sum(tl.where(index_TK[:, :, None] == e[None, None, :], value_E[None, None, :], 0), 2)


@triton.jit
def _kept(total_KE, E, LIMIT: tl.constexpr, OVER: tl.constexpr):
    """Number of tokens, capacity of an expert, and number of copies that each expert keeps.

    The capacity factor is the ratio ``LIMIT / OVER``, which is exact; 0: no limit.
    """
    k = tl.arange(0, total_KE.shape[0])
    tokens = tl.sum(tl.where(k[:, None] == 0, total_KE, 0))
    total_E = tl.sum(total_KE, 0)
    most = tokens * total_KE.shape[0]
    if LIMIT > 0:
        share = (most.to(tl.int64) * 0 + E) * OVER
        limit = (tokens.to(tl.int64) * LIMIT + share - 1) // share
        most = tl.minimum(limit, most.to(tl.int64)).to(tl.int32)
    return tokens, most, tl.minimum(total_E, most)


@triton.jit
def probabilities(x_TE, E, BLOCK_E: tl.constexpr):
    """The softmax of the first E columns, their maximum, and the denominator."""
    x_TE = tl.where((tl.arange(0, BLOCK_E) < E)[None, :], x_TE, -float("inf"))
    most_T = tl.max(x_TE, 1)
    p = tl.exp(x_TE - most_T[:, None])
    total_T = tl.sum(p, 1)
    return p / total_T[:, None], most_T, total_T


@triton.jit
def _choose(
    p, seed, at_T, stratum, E, K: tl.constexpr, POLICY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The K experts of highest probability, or drawn after the first, and their probabilities."""
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    # Compiled, argmax could choose a column behind E in a row of NaN, whose token chooses the first experts.
    safe = tl.where(p == p, p, 0.0)
    score = tl.where((e < E)[None, :], safe, -1.0)
    choice_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    weight_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for i in tl.static_range(K):
        if i == 1 and POLICY == "sampling":  # argmax(p / Exponential) draws in proportion to p
            drawn = tl.rand(tl.load(seed) + 4 * stratum, at_T[:, None] * BLOCK_E + e[None, :])
            noise = tl.maximum(-tl.log(1 - drawn), 1e-30)
            score = tl.where(score < 0, score, safe / noise)
        best = tl.minimum(tl.argmax(score, 1), E - 1)
        is_best = e[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_best, p, 0.0), 1)
        choice_TK = tl.where((k == i)[None, :], best[:, None], choice_TK)
        weight_TK = tl.where((k == i)[None, :], weight[:, None], weight_TK)
        score = tl.where(is_best, -1.0, score)
    return choice_TK, weight_TK


@triton.jit(do_not_specialize=["tokens", "stratum", "E"])
def route(
    x, padding, norm_weight, norm_bias, gate_weight, seed,
    positions, moments, logits, choices, weights, counts, sums,
    tokens, stratum, E,
    EPS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    STRATA: tl.constexpr, FIRST: tl.constexpr, PADDED: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    POLICY: tl.constexpr, BEFORE: tl.constexpr,
    GATE_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Layer norm, logits, each token's choices, and the number of choices per expert and block of tokens.

    A choice that is not sampled is stored as -1 minus its expert.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = t < tokens
    at = stratum * tokens + t
    if FIRST:
        live = inside
        if PADDED:
            live = live & (tl.load(padding + t, inside, 1) == 0)
        tl.store(positions + t, tl.where(live, 0, STRATA), inside)
        rows = x + t.to(tl.int64) * D
    else:
        live = tl.load(positions + at, inside, -1) == stratum
        rows = x + (at - tokens).to(tl.int64) * D
    mean, scale = _moments(rows, live, EPS, D, GATE_D)
    tl.store(moments + at * 2, mean, live)
    tl.store(moments + at * 2 + 1, scale, live)
    x_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, D, GATE_D):
        d = start + tl.arange(0, GATE_D)
        h = normed(rows, d, live, mean, scale, norm_weight, norm_bias, D, ROUND)
        seen = (d < D)[:, None] & (e < E)[None, :]
        w = tl.load(gate_weight + e[None, :] * D + d[:, None], seen, 0.0)
        x_TE += tl.dot(h, w.to(tl.float32), input_precision="ieee" if EXACT else "tf32")
    tl.store(logits + at[:, None] * COLUMNS + e[None, :], x_TE, live[:, None] & (e < E)[None, :])
    p, most, total = probabilities(x_TE, E, BLOCK_E)
    choice_TK, weight_TK = _choose(p, seed, at, stratum, E, K, POLICY, BLOCK_T, BLOCK_E, BLOCK_K)
    valid = live[:, None] & (k < K)[None, :]
    if POLICY == "random":
        drawn = tl.rand(tl.load(seed) + 4 * stratum, at[:, None] * BLOCK_K + k[None, :])
        share = weight_TK
        if BEFORE:
            share = share / tl.maximum(tl.sum(share, 1), 1.1754944e-38)[:, None]
        valid = valid & ((k == 0)[None, :] | (drawn < 2 * share))
    mine = at[:, None] * K + k[None, :]
    real = inside[:, None] & (k < K)[None, :]
    tl.store(choices + mine, tl.where(valid, choice_TK, -1 - choice_TK), real)
    tl.store(weights + mine, weight_TK, real)
    chosen = (choice_TK[:, :, None] == e[None, None, :]) & valid[:, :, None]
    to = counts + (k[:, None] * blocks + block) * COLUMNS + e[None, :]
    tl.store(to, tl.sum(chosen.to(tl.int32), 0), (k < K)[:, None] & (e < E)[None, :])
    to = sums + block * (COLUMNS + 1)
    tl.store(to + e, tl.sum(tl.where(live[:, None], p, 0.0), 0), e < E)
    log = most + tl.log(total)
    tl.store(to + COLUMNS, tl.sum(tl.where(live, log * log, 0.0), 0))


@triton.jit(do_not_specialize=["blocks", "stratum"])
def scan(
    counts, sums, totals, means, blocks, stratum,
    K: tl.constexpr, COLUMNS: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Replaces an expert's counts by the number of copies before each block, and adds up the sums."""
    e, lane = tl.program_id(0), tl.arange(0, SCANNED)
    if e < tl.num_programs(0) - 1:
        before = tl.zeros([1], tl.int32)
        for k in tl.static_range(K):
            first = before
            for start in range(0, blocks, SCANNED):
                at = counts + (k * blocks + start + lane) * COLUMNS + e
                inside = start + lane < blocks
                number = tl.load(at, inside, 0)
                tl.store(at, before + tl.cumsum(number, 0) - number, inside)
                before += tl.sum(number, 0)
            tl.store(totals + (stratum * K + k) * COLUMNS + e + tl.arange(0, 1), before - first)
        column = e
    else:
        column = e * 0 + COLUMNS
    total = tl.zeros([1], tl.float32)
    for start in range(0, blocks, SCANNED):
        at = sums + (start + lane) * (COLUMNS + 1) + column
        total += tl.sum(tl.load(at, start + lane < blocks, 0.0), 0)
    tl.store(means + stratum * (COLUMNS + 1) + column + tl.arange(0, 1), total)


@triton.jit
def _earlier(
    choice_TK, positions, choices, block, tokens, stratum,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """For each choice the number of equal ones of earlier tokens of the block, of the same rank."""
    t, k = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    other_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    other_live = tl.load(positions + stratum * tokens + other_t, other_t < tokens, -1) == stratum
    other = (stratum * tokens + other_t)[:, None] * K + k[None, :]
    other = tl.load(choices + other, other_live[:, None] & (k < K)[None, :], -1)
    same = (choice_TK[:, None, :] == other[None, :, :]) & (other >= 0)[None, :, :]
    same = same & (other_t[None, :] < t[:, None])[:, :, None]
    return tl.sum(same.to(tl.int32), 1)


@triton.jit
def _count(
    total_KE, kept_E, number, totals, means, numbers, balance, z_loss, stratum, E, first,
    K: tl.constexpr, COLUMNS: tl.constexpr, STRATA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The statistics of a stratum, and its part of the losses."""
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    first_E = tl.sum(tl.where((k == 0)[:, None], total_KE, 0), 0)
    prob_E = tl.load(means + stratum * (COLUMNS + 1) + e, e < E, 0.0)
    square = tl.load(means + stratum * (COLUMNS + 1) + COLUMNS)
    n = tl.maximum(number, 1).to(tl.float32)
    loss = tl.sum(first_E.to(tl.float32) / n * (prob_E / n), 0) * E / STRATA
    z = square / n / STRATA
    if not FIRST:
        loss += tl.load(balance)
        z += tl.load(z_loss)
    tl.store(balance, loss)
    tl.store(z_loss, z)
    # first choices (L, C), unused (L,), chosen (L, K), dropped (L, K)
    g = e - first  # only experts that this gate sees have choices
    choice_E = tl.load(totals + stratum * K * COLUMNS + g, (g >= 0) & (g < E), 0)
    tl.store(numbers + stratum * COLUMNS + e, choice_E.to(tl.int64), e < COLUMNS)
    unused = tl.sum(((first_E == 0) & (e < E)).to(tl.int64), 0)
    tl.store(numbers + STRATA * COLUMNS + stratum, unused)
    earlier_KE = tl.cumsum(total_KE, 0) - total_KE
    stay_KE = tl.minimum(tl.maximum(kept_E[None, :] - earlier_KE, 0), total_KE)
    chosen_K = tl.sum(total_KE, 1).to(tl.int64)
    to = numbers + STRATA * (COLUMNS + 1) + stratum * K + k
    tl.store(to, chosen_K, k < K)
    tl.store(to + STRATA * K, chosen_K - tl.sum(stay_KE, 1).to(tl.int64), k < K)


@triton.jit
def _copy(
    x, norm_weight, norm_bias, moments, copies, row, t, at, live, tokens,
    D: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes the layer norm of tokens to the rows of their copies."""
    mean = tl.load(moments + at * 2, live, 0.0)
    scale = tl.load(moments + at * 2 + 1, live, 0.0)
    source = x + t.to(tl.int64) * D
    if not FIRST:
        source = x + (at - tokens).to(tl.int64) * D
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        h = normed(source, d, live, mean, scale, norm_weight, norm_bias, D, ROUND)
        for i in tl.static_range(K):
            to = _column(row, i, BLOCK_K)
            target = copies + to.to(tl.int64)[:, None] * D + d[None, :]
            tl.store(target, h, (live & (to >= 0))[:, None] & (d < D)[None, :])


@triton.jit
def _note(
    requested, dropped, lost, t, live, inside,
    K: tl.constexpr, FIRST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds to each token's numbers of stops and of dropped copies."""
    k = tl.arange(0, BLOCK_K)
    own = t[:, None] * K + k[None, :]
    real = inside[:, None] & (k < K)[None, :]
    if FIRST:
        tl.store(requested + t, live.to(tl.int64), inside)
        tl.store(dropped + own, lost, real)
    else:
        tl.store(requested + t, tl.load(requested + t, live, 0) + 1, live)
        some = lost > 0
        tl.store(dropped + own, tl.load(dropped + own, some, 0) + lost, some)


@triton.jit(do_not_specialize=["tokens", "stratum", "E", "first"])
def dispatch(
    x, norm_weight, norm_bias, stratum_of_expert, moments, choices, counts, totals, means,
    positions, weights, rows, ends, kept, copies, requested, dropped, numbers, balance, z_loss,
    tokens, stratum, E, first,
    D: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, STRATA: tl.constexpr, NORMALIZE: tl.constexpr,
    FIRST: tl.constexpr, ROUND: tl.constexpr, LIMIT: tl.constexpr, OVER: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Applies capacity and writes rows by expert, weights, next strata and statistics.

    ``kept`` are the numbers of copies of all experts, also of those that the gate does not see.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = t < tokens
    at = stratum * tokens + t
    position = tl.load(positions + at, inside, -1)
    live = position == stratum
    counted = (k < K)[:, None] & (e < E)[None, :]
    total_KE = tl.load(totals + (stratum * K + k[:, None]) * COLUMNS + e[None, :], counted, 0)
    number, most, kept_E = _kept(total_KE, E, LIMIT, OVER)
    end_E = tl.cumsum(kept_E, 0)

    mine = at[:, None] * K + k[None, :]
    choice = tl.load(choices + mine, live[:, None] & (k < K)[None, :], -1)
    valid = (choice >= 0) & (choice < E)
    place = tl.load(counts + (k[None, :] * blocks + block) * COLUMNS + choice, valid, 0)
    place += _earlier(choice, positions, choices, block, tokens, stratum, K, BLOCK_T, BLOCK_K)
    fits = valid & (place < most)
    row = tl.where(fits, _of_expert(end_E - kept_E, choice, BLOCK_E) + place, -1)
    fits = fits & (row < tokens * K)
    row = tl.where(fits, row, -1)
    tl.store(rows + mine, row, live[:, None] & (k < K)[None, :])

    weight = tl.load(weights + mine, live[:, None] & (k < K)[None, :], 0.0)
    if NORMALIZE == "after-drop":
        weight = tl.where(fits, weight, 0.0)
    if NORMALIZE != "none":
        weight = weight / tl.maximum(tl.sum(weight, 1), 1.1754944e-38)[:, None]
    tl.store(weights + mine, tl.where(fits, weight, 0.0), live[:, None] & (k < K)[None, :])

    best = _column(tl.load(choices + mine, live[:, None] & (k < K)[None, :], 0), 0, BLOCK_K)
    seen = live & (best >= 0) & (best < E)
    goes = tl.load(stratum_of_expert + first + best, seen, STRATA - 1).to(tl.int32) + 1
    tl.store(positions + at + tokens, tl.where(live, goes, position), inside)
    lost = (valid & ~fits).to(tl.int64)
    _note(requested, dropped, lost, t, live, inside, K, FIRST, BLOCK_K)
    _copy(
        x, norm_weight, norm_bias, moments, copies, row, t, at, live, tokens,
        D, K, FIRST, ROUND, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    if block == 0:
        tl.store(ends + e, end_E, e < E)
        tl.store(kept + e, 0, e < first)
        tl.store(kept + first + e, kept_E.to(tl.int64), e < E)
        _count(
            total_KE, kept_E, number, totals, means, numbers, balance, z_loss, stratum, E, first,
            K, COLUMNS, STRATA, FIRST, BLOCK_E, BLOCK_K,
        )  # fmt: skip
