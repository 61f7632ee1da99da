"""What is written down in YAML: data sets and methods (``configs/``), and the paper's tables."""
