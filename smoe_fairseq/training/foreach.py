"""fairseq's optimizer steps with a few kernels for all parameters instead of a dozen for each.

A GPU waits while the host launches kernels, of which three quarters in a dense bf16 update are those of
these steps. The arithmetic is fairseq's; on a CPU results are bitwise equal.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from smoe_fairseq.compat.replacing import replaces

CHUNK = 2**24  # elements whose temporary copies are in memory at a time
HALF = (torch.float16, torch.bfloat16)


@replaces("fairseq.optim.adam:Adam.step")
@torch.no_grad()
def step_together(original, adam, closure=None):
    """Of fairseq's Adam, which is used unless NVIDIA's apex is installed."""
    groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in adam.param_groups]
    if any(group.get("amsgrad") or any(p.grad.is_sparse for p in ps) for group, ps in groups):
        return original(adam, closure)
    loss = None if closure is None else closure()
    for group, parameters in groups:
        for chunk in runs(parameters, CHUNK, Tensor.numel, _kind):
            _adam_step(group, chunk, [adam.state[p] for p in chunk])
    return loss


def runs(
    tensors: Iterable[Tensor], most: int, size: Callable[[Tensor], int], kind: Callable
) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one ``kind``, of a ``size`` up to ``most`` together; a larger one is alone."""
    run, total = [], 0
    for tensor in tensors:
        if run and (total + size(tensor) > most or kind(tensor) != kind(run[0])):
            yield run
            run, total = [], 0
        run.append(tensor)
        total += size(tensor)
    if run:
        yield run


def _kind(parameter: Tensor) -> tuple:
    return parameter.device, parameter.dtype, parameter.grad.dtype


def _adam_step(group: dict, parameters: list[Tensor], states: list[dict]) -> None:
    """One step of fairseq's Adam; parameters and gradients in half precision are computed in float32."""
    gradients = [_full(p.grad.data) for p in parameters]
    values = [_full(p.data) for p in parameters]
    for state, value in zip(states, values, strict=True):
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(value) for _ in range(2))
        for name in ("exp_avg", "exp_avg_sq"):  # a loaded state may be on another device
            state[name] = state[name].to(value)
        state["step"] += 1
    averages, squares = ([state[n] for state in states] for n in ("exp_avg", "exp_avg_sq"))
    steps = {state["step"] for state in states}
    are_full = parameters[0].dtype == gradients[0].dtype == torch.float32  # all are of one type
    if parameters[0].is_cuda and len(steps) == 1 and are_full:
        _fused_step(group, values, gradients, averages, squares, steps.pop())
        return
    beta1, beta2 = group["betas"]
    torch._foreach_mul_(averages, beta1)
    torch._foreach_add_(averages, gradients, alpha=1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_add_(divisors, group["eps"])
    if group["weight_decay"] != 0:
        torch._foreach_add_(values, values, alpha=-group["weight_decay"] * group["lr"])
    sizes = [-_step_size(group["lr"], beta1, beta2, state["step"]) for state in states]
    torch._foreach_addcdiv_(values, averages, divisors, sizes)
    if parameters[0].dtype in HALF:
        torch._foreach_copy_([p.data for p in parameters], values)


def _fused_step(
    group: dict,
    values: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    step: int,
) -> None:
    """The same step by torch's fused kernel, which reads and writes each number once.

    fairseq adds epsilon before the bias correction of the squares, torch after it, so epsilon is rescaled.
    """
    beta1, beta2 = group["betas"]
    count = torch.full((), float(step), device=values[0].device)
    torch._fused_adamw_(
        values,
        gradients,
        averages,
        squares,
        [],
        [count] * len(values),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"] / math.sqrt(1 - beta2**step),
        amsgrad=False,
        maximize=False,
    )


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


@functools.lru_cache(maxsize=8)
def _step_size(lr: float, beta1: float, beta2: float, step: int) -> float:
    return lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)


@replaces("fairseq.optim.fairseq_optimizer:FairseqOptimizer.multiply_grads")
def multiply_together(_, optimizer, c):
    """``c`` is a number, or a tensor with one element."""
    by_device = {}
    for p in optimizer.params:
        if p.grad is not None:
            by_device.setdefault(p.grad.device, []).append(p.grad.data)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, c.to(device).reshape(()) if torch.is_tensor(c) else c)


# Copies between half-precision and float32 parameters.


@replaces("fairseq.optim.fp16_optimizer:_FP16OptimizerMixin.zero_grad")
def clear_gradients(_, optimizer):
    for p in optimizer.fp16_params:
        p.grad = None
    optimizer._needs_sync = True  # float32 gradients are overwritten, or cleared, by the next copy
    if optimizer.scaler is not None:
        optimizer._multiply_factor = 1.0 / float(optimizer.scaler.loss_scale)


@replaces("fairseq.optim.fp16_optimizer:_FP16OptimizerMixin._sync_fp16_grads_to_fp32")
def copy_gradients(_, optimizer):
    if not optimizer._needs_sync:
        return
    targets, sources = [], []
    for p, full in zip(optimizer.fp16_params, _float32(optimizer, "grad"), strict=True):
        if p.grad is None:
            full.zero_()
        else:
            targets.append(full)
            sources.append(p.grad.data)
    if targets:
        torch._foreach_copy_(targets, sources)
    optimizer._needs_sync = False


@replaces("fairseq.optim.fp16_optimizer:_FP16OptimizerMixin._sync_fp32_params_to_fp16")
def copy_parameters(_, optimizer):
    torch._foreach_copy_([p.data for p in optimizer.fp16_params], _float32(optimizer, "data"))


def full_precision(optimizer) -> dict[nn.Parameter, Tensor]:
    """The float32 copies by half-precision parameter; none where there are no copies."""
    if not hasattr(optimizer, "fp32_params"):
        return {}
    return dict(zip(optimizer.fp16_params, _float32(optimizer, "data"), strict=True))


def _float32(optimizer, attribute: str) -> list[Tensor]:
    """The ``data`` or ``grad`` of float32 parameters, in the order and shapes of the half-precision ones.

    They are flattened into one per device, unless ``--fp16-no-flatten-grads`` or ``--bf16``.
    """
    if not optimizer.has_flat_params:
        return [getattr(p, attribute).detach() for p in optimizer.fp32_params]
    by_device = {}
    for p in optimizer.fp16_params:
        by_device.setdefault(p.device.index, []).append(p)
    parts = {}
    for device, parameters in by_device.items():
        flat = getattr(optimizer.fp32_params[device], attribute).detach()
        pieces = flat.split([p.numel() for p in parameters])
        parts |= {p: piece.view_as(p) for p, piece in zip(parameters, pieces, strict=True)}
    return [parts[p] for p in optimizer.fp16_params]
