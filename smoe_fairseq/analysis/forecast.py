"""What training takes of each process's memory, found out before it starts: an update without data.

The model, its criterion and fairseq's own optimizer are built on torch's meta device, where tensors have
shapes and lifetimes but no bytes, and make an update there. So every layer, precision and optimizer counts
as it is, on any machine.
"""

import math
from argparse import Namespace
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from fairseq import criterions, optim
from fairseq.data import Dictionary
from torch import Tensor, nn

from smoe_fairseq.analysis.even_routing import route_evenly, spread
from smoe_fairseq.analysis.fused_kernels import fused_kernels
from smoe_fairseq.analysis.live_bytes import LiveBytes
from smoe_fairseq.analysis.meta_model import build_meta_model, is_language_model
from smoe_fairseq.analysis.run_flags import options_of
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules.grouped import can_group, one_kernel
from smoe_fairseq.system.errors import UsageError

LENGTH = 32  # tokens of a sentence, where nothing is known of the data
BUFFER = 2**28  # numbers that legacy_ddp sends at a time


@dataclass(frozen=True)
class Run:
    """What is trained: flags of fairseq-train as `parse_run` gives them, and what they do not say.

    Attributes:
        vocabulary: entries of the dictionary, special ones included.
        length: tokens of each sentence, on the source and on the target side, or of each text.
    """

    flags: Namespace
    vocabulary: int
    processes: int = 1
    length: int = LENGTH

    def with_flags(self, **changed) -> "Run":
        return replace(self, flags=Namespace(**vars(self.flags) | changed))

    @property
    def half(self) -> torch.dtype | None:
        """The type that is computed in, where that is not float32."""
        flags = self.flags
        if flags.bf16 or flags.memory_efficient_bf16:
            return torch.bfloat16
        return torch.float16 if flags.fp16 or flags.memory_efficient_fp16 else None

    @property
    def memory_efficient(self) -> bool:
        """Whether there is no copy of the weights in float32."""
        return self.flags.memory_efficient_fp16 or self.flags.memory_efficient_bf16

    @property
    def sentences(self) -> int:
        """Of a batch."""
        most = max(1, self.flags.max_tokens // self.length)
        return min(most, self.flags.batch_size or most)


@dataclass(frozen=True)
class Forecast:
    """Bytes of one process; with sharded experts or optimizer state of the one that has most.

    The peak is below the sum of the others where gradients come as activations go, and above it where a
    kernel or the optimizer takes something for a moment. Not in it: what the device, torch and its
    allocator need for themselves.
    """

    weights: int
    gradients: int  # of the weights, in their type
    optimizer: (
        int  # its state, and in half precision the copies in float32 of weights and gradients
    )
    exchange: int  # what gradients of several processes are gathered in
    activations: int  # what the forward pass of a batch keeps for the backward pass
    peak: int  # of an update

    @property
    def memory(self) -> int:
        """What is held from one update to the next."""
        return self.weights + self.gradients + self.optimizer


def forecast(run: Run, limit: float = math.inf) -> Forecast:
    """An update of ``run`` without data; takes a second or two, and none of the memory that it counts.

    Every gate is taken to choose evenly, every sentence to be of the same length, and masks to be needed.

    Raises:
        UsageError, ValueError: flags make no model, or experts do not fit so many processes.
        TooMuch: the peak is above ``limit`` bytes; found out as soon as it is.
    """
    if run.flags.amp:
        raise UsageError(
            "--amp cannot be forecast: it needs a GPU to say what is computed in which type"
        )
    with LiveBytes(limit) as memory, fused_kernels(gpu=not run.flags.cpu):
        model, criterion = _build(run)
        built = memory.now
        optimizer = _build_optimizer(run, model)
        exchange = _exchange(run, model) if run.processes > 1 else None
        optimizer.zero_grad()
        gradients = _give_gradients(model)
        optimizer.step()  # the first one makes the optimizer's state
        state = memory.now - built - gradients - _bytes(exchange)

        memory.forget_peak()
        optimizer.zero_grad()
        model.zero_grad()
        if run.flags.update_freq > 1:  # of the batches before
            _give_gradients(model)
        sample = _sample(run)
        before = memory.now
        loss, *_ = criterion(model, sample)
        activations = memory.now - before
        optimizer.backward(loss)
        del loss
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        weights = sum(parameter.nbytes for parameter in model.parameters())
        return Forecast(weights, gradients, state, _bytes(exchange), activations, memory.peak)


def _give_gradients(model: nn.Module) -> int:
    """As a backward pass leaves them; how many bytes they take."""
    for parameter in model.parameters():
        parameter.grad = parameter.new_empty(parameter.shape)
    return sum(parameter.grad.nbytes for parameter in model.parameters())


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


class _Task:
    """What a criterion asks of a task."""

    target_dictionary = Dictionary()


def _build(run: Run) -> tuple[nn.Module, nn.Module]:
    flags = run.flags
    model = build_meta_model(flags, run.vocabulary)
    blocks = moe_blocks(model).values()
    for block in blocks:
        if flags.expert_parallel:
            spread(block, run.processes)
    options = options_of(criterions.CRITERION_REGISTRY[flags.criterion], flags)
    options.sentence_avg = False
    criterion = criterions.build_criterion(options, _Task)
    for module in (model, criterion):
        module.to(
            "meta", run.half
        ).train()  # some buffers are made by constructors that know no device
    for block in blocks:
        route_evenly(block, grouped=_is_grouped(run, block.experts.w1))
    return model, criterion


def _is_grouped(run: Run, weight: Tensor) -> bool:
    """Whether the GPU that is here computes all experts in one kernel."""
    if run.flags.cpu or not torch.cuda.is_available():
        return False
    return can_group(weight) and one_kernel(torch.device("cuda", 0), weight.dtype)


def _build_optimizer(run: Run, model: nn.Module) -> optim.FairseqOptimizer:
    """As fairseq's trainer does."""
    flags = run.flags
    options = options_of(optim.OPTIMIZER_REGISTRY[flags.optimizer], flags)
    options.lr, options.tpu, options.adam_betas = [1e-3], False, "(0.9, 0.98)"
    options.use_old_adam = True  # torch's: the other asks for a GPU
    parameters = [p for p in model.parameters() if p.requires_grad]
    if run.half is None:
        optimizer = optim.build_optimizer(options, parameters)
    else:
        config = Namespace(
            optimizer=options,
            optimization=Namespace(update_freq=[1]),
            common=Namespace(
                bf16=run.half == torch.bfloat16,
                fp16_no_flatten_grads=flags.fp16_no_flatten_grads,
                fp16_scale_window=1,
                fp16_init_scale=1,
                fp16_scale_tolerance=0.0,
                threshold_loss_scale=None,
                min_loss_scale=0.0,
            ),
        )
        kind = optim.MemoryEfficientFP16Optimizer if run.memory_efficient else optim.FP16Optimizer
        # It asks CUDA on which device the parameters are; the meta device has no number.
        with patch.object(torch.cuda, "current_device", lambda: None):
            optimizer = kind.build_optimizer(config, parameters)
    if flags.zero_sharding == "os" and run.processes > 1:
        (group,) = optimizer.optimizer.param_groups
        group["params"] = largest_share(group["params"], run.processes)
    return optimizer


def largest_share(parameters: list[Tensor], processes: int) -> list[Tensor]:
    """Those whose state the process with most has; experts that others do not have stay with it.

    As fairscale's OSS shares them out: each to the process that has least so far.
    """
    shares: list[list[Tensor]] = [[] for _ in range(processes)]
    sizes = [0] * processes
    for parameter in parameters:
        if not hasattr(parameter, "expert"):
            least = sizes.index(min(sizes))
            shares[least].append(parameter)
            sizes[least] += parameter.numel()
    own = [parameter for parameter in parameters if hasattr(parameter, "expert")]
    return shares[sizes.index(max(sizes))] + own


def _exchange(run: Run, model: nn.Module) -> Tensor:
    """What the gradients are gathered in on their way: one buffer, or the buckets of torch's own DDP."""
    size = sum(p.numel() for p in model.parameters())
    if run.flags.ddp_backend in ("legacy_ddp", "no_c10d"):
        size = min(size, BUFFER)
    return next(model.parameters()).new_empty(size)


def _sample(run: Run) -> dict:
    """A batch as fairseq's data sets give it."""
    tokens = torch.empty(run.sentences, run.length, dtype=torch.long, device="meta")
    net_input = {
        "src_tokens": tokens,
        "src_lengths": torch.empty(run.sentences, dtype=torch.long, device="meta"),
    }
    if not is_language_model(run.flags):
        net_input["prev_output_tokens"] = torch.empty_like(tokens)
    return {
        "net_input": net_input,
        "target": torch.empty_like(tokens),
        "ntokens": tokens.numel(),
    }
