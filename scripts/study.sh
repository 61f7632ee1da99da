#!/usr/bin/env bash
# Trains and scores methods that are not done: scripts/study.sh DATASET [METHOD...] [flags of fairseq-train]
# An interrupted study resumes where it stopped. Its results are in --results-dir (results).
# scripts/study.sh --help lists the other flags, such as --seeds 1,2,3, --jobs 4 and --dry-run.
exec "$(dirname "$(readlink -f "$0")")/recipe" study "$@"
