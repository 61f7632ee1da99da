"""Cost of a model, requested capacity of its tokens, and the paper's numbers for both."""
