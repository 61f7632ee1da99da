#!/usr/bin/env bash
# Prints the scores of all methods: scripts/table.sh DATASET; scripts/table.sh --help lists its flags.
exec "$(dirname "$(readlink -f "$0")")/recipe" table "$@"
