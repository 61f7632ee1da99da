#!/usr/bin/env bash
# Downloads a data set (or reads --raw FOLDER), splits it into subwords and binarises it: scripts/prepare.sh
# DATASET [flags of the subword step, such as --vocab-size 500]. --help lists the other flags.
exec "$(dirname "$(readlink -f "$0")")/recipe" prepare "$@"
