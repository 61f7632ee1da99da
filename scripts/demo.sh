#!/usr/bin/env bash
# Trains an SMoE on the built-in corpus, translates with it and shows what it does: scripts/demo.sh [METHOD]
# A few minutes on two CPU cores. An interrupted run goes on where it stopped.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
method=${1:-smoe-2-2-2-2}

# The commands print enough as it is: training its progress, the rest only what went wrong.
export PYTHONWARNINGS=ignore
"$here/prepare.sh" phrasebook
"$here/train.sh" phrasebook "$method"
export LOGLEVEL=WARNING
"$here/evaluate.sh" phrasebook "$method"
"$here/recipe" demo phrasebook "$method"
