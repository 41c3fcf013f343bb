#!/usr/bin/env bash
# One run on several machines of a Slurm cluster: sbatch examples/cluster/slurm.sh
# Ray starts on all of them, the run begins on the first, and Ray ends with it. The job can be
# submitted again with the same folder: it goes on from the last checkpoint.
#SBATCH --job-name=bayflower
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --output=bayflower-%j.log
# With GPUs, add: #SBATCH --gpus-per-node=4
set -euo pipefail

OUT=${OUT:-runs/cluster}          # on a file system that the first machine keeps
PORT=${PORT:-6379}
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RESUME=()
if [ -e "$OUT/checkpoint.safetensors" ]; then RESUME=(--resume); fi

# bayflower is installed on all machines alike, with the extra `simulation`
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  ray symmetric-run --address "$FIRST:$PORT" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" --disable-usage-stats -- \
  env RAY_ADDRESS="$FIRST:$PORT" \
  bayflower run fedmap --engine fused --workers auto --dataset synthetic --clients 200 \
  --rounds 100 --set checkpoint_every=5 --set worker_block=3 --out "$OUT" "${RESUME[@]}"
