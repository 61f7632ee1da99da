"""Patches of fairseq's training: processes, precision, averages and written checkpoints."""

import logging
import math
import shutil
from collections import OrderedDict

from smoe_fairseq.files import whole_file

from .replacing import patches

logger = logging.getLogger(__name__)

# Lets ``--cpu`` and the stock encoder train over several processes with ``--ddp-backend pytorch_ddp``,
# fairseq's default.
#
# For fairseq 0.12.2 on any torch. It names a GPU to torch's wrapper even where the model is on the CPU, and
# the wrapper refuses ("device_ids and output_device arguments only work with ... GPU modules"). And its
# encoder layer keeps copies of its weights for torch's fused kernel, parameters that no gradient ever
# reaches, over which the wrapper ends the second update ("Expected to have finished reduction in the prior
# iteration"): it is told to leave these alone, since nothing computes with them.


STOCK_LAYER_COPIES = [
    f"{of}_{kind}" for of in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")
]


@patches("fairseq.models.distributed_fairseq_model:DistributedDataParallel")
def wrap_any_model(wrapper, module, device_ids=None, output_device=None, **options):
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Layer

    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    layers = [name for name, each in module.named_modules() if isinstance(each, Layer)]
    wrapper._set_params_and_buffers_to_ignore_for_model(
        module, [f"{layer}.{copy}" for layer in layers for copy in STOCK_LAYER_COPIES]
    )
    return wrapper(module, device_ids, output_device, **options)


# Lets half precision go on after an overflow where there is no GPU.
#
# For fairseq 0.12.2 on any torch. Its trainer skips an update whose gradients overflow, and then makes a
# norm of 0 ``.cuda()``, whatever it trains on, which ends in "Torch not compiled with CUDA enabled". The
# loss scale starts high and comes down by such overflows, so ``--fp16 --cpu`` seldom got past its first
# updates.


@patches("fairseq.trainer:Trainer.train_step")
def skip_overflow_on_cpu(original, *arguments, **options):
    import torch  # this package is imported with fairseq, not before

    if torch.cuda.is_available():
        return original(*arguments, **options)
    cuda = torch.Tensor.cuda
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    try:
        return original(*arguments, **options)
    finally:
        torch.Tensor.cuda = cuda


# Lets fairseq find the module whose output is NaN.
#
# For fairseq 0.12.2 on any torch. When a gradient is NaN it runs the batch again with hooks on every
# module, backward ones of a kind that torch has deprecated: for an encoder, whose output is a dictionary of
# lists, they end in StopIteration, which hides the cause. Forward hooks find the module as well, and the
# norms of all gradients are logged in any case.


@patches("fairseq.nan_detector:NanDetector.add_hooks")
def hook_forward_only(_, detector, module):
    detector.fhooks.append(module.register_forward_hook(detector.fhook_fn))


# Recomputes checkpointed activations in the types that they had.
#
# For fairseq 0.12.2 on any torch. Its activation checkpointing runs a layer again in the backward pass, but
# outside the autocast context of the forward pass: in float32, where half precision was recorded. The
# gradients are then of other activations, and a gate may choose other experts than it did.


@patches("fairseq.modules.checkpoint_activations:CheckpointFunction.forward")
def keep_autocast(original, ctx, *arguments):
    import torch

    ctx.of_cpu, ctx.of_cuda = (
        torch.autocast(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d))
        for d in ("cpu", "cuda")
    )
    return original(ctx, *arguments)


@patches("fairseq.modules.checkpoint_activations:CheckpointFunction.backward")
def recompute_in_autocast(original, ctx, *gradients):
    with ctx.of_cpu, ctx.of_cuda:
        return original(ctx, *gradients)


# Lets ``--store-ema`` average a model that has whole numbers in its state.
#
# For fairseq 0.12.2 on any torch. It multiplies everything in the state dict by the decay, in place, which
# torch refuses for integers: a hash gate's table, the steps of a bias, or what batch norm has counted. An
# average of them would mean nothing either. fairseq knows keys that are copied instead; they are made to be
# among them.


@patches("fairseq.models.ema.ema:EMA.__init__")
def copy_integers(original, ema, *arguments, **options):
    original(ema, *arguments, **options)
    state = ema.model.state_dict()
    integers = {n for n, value in state.items() if not value.is_floating_point()}
    ema.skip_keys = {*ema.skip_keys, *integers}


# Lets ``--store-ema`` begin at a checkpoint that was saved without.
#
# For fairseq 0.12.2 on any torch. It means to take the checkpoint's own parameters as the first average,
# and has removed them by then: resuming ends in ``KeyError: 'model'``. By then they are the model's.


@patches("fairseq.trainer:Trainer.load_checkpoint")
def begin_average_at_model(original, trainer, filename, *others, **options):
    ema = trainer.cfg.ema
    if not ema.store_ema:
        return original(trainer, filename, *others, **options)
    ema.store_ema = False
    try:
        extra_state = original(trainer, filename, *others, **options)
    finally:
        ema.store_ema = True
    if extra_state is not None:
        _restore(trainer, extra_state, filename)
    return extra_state


def _restore(trainer, extra_state: dict, filename: str) -> None:
    parameters = extra_state.get("ema")
    if parameters is None:
        logger.warning("%s has no average (--store-ema): it begins at its parameters", filename)
        parameters = trainer.get_model().state_dict()
    trainer.ema.restore(parameters)
    if trainer.cfg.ema.ema_fp32:
        trainer.ema.build_fp32_params(extra_state.get("ema_fp32_params", parameters))


