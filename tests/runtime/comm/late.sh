#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: late.sh TEST_COLL
# A rank that stops ends the others by their time-out, with a message, also where
# MPI_Abort hangs; a rank that is killed ends the others at once.
set -u
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1
# Ranks that are stopped do not end by a gentle signal: no second of grace for it.
export OMPI_MCA_odls_base_sigkill_timeout=0
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# fails MODE: two ranks end with a failure within 90 s, not by a signal of ours.
fails() {
    timeout 90 mpirun -np 2 "$prog" "$1" >"$log" 2>&1
    status=$?
    if [ $status -eq 0 ] || [ $status -eq 124 ] || [ $status -eq 142 ]; then
        echo "FAILED: $1: status $status"
        cat "$log"
        exit 1
    fi
}

prog=$1
# stopped MODE WHAT [SECONDS QUESTION]: the message names what was waited for.
stopped() {
    fails "$1"
    line="izar: rank 0: waited ${3-0.2} s for $2: ${4-is another rank dead or stopped?}"
    if ! grep -qxF "$line" "$log"; then
        echo "FAILED: $1: no such line: $line"
        cat "$log"
        exit 1
    fi
}

stopped late 'the last barrier'
stopped late-read 'the last unit'
stopped late-deaf 'the last barrier'
for mode in late-disk late-apart; do
    stopped $mode 'the other ranks in a save' 2.4 \
        'is one dead or stopped, or its disk very slow? run.comm_timeout_s, 12 times of which this is, allows for more'
done
fails killed
fails killed-read
echo ok
