"""One ``fairseq-train`` command: launcher, identity, batch, number type and memory of a run."""
