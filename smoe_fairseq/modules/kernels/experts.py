"""Kernels between and after the experts' products, and of all gradients. Shapes: see the package."""

import triton
import triton.language as tl

from smoe_fairseq.modules.kernels.routing import normed, probabilities


@triton.jit
def _expert_of(row, ends, E, BLOCK_E: tl.constexpr):
    e = tl.arange(0, BLOCK_E)
    end_E = tl.load(ends + e, e < E, 2147483647)
    return tl.sum((row[:, None] >= end_E[None, :]).to(tl.int32), 1)


@triton.jit
def activated(
    x, bias, expert, row, f, inside, seed, stratum, F: tl.constexpr, DROPOUT: tl.constexpr
):
    """``dropout(relu(x + bias))`` for rows and columns ``f``; the dropout depends on both alone."""
    x = x + tl.load(bias + expert[:, None] * F + f[None, :], inside, 0.0).to(tl.float32)
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if DROPOUT > 0:
        drawn = tl.rand(tl.load(seed) + 4 * stratum + 1, row[:, None] * F + f[None, :])
        x = tl.where(drawn >= DROPOUT, x / (1 - DROPOUT), 0.0)
    return x


@triton.jit(do_not_specialize=["stratum", "E", "first"])
def activate(
    h, bias, ends, seed, stratum, E, first,
    F: tl.constexpr, INNER_DROPOUT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """``dropout(relu(h + bias))`` in place."""
    total = tl.load(ends + E - 1)
    across = tl.cdiv(F, BLOCK_F)
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK_N) * across, tl.num_programs(0)):
        row = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
        f = tile % across * BLOCK_F + tl.arange(0, BLOCK_F)
        inside = (row < total)[:, None] & (f < F)[None, :]
        expert = first + _expert_of(row, ends, E, BLOCK_E)
        at = row.to(tl.int64)[:, None] * F + f[None, :]
        x = tl.load(h + at, inside, 0.0).to(tl.float32)
        x = activated(x, bias, expert, row, f, inside, seed, stratum, F, INNER_DROPOUT)
        tl.store(h + at, x, inside)


@triton.jit
def _dropped(x, seed, stratum, t, d, D: tl.constexpr, DROPOUT: tl.constexpr):
    """Dropout of columns ``d`` of a stratum's output for tokens ``t``; the same forward and backward."""
    if DROPOUT > 0:
        drawn = tl.rand(tl.load(seed) + 4 * stratum + 2, t[:, None] * D + d[None, :])
        x = tl.where(drawn >= DROPOUT, x / (1 - DROPOUT), 0.0)
    return x


@triton.jit
def _output(outputs, bias, place, expert, d, has, D: tl.constexpr, BIAS: tl.constexpr):
    """Columns ``d`` of the experts' outputs at these places, with their bias."""
    out = tl.load(outputs + place, has, 0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias + expert[:, None] * D + d[None, :], has, 0.0).to(tl.float32)
    return out


