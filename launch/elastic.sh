#!/usr/bin/env bash
# Run a script on MIN to MAX machines, of which some may join or leave while it runs. Start it on each machine with the
# same arguments. FIRST is the machine that the others meet at: it must stay until the end, PORT must be free on it and
# open to the others. When a machine joins or leaves, all ranks save their work, torchrun starts them again on the
# machines that are there, and the script resumes from its run folder. All machines must share that folder. With
# Batches(..., shards=S) the bits do not depend on who was there. Anyone who reaches the port can join, so keep it
# inside a network that you trust.
#
#   launch/elastic.sh MIN:MAX FIRST:PORT RANKS_EACH SCRIPT [ARGUMENTS ...]
#   launch/elastic.sh 1:3 10.0.0.1:29400 4 examples/digits/train.py --run-dir /shared/digits --shards 12
#
# RESTARTS (3) is how often a machine's ranks are started again after a failure, such as a machine that was lost; a
# machine that joins costs none. JOB (ddp_loop) tells apart jobs that meet at the same port.
#
# Tried with torch 2.13 on CPU ranks, on two hosts that were network namespaces of one machine: a host that joins, is
# terminated, is killed, and is cut off. Not tried on several real machines, nor on GPUs.
set -euo pipefail

if [ $# -lt 4 ] || [[ $1 != *:* ]] || [[ $2 != *:* ]]; then
    echo "usage: $0 MIN:MAX FIRST:PORT RANKS_EACH SCRIPT [ARGUMENTS ...]" >&2
    exit 2
fi
nodes=$1 first=$2 ranks=$3
shift 3
# Where torchrun shares its own store with the ranks, torch 2.13 publishes that store's address only in the first round: a
# machine that joins later waits for it in vain, and all machines fail (also: pytorch issue 135712). Otherwise each round
# has a store of its own, on rank 0.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$nodes" --nproc-per-node="$ranks" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$first" --rdzv-id="${JOB:-ddp_loop}" "$@"
