#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzz targets with clang, ASan and UBSan, and runs each for some
# seconds from its corpus: tests/fuzz/fuzz.sh [SECONDS] [TARGET ...].  0 seconds
# only replays the corpus.  New inputs stay in the build folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

seconds=${1:-60}
shift || true
targets=("$@")
[ "${#targets[@]}" -gt 0 ] || targets=(config shard safetensors)
build=${IZ_FUZZ_BUILD:-build/fuzz}
mkdir -p "$build"

command -v clang >/dev/null || {
    echo "[fuzz] clang is missing" >&2
    exit 77
}
sources=(runtime/config/read.c runtime/config/check.c runtime/config/doc.c
    runtime/config/fault.c runtime/config/foreign.c runtime/config/keys.c
    runtime/config/keep.c runtime/config/write.c runtime/formats/published.c
    runtime/formats/peft.c
    runtime/data/data.c runtime/data/shard.c
    runtime/base/durable.c runtime/base/json.c runtime/base/key.c
    runtime/base/nearest.c runtime/base/text.c
    runtime/formats/st.c runtime/ckpt/rank_file.c runtime/base/hash.c codelets/flat/cast.c codelets/flat/optimizer.c codelets/flat/quant.c codelets/flat/nf4.c
    runtime/base/progress.c codelets/base/clock.c codelets/base/die.c codelets/flat/loops.c codelets/flat/simd.c codelets/flat/simd_any.c
    codelets/ops/attention_loops.c)

for t in "${targets[@]}"; do
    clang -std=c11 -D_XOPEN_SOURCE=700 -DIZ_SIMD_TABLE=iz_simd_portable \
        -DIZ_ATTENTION_TABLE=iz_attention_portable \
        -DIZ_HALF_ROWS='"codelets/flat/half_any.h"' \
        -O1 -g -I. \
        -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
        -o "$build/fuzz_$t" "tests/fuzz/fuzz_$t.c" "${sources[@]}" \
        -ljansson -lm
    mkdir -p "$build/new_$t"
    limit=(-max_total_time="$seconds")
    [ "$seconds" -gt 0 ] || limit=(-runs=0)
    # Standard error of the code under test is closed: it says why it refuses.
    "$build/fuzz_$t" "${limit[@]}" -close_fd_mask=2 -timeout=300 \
        -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 \
        -artifact_prefix="$build/" \
        "$build/new_$t" "tests/fuzz/corpus/$t"
done
