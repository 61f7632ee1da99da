"""SMoE for fairseq: the door through which fairseq (``--user-dir``) and Python come in.

Importing the package registers its models and criterion with fairseq and opens safe checkpoint
loading. Nothing heavy is loaded for that: registration takes place once fairseq has been imported,
which for ``--user-dir`` is at once, and for a light command such as ``smoe path`` is never.
"""

from smoe_fairseq.compat import install, require_fairseq, when_imported

__version__ = "0.1.0"

require_fairseq()
install()


def _register(fairseq) -> None:
    import smoe_fairseq.criterions
    import smoe_fairseq.models  # noqa: F401
    from smoe_fairseq.distributed.additions import install as add_to_fairseq

    add_to_fairseq()


when_imported("fairseq", _register)
