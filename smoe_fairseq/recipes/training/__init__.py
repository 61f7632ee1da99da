"""``scripts/train.sh``: one command of ``fairseq-train``, foretold, and its run's identity."""
