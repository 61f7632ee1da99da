"""Where the copies of tokens lie for their experts.

Copies lie by expert, and behind them is one row of nobody: a copy without an expert reads 0 there.

Shapes: T tokens, K choices per token, N rows of copies and nobody's, D embedding, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from smoe_fairseq.modules.rows import SumRows, TakeCopies, TakeRows


@dataclass(frozen=True)
class DispatchPlan:
    """Which copy stands in which row."""

    row_TK: Tensor  # of each copy
    copy_N: Tensor  # row n holds copy t * K + k

    @classmethod
    def of(cls, expert_TK: Tensor, rank_TK: Tensor, kept_E: Tensor, rows: int) -> "DispatchPlan":
        """Each copy behind those before it for the same expert, and these behind all earlier experts'."""
        start_E1 = torch.cat([kept_E.new_zeros(1), kept_E.cumsum(0)])
        row_TK = start_E1[expert_TK] + rank_TK
        row_TK = row_TK.masked_fill_(expert_TK == len(kept_E), rows - 1)
        copy_N = torch.arange(row_TK.numel(), device=row_TK.device)
        return cls(row_TK, row_TK.new_zeros(rows).scatter_(0, row_TK.flatten(), copy_N))

    @property
    def token_N(self) -> Tensor:
        """The token of each row; nobody's is any."""
        return self.copy_N // self.row_TK.shape[1]

    def take(self, x_TD: Tensor) -> Tensor:
        """``(N, D)``: what each row's token has."""
        return TakeRows.apply(x_TD, self.token_N, self.row_TK)

    def take_copies(self, x_TK: Tensor) -> Tensor:
        """``(N,)``: what each row's copy has."""
        return TakeCopies.apply(x_TK, self.copy_N, self.row_TK)

    def weighted_sum(self, y_ND: Tensor, weight_TK: Tensor) -> Tensor:
        """``(T, D)``: over the rows of each token."""
        weight_N = self.take_copies(weight_TK).to(y_ND.dtype)
        return SumRows.apply(y_ND * weight_N.unsqueeze(1), self.row_TK, self.token_N)