# Lets a checkpoint that one process has read reach the others of its run.
#
# For fairseq 0.12.2 on torch 2.6 and later. It sends the checkpoint's content as a pickle, which the others
# read with ``torch.load``; there that refuses all types but plain ones ("Unsupported global:
# omegaconf.dictconfig.DictConfig"), so that no run of several processes could be resumed. What one process
# has made of a file, torch's own function sends to the others.


@patches("fairseq.distributed.utils:_broadcast_object_slow")
def send_any_state(_, obj, src_rank, group, dist_device):
    import torch.distributed as dist

    values = [obj]
    dist.broadcast_object_list(values, src_rank, group, dist_device)
    return values[0]


# Lets processes tell one another their logs without a GPU, however long these are.
#
# For fairseq 0.12.2 on any torch. It gathers them in a buffer on the GPU, also with ``--cpu`` and gloo
# ("type torch.cuda.ByteTensor not available"), and in one of ``--all-gather-list-size`` bytes, which the
# logs of a hundred batches of ``fairseq-validate`` are too long for ("encoded data size exceeds max_size").
# torch's own function for this takes whatever device the group communicates on, and any size.


@patches("fairseq.distributed.utils:all_gather_list")
def gather_on_any_device(original, data, group=None, max_size=16384):
    import torch.distributed as dist
    from fairseq.distributed import utils
    from fairseq.utils import move_to_cpu

    group = utils.get_global_group() if group is None else group
    if utils.use_xla():
        return original(data, group, max_size)
    values = [None] * utils.get_world_size(group)
    dist.all_gather_object(values, move_to_cpu(data), group=group)
    return values


# Lets a single process use ``--zero-sharding os``, which has no effect then.
#
# For fairseq 0.12.2 on any torch. Each process keeps the optimizer's state of a part of the parameters, by
# fairscale; one process ends in "Default process group has not been initialized".


@patches("fairseq.optim.shard:shard_")
def leave_one_process_whole(original, optimizer, group):
    import torch.distributed as dist

    if dist.is_initialized():
        original(optimizer, group)


# Lets ``fairseq-validate`` run over several processes that do not all have as many batches.
#
# For fairseq 0.12.2 on any Python. Those with one batch less get an empty one to be in step, which training
# replaces and ``fairseq-validate`` hands to the criterion ("KeyError: 'net_input'"). Here an empty batch is
# one without loss, of which nothing is logged.


@patches("fairseq.checkpoint_utils:load_model_ensemble_and_task")
def validate_uneven_shares(original, *arguments, **options):
    """Training is not affected: it makes its task another way, and replaces empty batches itself."""
    import torch.distributed as dist

    models, cfg, task = original(*arguments, **options)
    if not dist.is_initialized():
        return models, cfg, task
    valid_step, reduce_metrics = task.valid_step, task.reduce_metrics

    def valid_step_of_any(sample, model, criterion, **more):
        return valid_step(sample, model, criterion, **more) if sample else (0.0, 0, {})

    def reduce_some_metrics(logging_outputs, criterion):
        return reduce_metrics([log for log in logging_outputs if log], criterion)

    task.valid_step, task.reduce_metrics = valid_step_of_any, reduce_some_metrics
    return models, cfg, task


# Lets training go on where a validation yields no number to compare checkpoints by.
#
# For fairseq 0.12.2 on any Python. A ``--best-checkpoint-metric`` that the log lacks ends it in a KeyError
# behind the first epoch, before anything is saved; and one NaN is the best from then on. Here the metric is
# NaN where it is missing, and a checkpoint without a number is saved without being compared.


class _Values(OrderedDict):
    def __missing__(self, key):
        return math.nan


@patches("fairseq.logging.meters:MetersDict.get_smoothed_values")
def give_nan_for_missing(original, meters):
    return _Values(original(meters))


@patches("fairseq.checkpoint_utils:save_checkpoint")
def save_without_number(original, cfg, trainer, epoch_itr, val_loss):
    if val_loss is not None and math.isnan(val_loss):
        logger.warning(
            "--best-checkpoint-metric %s: the validation yields no such number; checkpoint_best.pt stays",
            cfg.best_checkpoint_metric,
        )
        val_loss = None
    return original(cfg, trainer, epoch_itr, val_loss)


# Keeps the old checkpoint until the new one is complete, whatever ends the run in between.
#
# For fairseq 0.12.2 on any Python. It writes the first file of a save beside its place and renames it, but
# copies that over ``checkpoint_last.pt`` and ``checkpoint_best.pt`` byte by byte: a run that is killed
# meanwhile leaves half a file under the very name it would resume from. And a full disk ends in torch's
# stack trace, after two more attempts in the same half-written file. Here every file is written beside its
# place, brought to the disk and renamed, and what the system refuses is one sentence.


@patches("fairseq.file_io:PathManager.copy")
def copy_whole(original, source, target, overwrite=False):
    from fairseq.file_io import PathManager

    if not PathManager.supports_rename(target):
        return original(source, target, overwrite)
    with whole_file(target) as partial:
        shutil.copyfile(source, partial)
    return target


@patches("fairseq.checkpoint_utils:torch_persistent_save")
def save_whole(original, obj, filename, async_write=False):
    import torch
    from fairseq.file_io import PathManager

    if async_write or not PathManager.supports_rename(filename):
        return original(obj, filename, async_write)
    with whole_file(filename) as partial, open(partial, "wb") as file:
        torch.save(obj, file)
