"""How bad input ends a command."""


class UsageError(SystemExit):
    """One sentence for the user: printed without a traceback, exit status 1.

    It passes through the ``except Exception`` of fairseq's trainer, which would replace the sentence.
    The Python building blocks in ``modules`` raise ``ValueError`` instead.
    """

    def __init__(self, sentence: str):
        super().__init__(f"error: {sentence}")


class UsageErrorOfAll(UsageError):
    """One that every process of a run comes to by itself, so that none has to tell the others."""
