/* SPDX-License-Identifier: Apache-2.0 */
/* The order of updates through the disk, where they follow their gradients.
 *
 * Gradients come from the last unit down to the first; the next forward needs
 * the first unit first.  A disk that keeps up with the backward takes the
 * updates as they come.  One that does not has a rest when the backward ends,
 * and the forward would wait for all of it, because the unit that it needs
 * first had its gradient last.  So the rest is done in the order of need: the
 * forward follows the disk, unit by unit.
 *
 * How large the rest is shows when the last gradient has come: what is not
 * updated then.  Where nothing but the units put off is left, the disk may have
 * waited, and one unit fewer is put off.  The order changes the time of a run,
 * never its numbers: without clipping an update depends on its own gradient
 * alone.
 *
 * The slowest disk decides for all ranks: what is updated is fetched anew, and
 * they fetch in one order. */
#include "runtime/step/update_order.h"

#include <math.h>
#include <stdatomic.h>

#include "runtime/step/submit.h"

static int chunks_of(const struct iz_engine *e, int unit)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    return p->n ? p->chunks : 0;
}

static int64_t chunks_below(const struct iz_engine *e, int unit)
{
    int64_t n = 0;
    for (int u = 0; u < unit; u++)
        n += chunks_of(e, u);
    return n;
}

/* Units from 0 on with as many chunks, the last one perhaps in part. */
static int units_of(const struct iz_engine *e, int64_t chunks)
{
    int u = 0;
    for (int64_t n = 0; u < e->plan.n_units && n < chunks; u++)
        n += chunks_of(e, u);
    return u;
}

int iz_update_order_of_all(const double *late, int per, int ranks)
{
    double most = 0;
    for (int r = 0; r < ranks; r++)
        most = fmax(most, late[r * per]);
    return (int)most;
}

int iz_update_order_late(struct iz_engine *e, int late)
{
    struct iz_update_order *t = &e->update_order;
    if (!iz_step_on_disk(e) || !iz_step_updates_early(e))
        return 0;
    t->due += chunks_below(e, e->plan.n_units);
    int64_t rest = t->due - atomic_load(&t->updated);
    if (rest > chunks_below(e, late))
        return units_of(e, rest);
    return late > 0 ? late - 1 : 0;
}
