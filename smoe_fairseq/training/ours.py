"""Makes every fairseq command train with our trainer."""

from types import ModuleType

from torch import nn

from smoe_fairseq.errors import UsageError


def ask_for_ours(trainer: ModuleType) -> None:
    """Make ``Trainer(...)`` return an `SMoETrainer`; subclasses of fairseq's Trainer do not change.

    They raise UsageError for a model that only ours trains.

    ``fairseq_cli.train`` imports the class before it reads ``--user-dir``, so replacing the name in the
    module would come too late. Instead, the class's ``__new__`` is changed. It imports our class, which
    needs fairseq's, when it is called.
    """
    fairseqs = trainer.Trainer

    def __new__(cls, *arguments, **options):
        from smoe_fairseq.training.trainer import SMoETrainer, learns_by_updates

        if cls is fairseqs:
            return object.__new__(SMoETrainer)
        models = [each for each in (*arguments, *options.values()) if isinstance(each, nn.Module)]
        if not issubclass(cls, SMoETrainer) and (flag := learns_by_updates(models)):
            raise UsageError(
                f"{flag} with {cls.__name__}: only SMoETrainer of smoe_fairseq.training.trainer updates such "
                "gates; expected a subclass of it"
            )
        return object.__new__(cls)

    fairseqs.__new__ = staticmethod(__new__)
