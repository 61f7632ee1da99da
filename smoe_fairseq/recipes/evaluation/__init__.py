"""Translations, their scores, and tables of these."""
