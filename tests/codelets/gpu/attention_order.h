/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel around the order of attention's blocks. */
#pragma once

#include "codelets/flat/dtype.h"

IZ_C_BEGIN

/* What block i has, i < blocks: a tile, how many follow it, and its head, or
 * its group of `group` heads; of `all` heads, `chunk` at a time. */
void attention_order(int *head, int *tile, int *after, int blocks, int all,
                     int chunk, int group);

IZ_C_END
