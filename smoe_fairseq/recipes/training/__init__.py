"""One ``fairseq-train`` command: where it runs, what the run is, what it takes."""
