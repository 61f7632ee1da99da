#!/usr/bin/env bash
# Trains and scores methods that are not done: scripts/study.sh DATASET [METHOD...] [flags of fairseq-train]
# SEEDS="1 2 3": seeds of each (the data set's). JOBS: how many runs at a time (on a CPU as many as it has cores,
# on GPUs one that has all). An interrupted study goes on where it stopped. What it finds is in RESULTS_DIR (results).
# DRY_RUN=1 prints the commands only. Folders: DATA_DIR (data), RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" study "$@"
