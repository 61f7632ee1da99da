"""fairseq's attention, with torch's fused kernels if only the output is needed.

Shapes: B sentences, T query positions, S key positions, D embedding, H heads.
"""

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from smoe_fairseq.modules.torch_features import attend
from smoe_fairseq.translate.packed import concatenate


class Attention(MultiheadAttention):
    """fairseq's `MultiheadAttention`, with its parameters.

    Decoding steps and passes that need attention weights use fairseq's computation. All others use torch's
    fused attention, with a mask of `attention_mask`.
    """

    def forward(self, query, key, value, **options):
        """``query (T, B, D)``, ``key (S, B, D)``; returns ``(T, B, D)`` and fairseq's weights or None."""
        if options.get("need_weights", True) or options.get("incremental_state") is not None:
            return super().forward(query, key, value, **options)
        return self.fused(query, key, options.get("attn_mask")), None

    def fused(self, query_TBD: Tensor, key_SBD: Tensor, mask_BXTS: Tensor | None) -> Tensor:
        """The output ``(T, B, D)``, computed batch first, as the layers' tensors are in memory."""
        query, key = query_TBD.transpose(0, 1), key_SBD.transpose(0, 1)
        if query_TBD is key_SBD:
            parts = _project(query, self.q_proj, self.k_proj, self.v_proj)
        else:
            parts = [self.q_proj(query), *_project(key, self.k_proj, self.v_proj)]
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]
        drops = self.training or self.dropout_module.apply_during_inference  # --retain-dropout
        dropout = self.dropout_module.p if drops else 0.0
        y_BHTd = attend(*heads, mask_BXTS, dropout)
        return self.out_proj(y_BHTd.transpose(1, 2).flatten(2)).transpose(0, 1)


def _project(x: Tensor, *maps: nn.Module) -> list[Tensor]:
    """Each map of ``x``, by one product, since a single launch saves a GPU time."""
    if not all(type(each) is nn.Linear for each in maps):  # such as packed weights
        return [each(x) for each in maps]
    return list(F.linear(x, *concatenate(maps)).chunk(len(maps), dim=-1))


def attention_mask(
    padding_BS: Tensor | None, future_TS: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """The mask that all layers of a pass add to the scores, ``(B or 1, 1, T or 1, S)``: 0 or minus infinity.

    Args:
        padding_BS, future_TS: True at padding, and at later positions; None: nowhere.
    """
    if padding_BS is None and future_TS is None:
        return None
    hidden = None if padding_BS is None else padding_BS[:, None, None]
    if future_TS is not None:
        hidden = future_TS[None, None] if hidden is None else hidden | future_TS
    zeros = torch.zeros((), dtype=dtype, device=hidden.device)
    return zeros.masked_fill(hidden, float("-inf"))
