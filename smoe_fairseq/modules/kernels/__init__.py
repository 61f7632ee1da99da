"""The block in a few Triton kernels per stratum: seven launches forward, eight backward, products included.

On a GPU, the time of a pass depends on the number of kernels, then on the bytes between products. Forward, a
stratum is `route` (layer norm, logits, choice), `scan` (places within experts), `dispatch` (rows by
expert), a grouped product, `activate`, a grouped product and `combine`; backward it is `spread`, four grouped
products with `sums` between them, `settle` and `collect`. Rows after those of the last expert are neither
read nor written, and the host never waits. The order of sums is fixed, so results repeat bit for bit.

The products are torch's where it has them in one kernel, else `multiply`, which activates too, and `outer`.
If experts are sharded, rows travel to their ranks before the first product, and back after the second.

`fused.applies` checks whether a block is supported.

Shapes: T tokens, D embedding, F feed-forward, E experts that a gate sees, C experts of the block, K choices
per token, N = T K rows of copies, L strata, S parts of a sum.
"""

import triton

from smoe_fairseq.modules.kernels.experts import activate, collect, combine, settle, spread, sums  # noqa: F401
from smoe_fairseq.modules.kernels.products import multiply, outer  # noqa: F401
from smoe_fairseq.modules.kernels.routing import dispatch, route, scan  # noqa: F401


def is_interpreted() -> bool:
    """Whether Triton runs the kernels on a CPU, to test them."""
    return not isinstance(route, triton.JITFunction)
