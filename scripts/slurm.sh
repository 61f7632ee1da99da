#!/usr/bin/env bash
# Trains on a SLURM cluster: scripts/slurm.sh DATASET METHOD [--nodes 1] [--gpus 8] [flags of train.sh]
# sbatch's variables set the rest, such as SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT.
# Before preemption or its time limit, a job requeues itself; it resumes from its last checkpoint. --dry-run only
# prints the commands.
#SBATCH --job-name=smoe
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@180
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh scripts/...`, where sh is another shell
set -euo pipefail
export NODES="${NODES:-${SLURM_JOB_NUM_NODES:-1}}" GPUS="${GPUS:-${SLURM_GPUS_ON_NODE:-8}}" LAUNCHER=slurm
before=
words=()
for word in "$@"; do  # sbatch needs these values, too
    case $before in
        --nodes) NODES=$word ;;
        --gpus) GPUS=$word ;;
    esac
    case $word in
        --nodes=*) NODES=${word#*=} ;;
        --gpus=*) GPUS=${word#*=} ;;
        --dry-run) export DRY_RUN=1 && continue ;;  # not of the job
        -h | --help) exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/train.sh" --help ;;
    esac
    before=$word
    words+=("$word")
done
set -- ${words[@]+"${words[@]}"}

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    SMOE_SCRIPTS=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
    submit=(sbatch --export="ALL,SMOE_SCRIPTS=$SMOE_SCRIPTS"  # The job runs a copy of this file, elsewhere.
        --nodes="$NODES" --gpus-per-node="$GPUS" "$SMOE_SCRIPTS/slurm.sh" "$@")
    if [[ ${DRY_RUN:-0} == 0 ]]; then
        DRY_RUN=1 "$SMOE_SCRIPTS/train.sh" "$@" > /dev/null  # Errors show now, not in the queue.
        exec "${submit[@]}"
    fi
    printf '%q ' "${submit[@]}"
    printf '\n'
    exec "$SMOE_SCRIPTS/train.sh" "$@"
fi

# SLURM sends USR1 three minutes before the end, and TERM, on which training stops by itself.
trap 'echo "putting job $SLURM_JOB_ID into the queue again"; scontrol requeue "$SLURM_JOB_ID" || true' USR1
trap 'echo "waiting for training to stop"' TERM

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not inherit it.
"${SMOE_SCRIPTS:-$SLURM_SUBMIT_DIR/scripts}/train.sh" "$@" &
training=$!
# A signal ends `wait`, so repeat it until training has ended.
while true; do
    status=0
    wait "$training" || status=$?
    kill -0 "$training" 2> /dev/null || exit "$status"
done
