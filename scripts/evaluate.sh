#!/usr/bin/env bash
# Translates the test sets and scores them: scripts/evaluate.sh DATASET METHOD [flags of fairseq-generate]
# SEED: another than the data set's, with a folder of its own (runs/DATASET/METHOD.seed-2).
# DRY_RUN=1 prints the commands only. Folders: DATA_DIR (data), RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "${BASH_SOURCE[0]}")/recipe" evaluate "$@"
