/* SPDX-License-Identifier: Apache-2.0 */
/* Small things that every model says: views of its tensors, descriptions of its
 * parameters. */
#pragma once

#include <errno.h>
#include <stdio.h>

#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"

/* A boundary tensor [samples, T*C] as [M,C]. */
static inline struct iz_view tokens(struct iz_view v, int width)
{
    v.rows = iz_view_len(v) / width;
    v.cols = width;
    return v;
}

/* Weight i and bias i + 1 of the unit; gradients in backward only. */
static inline struct iz_linear affine(const struct iz_layer *a, int i)
{
    struct iz_linear l = {.w = a->w[i], .b = a->w[i + 1]};

    if (a->dw) {
        l.dw = a->dw[i];
        l.db = a->dw[i + 1];
    }
    return l;
}

static inline struct iz_param weight(const char *name, int64_t rows,
                                     int64_t cols, float std)
{
    struct iz_param p = {
        .rows = rows, .cols = cols, .init = IZ_INIT_NORMAL, .std = std};

    snprintf(p.name, sizeof(p.name), "%s", name);
    return p;
}

static inline struct iz_param vector(const char *name, int64_t n,
                                     enum iz_init init)
{
    struct iz_param p = {.rows = 1, .cols = n, .init = init};

    snprintf(p.name, sizeof(p.name), "%s", name);
    return p;
}

/* A number of a config that must be in 1..most. */
struct size {
    const char *name;
    int value, most;
};

/* 0, or -EINVAL with the reason printed. */
static inline int check_sizes(const char *model, const struct size *list,
                              size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (list[i].value < 1 || list[i].value > list[i].most) {
            fprintf(stderr, "%s: %s = %d: must be in 1..%d\n", model,
                    list[i].name, list[i].value, list[i].most);
            return -EINVAL;
        }
    return 0;
}
