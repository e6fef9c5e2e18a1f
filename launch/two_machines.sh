#!/usr/bin/env bash
# Run a script on two machines. Start it on both, with the same arguments except for the number of the machine.
# The first machine has the first ranks. FIRST is its address, as the second machine reaches it; PORT must be free
# on the first machine and open to the second. Both need the same code and data. Anyone who reaches the port can
# join, so keep it inside a network that you trust.
#
#   launch/two_machines.sh MACHINE FIRST:PORT RANKS_EACH SCRIPT [ARGUMENTS ...]
#   launch/two_machines.sh 0 10.0.0.1:29500 4 examples/digits/train.py     # on the first
#   launch/two_machines.sh 1 10.0.0.1:29500 4 examples/digits/train.py     # on the second
#
# Tried with torch 2.13 on CPU ranks, on two hosts that were network namespaces of one machine (`python -m benchmarks
# scaling` starts its ranks with these options). Not tried on real machines, nor on GPUs. docs/cluster.md says more.
set -euo pipefail

if [ $# -lt 4 ] || [[ $1 != [01] ]] || [[ $2 != *:* ]]; then
    echo "usage: $0 MACHINE FIRST:PORT RANKS_EACH SCRIPT [ARGUMENTS ...]   (MACHINE: 0 or 1)" >&2
    exit 2
fi
machine=$1 first=$2 ranks=$3
shift 3
# Fixed numbers, not --rdzv-backend=c10d: a machine has the same ranks in every run.
exec torchrun --nnodes=2 --node-rank="$machine" --nproc-per-node="$ranks" \
    --master-addr="${first%:*}" --master-port="${first##*:}" "$@"