@triton.jit(do_not_specialize=["tokens", "stratum", "first"])
def combine(
    x, outputs, bias, seed, positions, choices, rows, weights, stack, y,
    tokens, stratum, first,
    D: tl.constexpr, K: tl.constexpr, STRATA: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``x + dropout(sum_k weight (output + bias))``, written to the next stratum's input or to the output.

    Without ``BIAS`` the outputs contain it.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < tokens
    at = stratum * tokens + t
    live = tl.load(positions + at, inside, -1) == stratum
    goes = tl.load(positions + at + tokens, inside, STRATA)
    if FIRST:
        live_or_padding = inside
        source = x + t.to(tl.int64) * D
    else:
        live_or_padding = live
        source = x + (at - tokens).to(tl.int64) * D
    leaves = live_or_padding & (goes == STRATA)
    stays = live & (goes < STRATA)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        sum_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for k in tl.static_range(K):
            row = tl.where(live, tl.load(rows + at * K + k, inside, -1), -1)
            weight = tl.load(weights + at * K + k, inside, 0.0)
            expert = first + tl.load(choices + at * K + k, inside, 0)
            has = (row >= 0)[:, None] & (d < D)[None, :]
            place = row.to(tl.int64)[:, None] * D + d[None, :]
            out = _output(outputs, bias, place, expert, d, has, D, BIAS)
            sum_TD += tl.where(has, weight[:, None] * out, 0.0)
        sum_TD = _dropped(sum_TD, seed, stratum, t, d, D, DROPOUT)
        real = live_or_padding[:, None] & (d < D)[None, :]
        sum_TD += tl.load(source[:, None] + d[None, :], real, 0.0).to(tl.float32)
        out = y + t.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(out, sum_TD, leaves[:, None] & (d < D)[None, :])
        on = stack + ((goes - 1) * tokens + t).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(on, sum_TD, stays[:, None] & (d < D)[None, :])


@triton.jit
def _gradient(grad_y, grad_x, t, d, leaves_T, stays_T, D: tl.constexpr):
    """The gradient of a stratum's output: from the block's output, or from a later stratum."""
    at = t.to(tl.int64)[:, None] * D + d[None, :]
    fits = (d < D)[None, :]
    g = tl.load(grad_y + at, leaves_T[:, None] & fits, 0.0).to(tl.float32)
    return g + tl.load(grad_x + at, stays_T[:, None] & fits, 0.0).to(tl.float32)


@triton.jit
def _softmax(logits, at_T, live_T, E, COLUMNS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Probabilities and the logarithm of their denominator, from stored logits."""
    e = tl.arange(0, BLOCK_E)
    seen = live_T[:, None] & (e < E)[None, :]
    x = tl.load(logits + at_T[:, None] * COLUMNS + e[None, :], seen, 0.0)
    p, most_T, total_T = probabilities(x, E, BLOCK_E)
    return p, most_T + tl.log(total_T)


@triton.jit(do_not_specialize=["tokens", "stratum", "E", "first"])
def spread(
    grad_y, grad_x, grad_balance, grad_z, outputs, bias, seed,
    positions, choices, rows, weights, logits, totals,
    grad_outputs, grad_logits,
    tokens, stratum, E, first,
    D: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, STRATA: tl.constexpr,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, NORMALIZE: tl.constexpr, BALANCE: tl.constexpr,
    Z: tl.constexpr,
    SPREAD_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The backward pass of `combine`, and the gradient of the logits from the weights and the losses."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = t < tokens
    at = stratum * tokens + t
    live = tl.load(positions + at, inside, -1) == stratum
    goes = tl.load(positions + at + tokens, inside, STRATA)
    leaves, stays = live & (goes == STRATA), live & (goes < STRATA)
    grad_weight = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in range(0, D, SPREAD_D):
        d = start + tl.arange(0, SPREAD_D)
        g = _gradient(grad_y, grad_x, t, d, leaves, stays, D)
        g = _dropped(g, seed, stratum, t, d, D, DROPOUT)
        for i in tl.static_range(K):
            row = tl.where(live, tl.load(rows + at * K + i, inside, -1), -1)
            weight = tl.load(weights + at * K + i, inside, 0.0)
            expert = first + tl.load(choices + at * K + i, inside, 0)
            has = (row >= 0)[:, None] & (d < D)[None, :]
            place = row.to(tl.int64)[:, None] * D + d[None, :]
            out = _output(outputs, bias, place, expert, d, has, D, BIAS)
            tl.store(grad_outputs + place, weight[:, None] * g, has)
            grad_weight += tl.where((k == i)[None, :], tl.sum(g * out, 1)[:, None], 0.0)

    mine = at[:, None] * K + k[None, :]
    real = live[:, None] & (k < K)[None, :]
    choice = tl.load(choices + mine, real, -1)
    choice = tl.where(choice < 0, -1 - choice, choice)  # negative: not sampled
    kept = tl.load(rows + mine, real, -1) >= 0
    grad_weight = tl.where(kept, grad_weight, 0.0)
    p, log = _softmax(logits, at, live, E, COLUMNS, BLOCK_E)
    if NORMALIZE != "none":
        chosen = real & (kept | (NORMALIZE == "before-drop"))
        raw = tl.where(choice[:, :, None] == e[None, None, :], p[:, None, :], 0.0)
        raw = tl.where(chosen, tl.sum(raw, 2), 0.0)
        weight = tl.load(weights + mine, real, 0.0)
        mean = tl.sum(grad_weight * weight, 1)
        share = tl.maximum(tl.sum(raw, 1), 1.1754944e-38)
        grad_weight = tl.where(chosen, (grad_weight - mean[:, None]) / share[:, None], 0.0)
    of = (choice[:, :, None] == e[None, None, :]) & real[:, :, None]
    grad_p = tl.sum(tl.where(of, grad_weight[:, :, None], 0.0), 1)
    first_E = tl.load(totals + stratum * K * COLUMNS + e, e < E, 0)
    n = tl.maximum(tl.sum(first_E, 0), 1).to(tl.float32)
    if BALANCE:
        share_E = first_E.to(tl.float32) / n * (E / (n * STRATA))
        grad_p += (tl.load(grad_balance).to(tl.float32) * share_E)[None, :]
    grad = p * (grad_p - tl.sum(p * grad_p, 1)[:, None])
    if Z:
        grad += p * (tl.load(grad_z).to(tl.float32) * 2 / (n * STRATA) * log)[:, None]
    to = grad_logits + t[:, None] * COLUMNS + e[None, :]
    tl.store(to, grad, live[:, None] & (e < E)[None, :])


@triton.jit
def _bounds(ends, e, part, splits):
    """The range of rows of one of an expert's parts."""
    start = tl.load(ends + e - 1, e > 0, 0)
    end = tl.load(ends + e)
    size = tl.cdiv(end - start, splits)
    begin = tl.minimum(start + part * size, end)
    return begin, tl.minimum(begin + size, end)


@triton.jit
def _add(to, sum_D, inside_D, is_new):
    """Writes a partial sum, or adds it to that of a later stratum."""
    before = tl.load(to, inside_D, 0.0)
    tl.store(to, sum_D + tl.where(is_new, 0.0, before), inside_D)


@triton.jit
def _sum_of_gate(
    x, grad_logits, norm_weight, norm_bias, positions, moments, to, part, splits, d, tokens, stratum, E,
    D: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, ROUND: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns ``d`` of the gradient of the gate's weights, from a part of the tokens."""
    e = tl.arange(0, BLOCK_E)
    sum_EC = tl.zeros([BLOCK_E, BLOCK_C], tl.float32)
    size = tl.cdiv(tokens, splits)
    end = tl.minimum(part * size + size, tokens)
    for start in range(part * size, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        at = stratum * tokens + t
        live = tl.load(positions + at, t < end, -1) == stratum
        mean = tl.load(moments + at * 2, live, 0.0)
        scale = tl.load(moments + at * 2 + 1, live, 0.0)
        source = x + (at if FIRST else at - tokens).to(tl.int64) * D
        h = normed(source, d, live, mean, scale, norm_weight, norm_bias, D, ROUND)
        seen = live[None, :] & (e < E)[:, None]
        g = tl.load(grad_logits + t[None, :] * COLUMNS + e[:, None], seen, 0.0)
        sum_EC += tl.dot(g, h, input_precision="ieee" if EXACT else "tf32")
    tl.store(to + e[:, None] * D + d[None, :], sum_EC, (e < E)[:, None] & (d < D)[None, :])


@triton.jit
def _sum_of_outputs(
    grad_outputs, ends, to, e, held, ranks, part, splits, d, is_new,
    D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns ``d`` of the gradient of an expert's second bias, from a part of each rank's rows."""
    sum_C = tl.zeros([BLOCK_C], tl.float32)
    for rank in range(ranks):
        begin, end = _bounds(ends, rank * held + e, part, splits)
        for start in range(begin, end, BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            inside = (row < end)[:, None] & (d < D)[None, :]
            g = tl.load(grad_outputs + row.to(tl.int64)[:, None] * D + d[None, :], inside, 0.0)
            sum_C += tl.sum(g.to(tl.float32), 0)
    _add(to + d, sum_C, d < D, is_new)


@triton.jit
def _sum_of_hidden(
    grad_hidden, hidden, ends, to, e, held, ranks, part, splits, f, is_new,
    F: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns ``f`` of the gradient of an expert's first bias; the backward pass of `activate`, in place."""
    sum_C = tl.zeros([BLOCK_C], tl.float32)
    for rank in range(ranks):
        begin, end = _bounds(ends, rank * held + e, part, splits)
        for start in range(begin, end, BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            inside = (row < end)[:, None] & (f < F)[None, :]
            at = row.to(tl.int64)[:, None] * F + f[None, :]
            g = tl.load(grad_hidden + at, inside, 0.0).to(tl.float32)
            a = tl.load(hidden + at, inside, 0.0)
            g = tl.where(a.to(tl.float32) <= 0, 0.0, g / (1 - DROPOUT)).to(a.dtype)
            tl.store(grad_hidden + at, g, inside)
            sum_C += tl.sum(g.to(tl.float32), 0)
    _add(to + f, sum_C, f < F, is_new)


@triton.jit(
    do_not_specialize=["tokens", "stratum", "E", "first", "held", "ranks", "own", "gate", "splits"]
)
def sums(
    x, grad_hidden, hidden, grad_outputs, grad_logits, norm_weight, norm_bias, positions, moments, ends,
    parts, splits, tokens, stratum, E, first, held, ranks, own, gate,
    D: tl.constexpr, F: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr, INNER_DROPOUT: tl.constexpr,
    BLOCK_E: tl.constexpr, SUMS_C: tl.constexpr, SUMS_N: tl.constexpr,
):  # fmt: skip
    """Gradients that are sums over rows or tokens: each program sums one part of them, in a block of columns.

    A row of ``parts (S, SIZE)`` holds the gradients of b1 (HELD, F), b2 (HELD, D) and each gate's weights.
    """
    program, lane = tl.program_id(0), tl.arange(0, SUMS_C)
    across, wide = tl.cdiv(D, SUMS_C), tl.cdiv(F, SUMS_C)
    gates, seconds = across * splits, held * across * splits
    if program < gates:
        part, d = program // across, program % across * SUMS_C + lane
        to = parts + part * SIZE + HELD * (F + D) + gate * D
        _sum_of_gate(
            x, grad_logits, norm_weight, norm_bias, positions, moments, to, part, splits, d,
            tokens, stratum, E,
            D, COLUMNS, FIRST, ROUND, EXACT, BLOCK_E, SUMS_C, SUMS_N,
        )  # fmt: skip
    elif program < gates + seconds:
        unit = (program - gates) // across
        e, part = unit // splits, unit % splits
        to = parts + part * SIZE + HELD * F + (first + e) * D
        d = (program - gates) % across * SUMS_C + lane
        _sum_of_outputs(
            grad_outputs, ends, to, e, held, ranks, part, splits, d, e < own, D, SUMS_C, SUMS_N
        )
    else:
        unit = (program - gates - seconds) // wide
        e, part = unit // splits, unit % splits
        to = parts + part * SIZE + (first + e) * F
        f = (program - gates - seconds) % wide * SUMS_C + lane
        _sum_of_hidden(
            grad_hidden, hidden, ends, to, e, held, ranks, part, splits, f, e < own,
            F, INNER_DROPOUT, SUMS_C, SUMS_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["held", "ranks", "own"])
def settle(
    grad_w1, grad_w2, later_w1, later_w2, ends, held, ranks, own,
    WEIGHTS: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """Sets the weights' gradients of experts without rows to 0, and adds those of later strata."""
    e, block = tl.program_id(0), tl.program_id(1)
    rows = 0
    for rank in range(ranks):
        at = ends + rank * held + e
        rows += tl.load(at) - tl.load(at - 1, rank * held + e > 0, 0)
    if (rows == 0) | (e >= own):
        i = block * SETTLED + tl.arange(0, SETTLED)
        at, has = e.to(tl.int64) * WEIGHTS + i, i < tl.where(rows > 0, WEIGHTS, 0)
        before = (e - own).to(tl.int64) * WEIGHTS + i
        later = i < tl.where(e >= own, WEIGHTS, 0)
        g = tl.load(grad_w1 + at, has, 0.0).to(tl.float32)
        g += tl.load(later_w1 + before, later, 0.0).to(tl.float32)
        tl.store(grad_w1 + at, g, i < WEIGHTS)
        g = tl.load(grad_w2 + at, has, 0.0).to(tl.float32)
        g += tl.load(later_w2 + before, later, 0.0).to(tl.float32)
        tl.store(grad_w2 + at, g, i < WEIGHTS)


@triton.jit(do_not_specialize=["tokens", "stratum", "E"])
def collect(
    x, grad_y, grad_x, grad_copies, grad_logits, norm_weight, gate_weight, positions, moments, rows,
    norm_parts, tokens, stratum, E,
    D: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, STRATA: tl.constexpr,
    FIRST: tl.constexpr, WIDE_D: tl.constexpr, FEW_T: tl.constexpr,
):  # fmt: skip
    """The gradients of a stratum's tokens, from their copies and logits, and of the layer norm.

    A row of ``norm_parts`` holds the gradients of each layer norm's weight and bias.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, WIDE_D)
    fits = (d < D)[None, :]
    weight = tl.load(norm_weight + d, d < D, 0.0).to(tl.float32)
    grad_weight = tl.zeros([WIDE_D], tl.float32)
    grad_bias = tl.zeros([WIDE_D], tl.float32)
    for block in range(program, tl.cdiv(tokens, FEW_T), programs):
        t = block * FEW_T + tl.arange(0, FEW_T)
        inside = t < tokens
        at = stratum * tokens + t
        live = tl.load(positions + at, inside, -1) == stratum
        goes = tl.load(positions + at + tokens, inside, STRATA)
        leaves, stays = live & (goes == STRATA), live & (goes < STRATA)
        if FIRST:
            leaves = inside & (goes == STRATA)  # padding too
        grad = tl.zeros([FEW_T, WIDE_D], tl.float32)
        for start in range(0, E, 4):
            for i in tl.static_range(4):
                e = start + i
                g = tl.load(
                    grad_logits + t * COLUMNS + e, live & (t < tl.where(e < E, tokens, 0)), 0.0
                )
                w = tl.load(gate_weight + e * D + d, d < tl.where(e < E, D, 0), 0.0).to(tl.float32)
                grad += g[:, None] * w[None, :]
        for k in tl.static_range(K):
            row = tl.where(live, tl.load(rows + at * K + k, inside, -1), -1)
            place = grad_copies + row.to(tl.int64)[:, None] * D + d[None, :]
            grad += tl.load(place, (row >= 0)[:, None] & fits, 0.0).to(tl.float32)
        mean = tl.where(live, tl.load(moments + at * 2, inside, 0.0), 0.0)
        scale = tl.where(live, tl.load(moments + at * 2 + 1, inside, 0.0), 0.0)
        source = x + (at if FIRST else at - tokens).to(tl.int64)[:, None] * D + d[None, :]
        normed = tl.load(source, live[:, None] & fits, 0.0).to(tl.float32)
        normed = tl.where(fits, (normed - mean[:, None]) * scale[:, None], 0.0)
        grad_weight += tl.sum(grad * normed, 0)
        grad_bias += tl.sum(grad, 0)
        grad = grad * weight[None, :]
        along = tl.sum(grad * normed, 1) / D
        grad = scale[:, None] * (grad - (tl.sum(grad, 1) / D)[:, None] - normed * along[:, None])
        grad += _gradient(grad_y, grad_x, t, d, leaves, stays, D)
        to = grad_x + t.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(to, grad, (inside if FIRST else live)[:, None] & fits)
    to = norm_parts + (program * STRATA + stratum) * 2 * D + d
    tl.store(to, grad_weight, d < D)
    tl.store(to + D, grad_bias, d < D)
