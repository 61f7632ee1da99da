"""Experts spread over the processes of ``fairseq-train`` (``--expert-parallel``).

The modules do the exchange of tokens (modules/placement.py, modules/dispatch.py). What fairseq has to know of
it is here, a file for each concern: trainer.py is a subclass of fairseq's trainer; the others that change
fairseq have a function that is called with the module it adds to (``ADDITIONS`` of compat/__init__.py has the
list). Runs without sharded experts stay as they are.
"""
