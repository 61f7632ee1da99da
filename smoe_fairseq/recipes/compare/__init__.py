"""Comparing trained systems: the table, ``--compare``, and the statements of a study."""
