/* SPDX-License-Identifier: Apache-2.0 */
/* How much the GPU's classifier takes at a time; alone in a file, so that a
 * program of the tests can have so little that a tiny model has several chunks.
 */
#include "codelets/ops/classifier.h"

const int64_t iz_classifier_chunk_bytes = 256 << 20;
