"""From a publisher's text to what ``fairseq-train`` reads; ``prepare`` runs the steps in order."""
