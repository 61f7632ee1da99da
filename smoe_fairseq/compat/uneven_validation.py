"""Lets ``fairseq-validate`` run over several processes that do not all have as many batches.

For fairseq 0.12.2 on any Python. Those with one batch less get an empty one to be in step, which training
replaces and ``fairseq-validate`` hands to the criterion ("KeyError: 'net_input'"). Here an empty batch is
one without loss, of which nothing is logged.
"""

import functools
from types import ModuleType


def validate_uneven_shares(checkpoint_utils: ModuleType) -> None:
    """Training makes its task otherwise: whoever loads it with a model has no batch to replace it by."""
    import torch.distributed as dist

    original = checkpoint_utils.load_model_ensemble_and_task

    @functools.wraps(original)
    def load_model_ensemble_and_task(*arguments, **options):
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

    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task
