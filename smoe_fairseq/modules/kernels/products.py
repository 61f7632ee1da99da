"""Products of all experts in one launch, on any GPU that Triton supports; the host does not wait.

Shapes: see the package; I inputs and O outputs of a product.
"""

import triton
import triton.language as tl

from smoe_fairseq.modules.kernels.experts import activated


@triton.jit
def _tile(ends, tile, E, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr):
    """The expert of a tile of rows, and its range of rows, which is empty behind the last tile."""
    e = tl.arange(0, BLOCK_E)
    end_E = tl.load(ends + e, e < E, 0)
    start_E = tl.load(ends + e - 1, (e > 0) & (e < E), 0)
    tiles_E = tl.cdiv(end_E - start_E, BLOCK_N)
    before_E = tl.cumsum(tiles_E, 0) - tiles_E
    here = (tile >= before_E) & (tile < before_E + tiles_E)
    start = tl.sum(tl.where(here, start_E + (tile - before_E) * BLOCK_N, 0))
    return tl.sum(tl.where(here, e, 0)), start, tl.sum(tl.where(here, end_E, 0))


@triton.jit(do_not_specialize=["stratum", "first", "held", "ranks"])
def multiply(
    x, w, bias, y, ends, seed, stratum, first, held, ranks,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BACK: tl.constexpr, END: tl.constexpr,
    INNER_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """``x W_e'`` for weights ``(E, O, I)``, or with ``BACK`` ``x W_e`` for weights ``(E, I, O)``.

    Rows are sorted by rank and expert; ``ends`` are those of each pair. ``END`` "bias" adds the bias,
    "relu" also applies ReLU and dropout, as `activate`.
    """
    across = tl.cdiv(OUTPUTS, BLOCK_O)
    e, start, end = _tile(ends, tl.program_id(0) // across, ranks * held, BLOCK_E, BLOCK_N)
    e = e % held
    if start < end:
        row = start + tl.arange(0, BLOCK_N)
        o = tl.program_id(0) % across * BLOCK_O + tl.arange(0, BLOCK_O)
        w += (first + e).to(tl.int64) * INPUTS * OUTPUTS
        sum_NO = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
        for start_i in range(0, INPUTS, BLOCK_I):
            i = start_i + tl.arange(0, BLOCK_I)
            place = row.to(tl.int64)[:, None] * INPUTS + i[None, :]
            x_NI = tl.load(x + place, (row < end)[:, None] & (i < INPUTS)[None, :], 0.0)
            if BACK:
                place = i[:, None] * OUTPUTS + o[None, :]
            else:
                place = o[None, :] * INPUTS + i[:, None]
            w_IO = tl.load(w + place, (i < INPUTS)[:, None] & (o < OUTPUTS)[None, :], 0.0)
            sum_NO = tl.dot(x_NI, w_IO, sum_NO, input_precision=PRECISION)
        inside = (row < end)[:, None] & (o < OUTPUTS)[None, :]
        if END == "relu":
            expert = row * 0 + first + e
            sum_NO = activated(
                sum_NO, bias, expert, row, o, inside, seed, stratum, OUTPUTS, INNER_DROPOUT
            )
        if END == "bias":
            own_O = tl.load(bias + (first + e) * OUTPUTS + o, o < OUTPUTS, 0.0)
            sum_NO += own_O.to(tl.float32)[None, :]
        tl.store(y + row.to(tl.int64)[:, None] * OUTPUTS + o[None, :], sum_NO, inside)


@triton.jit(do_not_specialize=["held", "ranks"])
def outer(
    y, x, grad, ends, held, ranks,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``sum_n y_n x_n'`` over each expert's rows from all ranks ``(E, O, I)``; 0 without rows."""
    across = tl.cdiv(INPUTS, BLOCK_I)
    tiles = tl.cdiv(OUTPUTS, BLOCK_O) * across
    e, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    o = tile // across * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tile % across * BLOCK_I + tl.arange(0, BLOCK_I)
    sum_OI = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for rank in range(ranks):
        at = rank * held + e
        begin, end = tl.load(ends + at - 1, at > 0, 0), tl.load(ends + at)
        for start in range(begin, end, BLOCK_N):
            row = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
            y_ON = tl.load(
                y + row[None, :] * OUTPUTS + o[:, None],
                (row < end)[None, :] & (o < OUTPUTS)[:, None],
                0.0,
            )
            x_NI = tl.load(
                x + row[:, None] * INPUTS + i[None, :],
                (row < end)[:, None] & (i < INPUTS)[None, :],
                0.0,
            )
            sum_OI = tl.dot(y_ON, x_NI, sum_OI, input_precision=PRECISION)
    at = e.to(tl.int64) * OUTPUTS * INPUTS + o[:, None] * INPUTS + i[None, :]
    tl.store(grad + at, sum_OI, (o < OUTPUTS)[:, None] & (i < INPUTS)[None, :])
