/* SPDX-License-Identifier: Apache-2.0 */
/* Where time, bytes and memory of a run went, as text and as JSON lines; of a
 * simulated run too. */
#pragma once

#include <stdio.h>

#include "runtime/engine/engine.h"
#include "runtime/report/bottleneck.h"
#include "runtime/report/time_shares.h"

struct iz_summary { /* all borrowed */
    const struct iz_engine *e;
    const struct iz_time_shares *shares; /* stopped */
    double submitting; /* part of the window; 0 in a simulation */
};

/* For the workers of e. */
struct iz_time_shares *iz_summary_shares_open(const struct iz_engine *e);

/* The limit in one sentence of at most `size` bytes. */
enum iz_bottleneck iz_summary_bottleneck(const struct iz_summary *s, char *text,
                                         size_t size);
/* "limited by: ...", folded to 96 columns. */
void iz_summary_print_bottleneck(const struct iz_summary *s, FILE *out);
/* Tasks, links, workers. */
void iz_summary_print_time(const struct iz_summary *s, FILE *out);
/* Bytes of each class and tier that were taken, and the sums of the plan. */
void iz_summary_print_memory(const struct iz_summary *s, FILE *out);
/* {"tasks": ...}, {"links": ...}, {"workers": ...}, {"limit": ...}, and the
 * bytes of each class and tier, a line each. */
void iz_summary_json(const struct iz_summary *s, FILE *out);
