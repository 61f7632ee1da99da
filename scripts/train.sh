#!/usr/bin/env bash
# Trains a method, or resumes: scripts/train.sh DATASET METHOD [flags of fairseq-train]
# scripts/train.sh --help lists the other flags, such as --gpus 8, --seed 2, --precision bf16 and --dry-run, and
# the environment variables that are their defaults. Several machines also need MASTER_ADDR and MASTER_PORT.
exec "$(dirname "$(readlink -f "$0")")/recipe" train "$@"
