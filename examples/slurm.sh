#!/usr/bin/env bash
# Two machines of eight GPUs: sbatch examples/slurm.sh. One launch.sh on each starts a rank per GPU.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive --cpus-per-task=64
#SBATCH --signal=TERM@600  # 10 minutes for the step and the save before the time is up
set -euo pipefail
export NNODES=$SLURM_NNODES
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # two jobs on one machine need two ports
bash launch.sh python -c ""                             # installs once, before all machines want to
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash launch.sh grpo.py "$@"' -- "$@"
