"""What a model costs, what its tokens ask for, and what the paper prints about both."""
