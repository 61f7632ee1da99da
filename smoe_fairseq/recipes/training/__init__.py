"""One ``fairseq-train`` command: its launcher, identity, batch, precision and memory."""
