#!/usr/bin/env bash
# Fetches (or takes from RAW=folder), segments and binarises a data set: scripts/prepare.sh DATASET [flags of the
# subword step, such as --vocab-size 500]. WORKERS: processes of each step that has several (all cores).
# DRY_RUN=1 prints the commands only. Folders: DATA_DIR (data), RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" prepare "$@"
