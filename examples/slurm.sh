#!/bin/bash
# A run on Slurm: sbatch examples/slurm.sh RECIPE.yaml [section.key=value ...]
#
# One task a machine starts Ray; the script itself, on the first machine, starts the run. All machines need the same
# environment, and must see the recipe, the model and the run folder under the same path.
#SBATCH --job-name=octetrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue  # a job that is preempted, or loses a machine, starts again, and the run continues (--resume auto)
set -euo pipefail
gpus=8 # as --gpus-per-node above
export RAY_worker_niceness=0 # Ray's own is 15
RAY_AUTH_TOKEN=$(ray get-auth-token --generate 2>/dev/null) && export RAY_AUTH_TOKEN RAY_AUTH_MODE=token # of Ray 2.52 on
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0  # the interface between the machines; `ip -br addr` lists them

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | cut -d ' ' -f 1):6379

srun --nodes=1 --ntasks=1 --overlap --nodelist="$first" \
  ray start --head --node-ip-address="${address%:*}" --port=6379 --num-gpus="$gpus" --block &
started=$!
until ray status --address="$address" >/dev/null 2>&1; do kill -0 "$started"; sleep 1; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap --kill-on-bad-exit \
    --exclude="$first" ray start --address="$address" --num-gpus="$gpus" --block &
  started=$!
fi
until [ "$(ray status --address="$address" 2>/dev/null | grep -c ' node_')" -ge "$SLURM_JOB_NUM_NODES" ]; do
  kill -0 "$started" # a machine whose Ray did not start ends the job
  sleep 1
done

octetrl train "$@" cluster.address="$address" cluster.nodes="$SLURM_JOB_NUM_NODES" cluster.gpus_per_node="$gpus" \
  --resume auto
