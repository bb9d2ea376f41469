/* SPDX-License-Identifier: Apache-2.0 */
/* Which products a CPU makes with parameters in bf16 (run.cpu_products). */
#ifndef IZ_RUNTIME_MACHINE_PRODUCTS_H
#define IZ_RUNTIME_MACHINE_PRODUCTS_H

#include "codelets/unit/layer.h"
#include "runtime/comm/coll.h"
#include "runtime/config/config.h"

struct iz_products {
    bool narrow;   /* of bf16, else of fp32 */
    char why[128]; /* of products of fp32 that nobody asked for; else "" */
};

/* What the choice is for. */
struct iz_products_for {
    int workers; /* of this rank */
    bool resume; /* goes on with the run in run.output */
    bool gpu;    /* nothing is multiplied on a CPU */
};

/* Puts its choice into the config: what is auto is measured, or, in a resumed
 * run, what the config beside its output says.  The same choice on every rank.
 * Collective.  Negative errno with the reason printed by one rank: what the
 * config asks for, or the run began with, cannot be done on all of them, or is
 * not known. */
int iz_products_choose(struct iz_products *p, struct iz_config *c,
                       const struct iz_model *m,
                       const struct iz_products_for *on, struct iz_coll *coll);

#endif
