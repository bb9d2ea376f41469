/* SPDX-License-Identifier: Apache-2.0 */
/* How much of one kind of work ran while units were computed: the time of its
 * spans during which at least one forward or backward was running on the same
 * rank. */
#ifndef IZ_RUNTIME_REPORT_OVERLAP_H
#define IZ_RUNTIME_REPORT_OVERLAP_H

#include "codelets/task/task.h"

struct iz_overlap;

int iz_overlap_open(struct iz_overlap **out);
void iz_overlap_close(struct iz_overlap **o);

void iz_overlap_add(struct iz_overlap *o, const struct iz_span *s);
/* Accounts all spans but those so young that a computation beside them may
 * still be running; `last` accounts everything. */
void iz_overlap_settle(struct iz_overlap *o, bool last);

/* Totals so far: seconds, number of tasks, and the part hidden (seconds). */
struct iz_kind_time {
    double seconds, hidden_s, flops;
    int64_t tasks;
};
const struct iz_kind_time *iz_overlap_kind(const struct iz_overlap *o,
                                           enum iz_kind k);

#endif
