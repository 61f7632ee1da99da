"""``scripts/evaluate.sh``: translations of all directions, and their scores."""
