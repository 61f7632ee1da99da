"""Translations, their scores, and tables of scores."""
