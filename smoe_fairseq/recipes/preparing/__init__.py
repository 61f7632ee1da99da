"""``scripts/prepare.sh``: from a publisher's archive, or text, to what ``fairseq-train`` reads."""
