/* SPDX-License-Identifier: Apache-2.0 */
/* What somebody may have meant by a name that nobody knows. */
#pragma once

#include <stdbool.h>

#include "runtime/base/key.h"

/* The known name nearest to `name` by edit distance. */
struct iz_nearest {
    const char *name;
    bool whole; /* names are compared whole, not also from their last dot on */
    int score;
    char near[IZ_KEY_NAME_MAX];      /* "": none is near */
    char hint[IZ_KEY_NAME_MAX + 32]; /* "; did you mean NEAR?", or "" */
};

struct iz_nearest iz_nearest_start(const char *name, bool whole);
void iz_nearest_try(struct iz_nearest *n, const char *known);
