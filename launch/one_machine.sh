#!/usr/bin/env bash
# Run a script on the GPUs, or on CPU ranks, of this machine.
#
#   launch/one_machine.sh RANKS SCRIPT [ARGUMENTS ...]
#   launch/one_machine.sh gpu examples/digits/train.py                 # one rank per GPU
#   launch/one_machine.sh 2 examples/digits/train.py --device cpu --epochs 2
#
# Its torchrun line was tried with torch 2.13 on CPU ranks, not on GPUs.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 RANKS SCRIPT [ARGUMENTS ...]   (RANKS: a number, or 'gpu' for one per GPU)" >&2
    exit 2
fi
ranks=$1
shift
# --standalone: torchrun chooses a free port, so two runs on one machine do not collide.
exec torchrun --standalone --nproc-per-node="$ranks" "$@"
