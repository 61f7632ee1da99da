#!/usr/bin/env bash
# Translates the test sets and scores them: scripts/evaluate.sh DATASET METHOD [flags of fairseq-generate]
# GPUS: one process on each (all of this machine); JOBS: how many processes (on a CPU as many as it has cores).
# What is done is kept and not done again, also after an interruption.
# SEED: another than the data set's, with a folder of its own (runs/DATASET/METHOD.seed-2).
# COMET: the program comet-score, of another environment; COMET_MODEL: its model (Unbabel/wmt22-comet-da).
# DRY_RUN=1 prints the commands only. Folders: DATA_DIR (data), RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" evaluate "$@"
