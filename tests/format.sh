#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every C and CUDA source is as clang-format leaves it.  Skipped where there is
# no clang-format.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v clang-format >/dev/null || exit 77
find codelets runtime models tools tests bench \
    '(' -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' ')' -print0 |
    xargs -0 -r clang-format --dry-run -Werror
