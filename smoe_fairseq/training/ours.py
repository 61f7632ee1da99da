"""Makes every fairseq command train with our trainer."""

from torch import nn

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError


@replaces("fairseq.trainer:Trainer.__new__")
def make_our_trainer(original, cls, *arguments, **options):
    """Make ``Trainer(...)`` an `SMoETrainer`; subclasses of fairseq's Trainer do not change.

    They raise UsageError for a model that only ours trains.

    ``fairseq_cli.train`` imports the class before it reads ``--user-dir``, so replacing the name in the
    module would be too late. Our class is imported here, since it needs fairseq's.
    """
    from smoe_fairseq.training.trainer import SMoETrainer, Trainer, learns_by_updates

    if cls is Trainer:
        return original(SMoETrainer)
    models = [each for each in (*arguments, *options.values()) if isinstance(each, nn.Module)]
    if not issubclass(cls, SMoETrainer) and (flag := learns_by_updates(models)):
        raise UsageError(
            f"{flag} with {cls.__name__}: expected a subclass of smoe_fairseq.training.trainer.SMoETrainer"
        )
    return original(cls)
