/* SPDX-License-Identifier: Apache-2.0 */
/* What a table of keys of a model's config is written with. */
#pragma once

#include <stddef.h>

/* Larger widths, depths or vocabularies are typing errors. */
#define MOST (1 << 24)

/* A field's row up to its default; "" keeps clang-format from a directive. */
#define KEY(f, type, min, max, words)                                          \
    "" #f, IZ_KEY_##type, .offset = offsetof(CONFIG, f),                       \
                          sizeof(((CONFIG *)0)->f), min, max, words,           \
                          IZ_CHANGE_SAME
