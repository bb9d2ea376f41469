/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/step/order.h"

#include "runtime/engine/alloc.h"

int iz_order_unit(const struct iz_engine *e, int i)
{
    int units = e->model->n_units;
    return i < units ? i : 2 * units - 2 - i;
}

int iz_order_position(const struct iz_engine *e, int i)
{
    return i + (i + 1 >= e->model->n_units);
}

/* A pass has fewer than 2U steps, and a step at most two uses. */
static void list_uses(struct iz_engine *e, bool training, struct iz_uses *uses)
{
    int units = e->model->n_units;
    int *p = iz_engine_take(e, units * 16, sizeof(*p));
    *uses = (struct iz_uses){.unit = p,
                             .step = p + 4 * units,
                             .after = p + 8 * units,
                             .item = p + 12 * units,
                             .first = p + 14 * units,
                             .next = p + 15 * units,
                             .steps = units};
    if (training)
        uses->steps += units - 1 - e->plan.first_trained;
    for (int i = 0; i < uses->steps; i++) {
        int u = iz_order_unit(e, i), tied = e->model->unit[u].tied_unit;
        uses->item[i] = uses->n;
        for (int k = 0; k < 1 + (tied >= 0); k++) {
            uses->step[uses->n] = i;
            uses->unit[uses->n++] = k ? tied : u;
        }
    }
    uses->item[uses->steps] = uses->n;
    for (int u = 0; u < units; u++)
        uses->first[u] = uses->n;
    for (int i = uses->n - 1; i >= 0; i--) {
        uses->after[i] = uses->first[uses->unit[i]];
        uses->first[uses->unit[i]] = i;
    }
}

void iz_order_open(struct iz_engine *e)
{
    list_uses(e, true, &e->uses.training);
    list_uses(e, false, &e->uses.forward);
}
