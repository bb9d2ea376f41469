#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Includes point one way: a file includes its own room and those before it in
# the list below.  And the other rules of the house that a search can hold.
#
# usage: tests/layers.sh [LIBRARY...]
# With the libraries of a build, tests/cycles.py looks for a cycle of calls too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rooms="
codelets/base codelets/flat codelets/ops codelets/kernels codelets/gpu codelets/buffer
codelets/task codelets/unit
runtime/base runtime/formats runtime/config runtime/model runtime/comm runtime/plan runtime/machine
runtime/tier runtime/data runtime/engine runtime/step runtime/ckpt runtime/hf
runtime/report runtime/run runtime/sim
models tools"

broken=0

# Prints the C and CUDA sources below the given folders.
sources() {
    find "$@" -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort
}

# Prints FILE:LINE:TEXT of every line with code, without its comments.
code() {
    # shellcheck disable=SC2016 # perl's variables
    sources "$@" | xargs -r perl -0777 -ne '
        s{("(?:\\.|[^"\\\n])*")|/\*.*?\*/|//[^\n]*}
         {defined $1 ? $1 : "\n" x ($& =~ tr/\n//)}gse;
        my $n = 0;
        for (split /\n/) { $n++; print "$ARGV:$n:$_\n" if /\S/ }'
}

# Complains with the offending lines when there are any.
rule() {
    local what=$1 lines=$2
    [ -n "$lines" ] || return 0
    printf '%s:\n%s\n' "$what" "$lines" | sed '2,$s/^/    /' >&2
    broken=1
}

# never WHAT PATTERN FOLDER...: no line of code there matches.
never() {
    local what=$1 pattern=$2
    shift 2
    rule "$what" "$(code "$@" | grep -E "$pattern" || true)"
}

# only WHAT PATTERN MOST: lines that match are in at most MOST files.
only() {
    local what=$1 pattern=$2 most=$3 lines files
    lines=$(code codelets runtime models tools |
        grep -E "^[^:]*:[0-9]*:.*$pattern" || true)
    files=$(cut -d: -f1 <<<"$lines" | sort -u | grep -c . || true)
    [ "$files" -le "$most" ] || rule "$what" "$lines"
}

# word A|B: a pattern for these as whole words or as parts of a_longer_name.
word() {
    printf '^[^:]*:[0-9]*:(.*[^A-Za-z])?(%s)([^A-Za-z]|$)' "$1"
}

include() {
    printf '#[ ]*include[ ]*[<"]%s' "$1"
}

# Each file's includes against the order of the rooms.
above=""
for room in $rooms; do
    above="$above|$room"
    later=$(tr -s ' \n' '\n' <<<"$rooms" | grep -vxE "${above#|}" | paste -sd'|')
    [ -z "$later" ] || never "$room includes a room above it" \
        "$(include "($later)/")" "$room"
done
rule "a file has no room" "$(find codelets runtime -maxdepth 1 -name '*.[ch]*')"

never "a model knows no rank, stage, device, stream or malloc" \
    "$(word '[Rr]anks?|[Ss]tages?|[Dd]evices?|[Ss]treams?|malloc|calloc')" \
    models
rule "a model includes layer.h, ops.h, run.h and models alone" "$(
    code models | grep -E "$(include '(codelets|runtime)/')" |
        grep -vE '"(codelets/unit/layer|codelets/ops/ops|runtime/run/run)\.h"' || true
)"
never "runtime/ calls no op of a layer" \
    '[^a-z_]iz_[a-z0-9]+_(fwd|bwd|da|dw|again)\(' runtime
never "models/ include no library of the machinery" \
    "$(include '(starpu|mpi|nccl|cuda|hwloc|jansson|liburing)')" models
never "quoted includes are paths from the root" \
    "$(include '[^/>"]*"')" codelets runtime models

# The planner is arithmetic.
starpu=$(sources runtime/plan | while read -r f; do
    { cc -M -I. "$f" 2>&1 || true; } | sed -n "s,.*\(starpu[a-z_]*\.h\).*,$f: \1,p"
done)
rule "the planner includes StarPU" "$starpu"

only "mpi.h is included by two files at most" "$(include 'mpi\.h')" 2
only "nccl.h is included by one file" "$(include 'nccl\.h')" 1
only "cublasLt.h is included by two files at most" "$(include 'cublasLt\.h')" 2
only "cudnn.h is included by one file" "$(include 'cudnn')" 1
only "jansson.h is included by json.h" "$(include 'jansson\.h')" 1
only "liburing.h is included by one file" "$(include 'liburing\.h')" 1
only "hwloc.h is included by three files at most" "$(include 'hwloc\.h')" 3
only "starpu_task_submit is called in one file" 'starpu_task_submit' 1

# Build switches live in one header.
rule "#if outside codelets/base/build.h" "$(
    code codelets runtime models tools |
        grep -E ':[0-9]+:[ ]*#[ ]*(if|ifdef|ifndef|elif)([^a-z]|$)' |
        grep -vE '^codelets/base/build\.h:' || true
)"

# shellcheck disable=SC2086 # a list of words
[ $# -eq 0 ] || tests/cycles.py "$@" || broken=1

exit "$broken"
