#!/usr/bin/env bash
# Trains a method, or resumes: scripts/train.sh DATASET METHOD [flags of fairseq-train]
# DRY_RUN=1 prints the commands only. Folders: DATA_DIR (data), RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "${BASH_SOURCE[0]}")/recipe" train "$@"
