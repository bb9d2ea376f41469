/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a pass; see order.h. */
#include "runtime/step/order.h"

#include <errno.h>
#include <stdlib.h>

/* Unit of step i of a pass: 0 ... U-1 and, when training, back down. */
int iz_order_unit(const struct iz_engine *e, int i)
{
    int units = e->model->n_units;
    return i < units ? i : 2 * units - 2 - i;
}

/* Where step i of a pass is in the graph: forward of unit u is u, backward is
 * 2U-1-u. */
int iz_order_position(const struct iz_engine *e, int i)
{
    return i + (i + 1 >= e->model->n_units);
}

static int list_uses(const struct iz_engine *e, bool training,
                     struct iz_uses *uses)
{
    size_t units = (size_t)e->model->n_units;
    uses->steps = (int)units;
    if (training)
        uses->steps += (int)units - 1 - e->plan.first_trained;
    uses->group = calloc(4 * units, sizeof(*uses->group));
    uses->step = calloc(4 * units, sizeof(*uses->step));
    uses->after = calloc(4 * units, sizeof(*uses->after));
    uses->item = calloc(2 * units, sizeof(*uses->item));
    uses->first = calloc(units, sizeof(*uses->first));
    uses->next = calloc(units, sizeof(*uses->next));
    if (!uses->group || !uses->step || !uses->after || !uses->item ||
        !uses->first || !uses->next)
        return -ENOMEM;
    for (int i = 0; i < uses->steps; i++) {
        int u = iz_order_unit(e, i), tied = e->model->unit[u].tied_unit;
        uses->item[i] = uses->n;
        for (int k = 0; k < 1 + (tied >= 0); k++) {
            uses->step[uses->n] = i;
            uses->group[uses->n++] = k ? tied : u;
        }
    }
    uses->item[uses->steps] = uses->n;
    for (size_t u = 0; u < units; u++)
        uses->first[u] = uses->n;
    for (int i = uses->n - 1; i >= 0; i--) {
        uses->after[i] = uses->first[uses->group[i]];
        uses->first[uses->group[i]] = i;
    }
    return 0;
}

static void free_uses(struct iz_uses *uses)
{
    free(uses->group);
    free(uses->item);
    free(uses->step);
    free(uses->after);
    free(uses->first);
    free(uses->next);
}

int iz_order_open(struct iz_engine *e)
{
    int r = list_uses(e, true, &e->training);
    return r ? r : list_uses(e, false, &e->forward);
}

void iz_order_close(struct iz_engine *e)
{
    free_uses(&e->training);
    free_uses(&e->forward);
}
