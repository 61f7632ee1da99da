"""Experts spread over the processes of ``fairseq-train`` (``--expert-parallel``).

The modules do the exchange of tokens (modules/placement.py, modules/dispatch.py). What fairseq's trainer
has to know of it is here, a file for each concern; each has a function that is called with the fairseq
module it adds to, and leaves runs without sharded experts as they are (additions.py has the list).
"""
