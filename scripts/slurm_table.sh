#!/usr/bin/env bash
# Submits the training and scoring of a whole table to SLURM: scripts/slurm_table.sh DATASET [METHOD...]
# The default is the methods of the paper's table. Each is trained by a job of slurm.sh, which explains NODES,
# GPUS and sbatch's variables, and then scored by a job with one GPU. SEED, BATCH and folders are as in train.sh
# and evaluate.sh. DRY_RUN=1 only prints the sbatch commands. docs/reproduce.md estimates the hours.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh scripts/...`, where sh is another shell
set -euo pipefail
for word in "$@"; do
    if [[ $word == -* ]]; then
        echo "error: $word: expected DATASET [METHOD...], and variables in place of flags, such as SEED=2" >&2
        exit 2
    fi
done
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
dataset=${1:?scripts/slurm_table.sh DATASET [METHOD...]}
shift
if [[ $# == 0 ]]; then
    names=$("$scripts/recipe" methods "$dataset")
    mapfile -t methods <<< "$names"
else
    methods=("$@")
fi

for method in "${methods[@]}"; do  # errors show before the first job is submitted
    DRY_RUN=1 FORECAST=0 "$scripts/slurm.sh" "$dataset" "$method" > /dev/null
done
for name in SEED BATCH PRECISION DATA_DIR RUN_DIR CONFIG_DIR; do  # of the jobs
    [[ ${DRY_RUN:-0} == 0 || -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
done
for method in "${methods[@]}"; do
    if [[ ${DRY_RUN:-0} == 0 ]]; then
        output=$("$scripts/slurm.sh" "$dataset" "$method")
        job=${output#*batch job }  # Submitted batch job 123 on cluster NAME, or without a cluster
        job=${job%% *}
        echo "$output: $dataset $method"
    else
        # The first line; those of training follow.
        output=$(FORECAST=0 "$scripts/slurm.sh" "$dataset" "$method")
        job="JOB_OF_${method^^}"
        echo "${output%%$'\n'*}"
    fi
    score=(sbatch --export=ALL --dependency="afterok:$job" --kill-on-invalid-dep=yes --job-name=smoe-score --nodes=1
        --gpus-per-node=1 --cpus-per-task=8 --output=%x-%j.log
        --wrap "NODES=1 GPUS=1 $(printf '%q ' "$scripts/evaluate.sh" "$dataset" "$method")")
    if [[ ${DRY_RUN:-0} == 0 ]]; then
        "${score[@]}"
    else
        printf '%q ' "${score[@]}"
        echo
    fi
done
