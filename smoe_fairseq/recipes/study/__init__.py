"""``scripts/study.sh``: every method and seed of a data set, and what they show."""
