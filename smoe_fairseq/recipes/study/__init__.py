"""Many runs: train and evaluate them, save their results, and report on them."""
