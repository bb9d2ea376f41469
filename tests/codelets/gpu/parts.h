/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel around a part of attention's. */
#pragma once

#include "codelets/base/build.h"

IZ_C_BEGIN

/* What each block has: its head, or its group of `group` heads; a tile; and how
 * many follow it.  Of `all` heads, `chunk` at a time. */
void attention_places(int (*place)[3], int blocks, int all, int chunk,
                      int group);

IZ_C_END
