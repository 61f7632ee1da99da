"""Recipes: data sets, methods and tables behind ``scripts/``.

A data set (``configs/datasets``) and a method (``configs/methods``) are YAML files of flags. A
recipe composes them into plain shell commands, prints them and runs them, the latter
unless ``DRY_RUN`` is set.
"""
