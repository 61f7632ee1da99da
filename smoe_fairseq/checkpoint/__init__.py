"""Checkpoints of runs whose experts are spread over processes: sets of files, one per process."""
