#!/usr/bin/env bash
# Submits the training and the scoring of a whole table to SLURM: scripts/slurm_table.sh DATASET [METHOD...]
# By default the methods of the paper's table. Each is trained by a job of slurm.sh, which says what NODES, GPUS
# and sbatch's own variables do, and scored by a job with one GPU that starts when training has ended.
# SEED, BATCH and folders are as in train.sh and evaluate.sh. DRY_RUN=1 prints the sbatch commands only.
# docs/reproduce.md estimates the hours that this takes.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
dataset=${1:?scripts/slurm_table.sh DATASET [METHOD...]}
shift
if [[ $# == 0 ]]; then
    names=$("$scripts/recipe" methods "$dataset")
    mapfile -t methods <<< "$names"
else
    methods=("$@")
fi

for method in "${methods[@]}"; do
    if [[ ${DRY_RUN:-0} == 0 ]]; then
        said=$("$scripts/slurm.sh" "$dataset" "$method")
        job=${said##* } # Submitted batch job 123
        echo "$said: $dataset $method"
    else
        # Its first line; those of training follow.
        said=$(FORECAST=0 "$scripts/slurm.sh" "$dataset" "$method")
        job="JOB_OF_${method^^}"
        echo "${said%%$'\n'*}"
    fi
    score=(sbatch --dependency="afterok:$job" --kill-on-invalid-dep=yes --job-name=smoe-score --nodes=1
        --gpus-per-node=1 --cpus-per-task=8 --output=%x-%j.log
        --wrap "NODES=1 GPUS=1 $(printf '%q ' "$scripts/evaluate.sh" "$dataset" "$method")")
    if [[ ${DRY_RUN:-0} == 0 ]]; then
        "${score[@]}"
    else
        printf '%q ' "${score[@]}"
        echo
    fi
done
