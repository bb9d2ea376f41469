/* SPDX-License-Identifier: Apache-2.0 */
/* A size for the programs that have emulated kernels. */
#include "codelets/ops/classifier.h"

/* 20 rows of 256 logits. */
const int64_t iz_classifier_chunk_bytes = 20 << 10;
