#!/usr/bin/env bash
# Trains an SMoE on the built-in corpus, translates with it and shows what it does: scripts/demo.sh [METHOD]
# A few minutes on two CPU cores. An interrupted run resumes.
export PYTHONWARNINGS=ignore
exec "$(dirname "$(readlink -f "$0")")/recipe" demo phrasebook "${@:-smoe-2-2-2-2}"
