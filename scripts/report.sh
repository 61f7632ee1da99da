#!/usr/bin/env bash
# Reports the results of a study so far: scripts/report.sh DATASET
# Writes tables, verdicts and pictures into --results-dir (results), from the small files there.
exec "$(dirname "$(readlink -f "$0")")/recipe" report "$@"
