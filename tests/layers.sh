#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Includes point one way, and each word has its place: the rules of the house
# that a search of the sources can hold.  Comments and strings may use any word.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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

# names_no WHAT PATTERN FOLDER...: no name in the code there matches.
names_no() {
    local what=$1 pattern=$2
    shift 2
    rule "$what" "$(code "$@" | sed -E 's/"(\\.|[^"\\])*"/""/g' |
        grep -E "$pattern" || true)"
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

names_no "a model knows no rank, stage, device, stream or malloc" \
    "$(word '[Rr]anks?|[Ss]tages?|[Dd]evices?|[Ss]treams?|malloc|calloc')" \
    models
names_no "runtime/ knows no attention or gelu" \
    '^[^:]*:[0-9]*:.*([Aa]ttention|[Gg][Ee][Ll][Uu])' runtime

never "codelets/ includes neither runtime/, models/ nor tools/" \
    "$(include '(runtime|models|tools)/')" codelets
never "runtime/ includes neither models/ nor tools/" \
    "$(include '(models|tools)/')" runtime
never "models/ include no library of the machinery" \
    "$(include '(starpu|mpi|nccl|cuda|hwloc|jansson|liburing)')" models
never "quoted includes are paths from the root" \
    "$(include '[^/>"]*"')" codelets runtime models

only "mpi.h is included by two files at most" "$(include 'mpi\.h')" 2
only "nccl.h is included by one file" "$(include 'nccl\.h')" 1
only "cublasLt.h is included by one file" "$(include 'cublasLt\.h')" 1
only "cudnn.h is included by one file" "$(include 'cudnn')" 1
only "jansson.h is included by the config reader (three files) and json.c" \
    "$(include 'jansson\.h')" 4
only "liburing.h is included by one file" "$(include 'liburing\.h')" 1
only "hwloc.h is included by three files at most" "$(include 'hwloc\.h')" 3
only "starpu_task_submit is called in one file" 'starpu_task_submit' 1

# Build switches live in one header; guards of headers are no switches.
rule "#if outside codelets/base/build.h" "$(
    code codelets runtime models tools |
        grep -E ':[0-9]+:[ ]*#[ ]*(if|ifdef|ifndef|elif)([^a-z]|$)' |
        grep -vE '^codelets/base/build\.h:' |
        grep -vE '#ifndef IZ_[A-Z0-9_]+_(H|CUH)$' || true
)"

exit "$broken"
