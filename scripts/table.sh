#!/usr/bin/env bash
# Prints the scores of all methods: scripts/table.sh DATASET; scripts/table.sh --help lists its flags.
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" table "$@"
