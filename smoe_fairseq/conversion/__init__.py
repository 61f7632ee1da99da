"""Makes one checkpoint of another."""
