#!/usr/bin/env bash
# What the runs of a study show that are there so far: scripts/report.sh DATASET
# Writes the table, the paper's claims and the pictures into RESULTS_DIR (results), from the small files there alone.
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" report "$@"
