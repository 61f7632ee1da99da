"""The block in a few Triton kernels per stratum: seven launches forward, eight backward, products included.

On a GPU a pass of the block is bound by the number of its kernels and then by the bytes between its products.
Here a stratum is `route` (layer norm, logits, choice), `scan` (places within experts), `dispatch` (rows
by expert), a grouped product, `activate`, a grouped product and `combine`; backward `spread`, four grouped
products with `sums` between them, `settle` and `collect`. Rows after the last expert's are neither
read nor written, and the host never waits. The order of sums is fixed: results repeat bit for bit.

`applies` says which blocks are supported; the results equal those of any other execution.

Shapes: T tokens, D embedding, F feed-forward, E experts that a gate sees, C experts of the block, K choices
per token, N = T K rows of copies, L strata, S parts of a sum.
"""

import triton

from smoe_fairseq.modules.kernels.experts import (
    activate,
    collect,
    combine,
    settle,
    spread,
    sums,
)
from smoe_fairseq.modules.kernels.routing import dispatch, route, scan

__all__ = [
    "activate",
    "collect",
    "combine",
    "dispatch",
    "is_interpreted",
    "route",
    "scan",
    "settle",
    "spread",
    "sums",
]


def is_interpreted() -> bool:
    """Whether Triton runs the kernels on a CPU, to test them."""
    return not isinstance(route, triton.JITFunction)
