"""Patches of fairseq's training: processes, precision, averages and written checkpoints."""

import logging
import math
import shutil
from collections import OrderedDict
from types import SimpleNamespace

from smoe_fairseq.files import whole_file

from .replacing import patches

logger = logging.getLogger(__name__)

# Lets ``--cpu`` and the stock encoder train over several processes with ``--ddp-backend pytorch_ddp``,
# fairseq's default.
#
# For fairseq 0.12.2 on any torch. It passes a GPU to torch's wrapper even if the model is on the CPU, which
# the wrapper refuses ("device_ids and output_device arguments only work with ... GPU modules"). And its
# encoder layer has copies of its weights for torch's fused kernel, which never get gradients, so the wrapper
# fails at the second update ("Expected to have finished reduction in the prior iteration"); here the wrapper
# ignores these parameters.


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


# Lets half precision continue after an overflow without a GPU.
#
# For fairseq 0.12.2 on any torch. Its trainer skips an update whose gradients overflow, and then calls
# ``.cuda()`` on a norm of 0 on any device, which fails with "Torch not compiled with CUDA enabled". The loss
# scale starts high and is lowered by such overflows, so ``--fp16 --cpu`` mostly fails at the first updates.


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
# For fairseq 0.12.2 on any torch. If a gradient is NaN, it repeats the batch with hooks on every module.
# Its backward hooks, of a deprecated kind, raise StopIteration for an encoder, whose output is a dictionary
# of lists, and so hide the cause. Forward hooks find the module as well. The log contains the norms of the
# gradients, but not the gradients: these are hundreds of lines, which would hide the module's.


@patches("fairseq.nan_detector:NanDetector.add_hooks")
def hook_forward_only(_, detector, module):
    detector.fhooks.append(module.register_forward_hook(detector.fhook_fn))


@patches("fairseq.nan_detector")
def leave_out_gradients(nan_detector):
    nan_detector.logger.addFilter(lambda record: not record.getMessage().startswith("gradients: "))


# Recomputes checkpointed activations in their original types.
#
# For fairseq 0.12.2 on any torch. Its activation checkpointing recomputes a layer in the backward pass, but
# outside the autocast context of the forward pass: in float32 instead of half precision. The gradients are
# then those of other activations, and a gate may choose other experts.


@patches("fairseq.modules.checkpoint_activations:CheckpointFunction.forward")
def keep_autocast(original, ctx, *arguments):
    import torch

    ctx.autocast_cpu, ctx.autocast_cuda = (
        torch.autocast(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d))
        for d in ("cpu", "cuda")
    )
    return original(ctx, *arguments)


@patches("fairseq.modules.checkpoint_activations:CheckpointFunction.backward")
def recompute_in_autocast(original, ctx, *gradients):
    with ctx.autocast_cpu, ctx.autocast_cuda:
        return original(ctx, *gradients)


# Lets ``--store-ema`` average models with integers or shared weights, and pre-norm models' last layer norms.
#
# For fairseq 0.12.2 on any torch. It multiplies the whole state dict by the decay, in place: shared weights
# once for each of their names, and integers (a hash gate's table, the step counts of a bias or of batch
# norm), which torch refuses. Those are added to its keys that are copied. And it removes the norms from a
# state without ``version``, as averages are.


@patches("fairseq.models.ema.ema:EMA._step_internal")
def average_once(original, ema, model, updates=None):
    state, averages = model.state_dict(), ema.fp32_params or ema.model.state_dict()
    names = {(x.data_ptr(), x.shape): name for name, x in averages.items()}.values()
    once = {n: x for n, x in state.items() if n in names or n not in averages}
    ema.skip_keys = {*ema.skip_keys, *(n for n, x in once.items() if not x.is_floating_point())}
    original(ema, SimpleNamespace(state_dict=lambda: once), updates)


@patches("fairseq.models.ema.ema:EMA.restore")
def keep_versions(original, ema, state_dict, build_fp32_params=False):
    versions = {name: x for name, x in ema.model.state_dict().items() if "version" in name}
    original(ema, {**versions, **state_dict}, build_fp32_params)


# Lets ``--store-ema`` start from a checkpoint without averages.
#
# For fairseq 0.12.2 on any torch. It tries to use the checkpoint's parameters as the first average after it
# has removed them, so resuming ends in ``KeyError: 'model'``. Here the loaded model's parameters are used.


