"""``smoe table``: scores side by side, beside the paper's, and compared."""
