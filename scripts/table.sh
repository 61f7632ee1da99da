#!/usr/bin/env bash
# Prints the scores of all methods: scripts/table.sh DATASET
# Folders: RUN_DIR (runs), CONFIG_DIR (configs).
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" table "$@"
