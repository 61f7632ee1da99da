"""Layer norms and residuals of a block: three ways to go from stratum to stratum.

Shapes: T tokens, D embedding.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class PaperNorms(nn.ModuleList):
    """Each stratum normalises what its gate and experts get, and adds their output to what was there.

    One layer norm for each stratum (paper, equations 5 to 7).

    Args:
        embed_dim: D.
        strata: how many.
        dropout: of each stratum's output before its residual, or of all that the block adds.
        dropout_per: "stratum" or "layer": which of the two.
    """

    has_output_norm = False

    def __init__(self, embed_dim: int, strata: int, dropout: float, dropout_per: str):
        super().__init__(nn.LayerNorm(embed_dim) for _ in range(strata))
        self.dropout, self.dropout_per = dropout, dropout_per

    def start(self, x_TD: Tensor) -> Tensor:
        """The residual stream ``y`` before the first stratum."""
        return x_TD

    def enter(self, i: int, y_TD: Tensor, tokens) -> tuple[Tensor, Tensor]:
        """What the gate and the experts of stratum ``i`` get of its ``tokens``, and ``y``."""
        return self[i](tokens.take(y_TD)), y_TD

    def leave(self, y_TD: Tensor, out_TD: Tensor, tokens) -> Tensor:
        """``y`` with the output of the experts for the ``tokens`` of a stratum."""
        dropout = self.dropout if self.dropout_per == "stratum" else 0.0
        return tokens.add(y_TD, F.dropout(out_TD, dropout, self.training))

    def finish(self, x_TD: Tensor, y_TD: Tensor, last, real) -> Tensor:
        """The block's output.

        Args:
            last: the tokens of the last stratum.
            real: returns the tokens that are not padding, also those of a skipped batch.
        """
        if self.dropout_per == "layer" and self.training and self.dropout > 0:
            return x_TD + F.dropout(y_TD - x_TD, self.dropout, self.training)
        return y_TD


class ReleasedNorms(PaperNorms):
    """As the paper's released code: later strata replace the residual by its norm.

    The block's output is normalised once more, with one stratum as well.
    """

    has_output_norm = True

    def __init__(self, embed_dim: int, strata: int, *options):
        super().__init__(embed_dim, strata + 1, *options)

    def drop_output_norm(self) -> None:
        """Leaves out the norm of the output, which checkpoints of one stratum once did not have."""
        self.has_output_norm = False
        del self[-1]

    def enter(self, i: int, y_TD: Tensor, tokens) -> tuple[Tensor, Tensor]:
        """As of `PaperNorms`."""
        h_TD, y_TD = super().enter(i, y_TD, tokens)
        return h_TD, y_TD if i == 0 else tokens.replace(y_TD, h_TD)

    def finish(self, x_TD: Tensor, y_TD: Tensor, last, real) -> Tensor:
        """As of `PaperNorms`."""
        if not self.has_output_norm:
            return y_TD
        tokens = real()
        return tokens.replace(y_TD, self[-1](tokens.take(y_TD)))


class StackedNorms(PaperNorms):
    """Naive stacking: one norm before the first stratum and one residual around all."""

    def __init__(self, embed_dim: int, strata: int, *options):
        super().__init__(embed_dim, 1, *options)

    def start(self, x_TD: Tensor) -> Tensor:
        """As of `PaperNorms`."""
        return self[0](x_TD)

    def enter(self, i: int, y_TD: Tensor, tokens) -> tuple[Tensor, Tensor]:
        """As of `PaperNorms`."""
        return tokens.take(y_TD), y_TD

    def leave(self, y_TD: Tensor, out_TD: Tensor, tokens) -> Tensor:
        """As of `PaperNorms`."""
        return tokens.replace(y_TD, out_TD)

    def finish(self, x_TD: Tensor, y_TD: Tensor, last, real) -> Tensor:
        """As of `PaperNorms`; every real token was in the last stratum."""
        return last.add(x_TD, F.dropout(last.take(y_TD), self.dropout, self.training))
