/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/step/chunk_update.h"

#include <stdatomic.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/buffer/flat_buffer.h"
#include "runtime/plan/matrices.h"

/* ---- what all of them need ---- */

/* The step's numbers.  False: the step is skipped. */
static bool take_step(const struct iz_chunk_update *a, void **buf,
                      struct iz_hyper_at *step)
{
    *step = a->step;
    if (a->early)
        return true;
    const struct iz_control *c = buf[a->in.control];
    step->hyper.lr = c->lr;
    step->t = c->updates;
    step->grad_scale = (float)c->grad_scale;
    return !c->skip;
}

static struct iz_update_range range_of(const struct iz_hyper_at *step,
                                       const struct iz_segment *s)
{
    struct iz_hyper_at own = *step;
    own.hyper.lr *= s->lr_scale;
    own.hyper.weight_decay = s->weight_decay;
    own.matrix = s->by_matrix;
    return iz_update_range_of(&own);
}

/* How the elements from i on of the chunk are updated, as far as one call takes
 * them: decay and rate change where one tensor ends and the next one begins.
 * Returns the number of ranges.  *n: elements of their whole blocks. */
static int find_ranges(const struct iz_chunk_update *a,
                       const struct iz_hyper_at *step, int64_t i,
                       struct iz_update_range *range, int64_t *n)
{
    const struct iz_segment *s = a->segment;
    int64_t end = i;
    int k = 0;
    for (; k < IZ_UPDATE_RANGES_MAX && end < a->n; k++) {
        while (s->end <= a->first + end)
            s++;
        end = min64(s->end - a->first, a->n);
        range[k] = range_of(step, s);
        range[k].end = end - i;
    }
    if (end < a->n)
        end -= end % IZ_MOMENT_BLOCK;
    *n = end - i;
    return k;
}

/* From where u is in the chunk on: elements that have all states, or those of
 * matrices that lack some; no further than one kind reaches. */
static void choose_states(const struct iz_chunk_update *a, struct iz_update *u)
{
    const struct iz_state_layout *l = &a->states;
    int64_t from = a->first + u->at, end;
    int64_t before = iz_plan_lacks(a->plan, a->unit, from) -
                     iz_plan_lacks(a->plan, a->unit, a->first);
    u->optimizer = iz_plan_lacks_from(a->plan, a->unit, from, &end)
                       ? IZ_OPTIMIZER_DIRECTION
                       : l->optimizer;
    u->n = min64(u->n, end - from);
    for (int s = 0; s < l->states; s++) {
        if (!iz_optimizer(l->optimizer)->state[s].of_elements)
            continue;
        u->lacks[s].all = l->lacks;
        u->lacks[s].before = before;
    }
}

/* ---- states and parameters of a chunk ---- */

static struct iz_update begin_update(const struct iz_chunk_update *a,
                                     void **buf, const struct iz_hyper_at *step)
{
    struct iz_update u = {.type = a->states.type,
                          .g_type = a->grad_type,
                          .out_type = a->param_type,
                          .room = a->states.room,
                          .key =
                              iz_mix(a->key + (uint64_t)step->t * IZ_GOLDEN)};
    for (int s = 0; s < a->states.states; s++)
        u.state[s] = (char *)buf[1] + a->states.at[s];
    return u;
}

/* Updates u->n elements from u->at of the chunk on, or fewer; g: the first one
 * of their gradient.  The bits of an element do not depend on where a call
 * begins. */
static void update(struct iz_exec *x, const struct iz_chunk_update *a,
                   void **buf, int64_t g, struct iz_update *u)
{
    const struct iz_state_layout *l = &a->states;
    char *param = (char *)buf[a->in.param] + a->param_at;
    choose_states(a, u);
    u->first = a->first + u->at;
    u->g = (char *)buf[0] + (a->grad_first + g) * iz_dtype_bytes(a->grad_type);
    if (l->lower && !a->still)
        u->lower = (uint16_t *)buf[1] + u->at;
    else
        u->p = (l->master ? (float *)buf[1] : (float *)param) + u->at;
    if (a->in.matrix)
        u->d = (float *)buf[a->in.matrix] + u->first;
    if (l->master && !a->still)
        u->out = param + u->at * iz_dtype_bytes(a->param_type);
    /* on the CPU iz_update in codelets/flat/update.c */
    iz_buffer_update(x, u);
}

static void update_all(struct iz_exec *x, const struct iz_chunk_update *a,
                       void **buf, const struct iz_hyper_at *step)
{
    struct iz_update_range range[IZ_UPDATE_RANGES_MAX];
    struct iz_update u = begin_update(a, buf, step);
    u.range = range;
    for (; u.at < a->n; u.at += u.n) {
        u.ranges = find_ranges(a, step, u.at, range, &u.n);
        update(x, a, buf, u.at, &u);
    }
}

/* The touched rows alone, whose gradients are packed: a sparse table is one
 * segment. */
static void update_rows(struct iz_exec *x, const struct iz_chunk_update *a,
                        void **buf, const struct iz_hyper_at *step)
{
    struct iz_touched_range t = {0};
    struct iz_update_range range[IZ_UPDATE_RANGES_MAX];
    int64_t whole;
    struct iz_touched rows = iz_touched_get(&a->rows, buf[a->in.rows]);
    int64_t packed =
        a->whole_grads ? 0 : iz_touched_first(&a->rows, &rows, a->rows.rank);
    struct iz_update u = begin_update(a, buf, step);
    u.range = range;
    u.ranges = 1;
    while (iz_touched_next(&rows, a->first, a->first + a->n, &t)) {
        u.at = t.flat - a->first;
        u.n = t.n;
        find_ranges(a, step, u.at, range, &whole);
        update(x, a, buf, t.packed - packed, &u);
    }
}

/* The last pass over matrices. */
static void update_along(struct iz_exec *x, const struct iz_chunk_update *a,
                         void **buf, struct iz_hyper_at *step)
{
    const struct iz_state_layout *l = &a->states;
    const struct iz_segment *s = a->segment;
    char *param = (char *)buf[a->in.param] + a->param_at;
    float *master = l->master ? buf[1] : (float *)param;
    struct iz_update_range range;
    step->hyper.type = IZ_OPTIMIZER_ALONG;
    for (int64_t i = 0, n; i < a->n; i += max64(n, 0), s++) {
        n = min64(s->end - a->first, a->n) - i;
        if (n <= 0 || !s->by_matrix)
            continue;
        range = range_of(step, s);
        struct iz_update u = {
            .optimizer = step->hyper.type,
            .type = IZ_MOMENT_F32,
            .g_type = IZ_F32,
            .out_type = a->param_type,
            .ranges = 1,
            .range = &range,
            .n = n,
            .g = (float *)buf[0] + a->grad_first + i,
            .p = l->lower ? NULL : master + i,
            .lower = l->lower ? (uint16_t *)buf[1] + i : NULL,
            .out =
                l->master ? param + i * iz_dtype_bytes(a->param_type) : NULL};
        iz_buffer_update(x, &u);
    }
}

void iz_chunk_update(struct iz_exec *x, void **buf, const void *arg)
{
    const struct iz_chunk_update *a = arg;
    struct iz_hyper_at step;
    if (!take_step(a, buf, &step))
        return;
    if (a->along)
        update_along(x, a, buf, &step);
    else if (a->rows.cols)
        update_rows(x, a, buf, &step);
    else
        update_all(x, a, buf, &step);
    if (a->updated)
        atomic_fetch_add(a->updated, 1);
}
