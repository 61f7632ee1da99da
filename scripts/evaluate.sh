#!/usr/bin/env bash
# Translates the test sets and scores them: scripts/evaluate.sh DATASET METHOD [flags of fairseq-generate]
# Directions that are done are not repeated, also after an interruption.
# scripts/evaluate.sh --help lists the other flags, such as --seed 2, --jobs 4 and --dry-run.
exec "$(dirname "$(readlink -f "$0")")/recipe" evaluate "$@"
