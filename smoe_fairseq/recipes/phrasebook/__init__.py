"""The built-in corpus: English with Northern Sotho, Malay, Tagalog and Catalan.

Meanings are drawn from a small hand-written lexicon and put into each language with its own word
order and agreement: ``python -m smoe_fairseq.recipes.phrasebook OUTPUT_DIR``.
"""

from smoe_fairseq.recipes.phrasebook.corpus import write_corpus

__all__ = ["write_corpus"]
