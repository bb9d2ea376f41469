/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts as the cases of its ops have it: a scene that begins
 * with what a router fills in. */
#pragma once

#include "tests/codelets/ops/scene.h"

/* First what iz_route_fwd fills in. */
enum { P, LSE, WEIGHT, PLACE, CHOSEN, END, CHOICE, ROUTED };
#define ROUTES                                                                 \
    (BIT(P) | BIT(LSE) | BIT(WEIGHT) | BIT(PLACE) | BIT(CHOSEN) | BIT(END))

/* Of rows, experts and how many of them a row chooses. */
struct mixture {
    struct scene s;
    int64_t m, e, k;
    int64_t first, here; /* experts */
    int op;              /* of those of experts */
    bool normalise, back, adapted;
    bool sigmoid, choosy; /* it has CHOICE */
    int groups, kept;
    float scale;
    enum iz_activation act;
    float balance, z;
};

struct mixture mixture_new(int64_t m, int64_t e, int64_t k);
struct iz_routes mixture_routes(const struct mixture *a,
                                const struct iz_view *v);
/* Chooses experts. */
void mixture_route(struct mixture *a);
