"""The kinds of gate, a file for each.

A block asks of a gate that it is called with tokens and a mask and answers with a `Routing`; with a label per
token too where its `asks_for` says so. make.py makes those of a block.
"""