@patches("fairseq.trainer:Trainer.load_checkpoint")
def start_average_at_model(original, trainer, filename, *others, **options):
    ema = trainer.cfg.ema
    if not ema.store_ema:
        return original(trainer, filename, *others, **options)
    ema.store_ema = False
    try:
        extra_state = original(trainer, filename, *others, **options)
    finally:
        ema.store_ema = True
    if extra_state is None:
        return None
    parameters = extra_state.get("ema")
    if parameters is None:
        logger.warning("%s has no average (--store-ema): it starts at its parameters", filename)
        parameters = trainer.get_model().state_dict()
    trainer.ema.restore(parameters)
    if ema.ema_fp32:
        trainer.ema.build_fp32_params(extra_state.get("ema_fp32_params", parameters))
    trainer.ema.update_freq_counter = trainer.get_num_updates() % ema.ema_update_freq
    return extra_state


# Lets one rank read a checkpoint and broadcast it.
#
# For fairseq 0.12.2 on torch 2.6 and later. It sends the checkpoint's content as a pickle, which the other
# ranks read with ``torch.load``. That refuses types such as those of omegaconf ("Unsupported global:
# omegaconf.dictconfig.DictConfig"), so no run of several ranks could resume. torch's function, for objects
# of the same program, supports all types.


@patches("fairseq.distributed.utils:_broadcast_object_slow")
def broadcast_any_state(_, obj, src_rank, group, dist_device):
    import torch.distributed as dist

    values = [obj]
    dist.broadcast_object_list(values, src_rank, group, dist_device)
    return values[0]


# Gathers logs of ranks on any device, and of any size.
#
# For fairseq 0.12.2 on any torch. It gathers logs in a buffer on the GPU, even with ``--cpu`` and gloo
# ("type torch.cuda.ByteTensor not available"), of ``--all-gather-list-size`` bytes, which is too small for
# the logs of a hundred batches of ``fairseq-validate`` ("encoded data size exceeds max_size"). torch's
# function has neither limit.


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


# Ignores ``--zero-sharding os`` for a single process.
#
# For fairseq 0.12.2 on any torch, which would fail with "Default process group has not been initialized".


@patches("fairseq.optim.shard:shard_")
def leave_one_process_whole(original, optimizer, group):
    import torch.distributed as dist

    if dist.is_initialized():
        original(optimizer, group)


# Lets ``fairseq-validate`` run on several ranks with different numbers of batches.
#
# For fairseq 0.12.2 on any Python. Ranks with one batch less get an empty one, which training replaces, but
# ``fairseq-validate`` passes to the criterion ("KeyError: 'net_input'"). Here it has no loss and no log.


@patches("fairseq.checkpoint_utils:load_model_ensemble_and_task")
def validate_uneven_shares(original, *arguments, **options):
    """Training is not affected, since it creates its task in another way."""
    import torch.distributed as dist

    models, cfg, task = original(*arguments, **options)
    if not dist.is_initialized():
        return models, cfg, task
    valid_step, reduce_metrics = task.valid_step, task.reduce_metrics

    def valid_step_or_zero(sample, model, criterion, **options):
        return valid_step(sample, model, criterion, **options) if sample else (0.0, 0, {})

    def reduce_nonempty(logging_outputs, criterion):
        return reduce_metrics([log for log in logging_outputs if log], criterion)

    task.valid_step, task.reduce_metrics = valid_step_or_zero, reduce_nonempty
    return models, cfg, task


# Lets training continue if a validation yields no value of ``--best-checkpoint-metric``.
#
# For fairseq 0.12.2 on any Python. If the log lacks the metric, training ends in a KeyError after the first
# epoch, before anything is saved; and NaN stays the best value for ever. Here a missing metric is NaN, and a
# checkpoint with NaN is saved without being compared.


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


# Writes checkpoints atomically.
#
# For fairseq 0.12.2 on any Python. It writes and renames a temporary file for the first file of a save, but
# copies that over ``checkpoint_last.pt`` and ``checkpoint_best.pt``: a run that is killed meanwhile cannot
# resume. A full disk ends in torch's stack trace, after two more attempts in the same partial file. Here
# every file is written under a temporary name, synced and renamed (a link too, which may point to another
# checkpoint), and errors are one sentence.


@patches("fairseq.file_io:PathManager.copy")
def copy_whole(original, source, target, overwrite=False):
    from fairseq.file_io import PathManager

    if not PathManager.supports_rename(target):
        return original(source, target, overwrite)
    with whole_file(target, follow=False) as partial:
        shutil.copyfile(source, partial)
    return target


@patches("fairseq.checkpoint_utils:torch_persistent_save")
def save_whole(original, obj, filename, async_write=False):
    import torch
    from fairseq.file_io import PathManager

    if async_write or not PathManager.supports_rename(filename):
        return original(obj, filename, async_write)
    with whole_file(filename, follow=False) as partial, open(partial, "wb") as file:
        torch.save(obj, file)
