#!/usr/bin/env bash
# Downloads (or takes from --raw FOLDER), segments and binarises a data set: scripts/prepare.sh DATASET [flags
# of the subword step, such as --vocab-size 500]. scripts/prepare.sh --help lists the other flags.
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/recipe" prepare "$@"
