"""Recipes: data sets, methods and tables behind ``scripts/``.

A data set (``configs/datasets``) and a method (``configs/methods``) are YAML files of flags. A
recipe composes them into plain shell commands, prints them and, unless in a dry run, runs them.

- ``commands``: the command line of the recipes and their steps.
- ``settings``, ``datasets``, ``methods``, ``folders``, ``processes``: used by all recipes.
- ``data``: from a publisher's text to what ``fairseq-train`` reads.
- ``training``, ``evaluation``: one run.
- ``study``, ``compare``: many runs, their tables and a report on them.
- ``phrasebook``: the built-in corpus.
"""
