"""From a publisher's text to what ``fairseq-train`` reads; ``prepare`` has the steps in order."""
