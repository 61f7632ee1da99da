"""Label-smoothed cross entropy from logits, with the gradient written down instead of recorded.

On a CPU, and for small models everywhere, what runs over (tokens x vocabulary) is a good part of an
update. fairseq's own loss goes over it some ten times in both directions; this one five times.

Shapes: N target positions, V vocabulary.
"""

import torch
from fairseq import utils
from torch import Tensor
from torch.autograd.function import once_differentiable


class LabelSmoothedNLL(torch.autograd.Function):
    """``(loss, nll_loss)`` as `label_smoothed_nll_loss`, sums over the positions that are not padding.

    ``loss = (1 - eps - eps_i) nll + eps_i sum_v -log p_v`` with ``eps_i = eps / (V - 1)``, whose
    gradient by a logit is ``p_v - eps_i``, and ``1 - eps - eps_i`` less at the target. ``nll_loss`` is for
    the log and has none.
    """

    @staticmethod
    def forward(ctx, logits_NV: Tensor, target_N: Tensor, epsilon: float, padding: int):
        logp_NV = utils.log_softmax(logits_NV, dim=-1)
        real_N = target_N != padding
        eps_i = epsilon / (logp_NV.shape[1] - 1)
        nll = -torch.where(real_N, logp_NV.gather(1, target_N.unsqueeze(1)).squeeze(1), 0).sum()
        smooth = -torch.where(real_N, logp_NV.sum(1), 0).sum()
        ctx.save_for_backward(logp_NV, target_N, real_N)
        ctx.eps_i, ctx.at_target, ctx.dtype = eps_i, 1 - epsilon - eps_i, logits_NV.dtype
        ctx.mark_non_differentiable(nll)
        return ctx.at_target * nll + eps_i * smooth, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        logp_NV, target_N, real_N = ctx.saved_tensors
        grad_NV = logp_NV.exp().sub_(ctx.eps_i)
        at_target = grad_NV.new_full((len(target_N), 1), -ctx.at_target)
        grad_NV.scatter_add_(1, target_N.unsqueeze(1), at_target)
        grad_NV.mul_((real_N * grad).unsqueeze(1))
        return grad_NV.to(ctx.dtype), None, None, None
