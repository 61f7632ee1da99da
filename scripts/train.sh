#!/usr/bin/env bash
# Trains a method, or resumes: scripts/train.sh DATASET METHOD [flags of fairseq-train]
# GPUS: how many of this machine (all), 0 for none; where it has none, or with --cpu, processes on the CPU.
# NODES (1); LAUNCHER: plain, torchrun or slurm (as they need).
# SEED: another than the data set's, with a folder of its own (runs/DATASET/METHOD.seed-2).
# BATCH: tokens per update, by the data set's name for it (paper) or as a number.
# --force-resume behind the method: go on with other flags than the run was started with.
# FORECAST=0 leaves out what it says of memory before it starts, which takes some seconds.
# DRY_RUN=1 prints the commands only. Folders: DATA_DIR (data), RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" train "$@"
