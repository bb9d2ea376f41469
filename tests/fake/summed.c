/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into a program, before its engine: every gradient is replaced by
 * made-up numbers, which depend on the first sample of the call, the unit and
 * the element alone.  Before each update a slow sum of them is formed for every
 * element of the accumulator that this rank updates, from the order that the
 * plan declares and nothing else; the job ends if a bit differs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "runtime/step/submit.h"
#include "runtime/step/units.h"

/* The linker's names for what the program calls and for what there is. */
void __wrap_iz_units_batch(struct iz_engine *e, struct iz_track *track,
                           enum iz_split split, int64_t first, int64_t tasks);
void __real_iz_units_batch(struct iz_engine *e, struct iz_track *track,
                           enum iz_split split, int64_t first, int64_t tasks);
void __wrap_iz_units_call(struct iz_engine *e, const struct iz_call *c,
                          struct iz_track *track);
void __real_iz_units_call(struct iz_engine *e, const struct iz_call *c,
                          struct iz_track *track);
void __wrap_iz_update_unit(struct iz_engine *e, int unit);
void __real_iz_update_unit(struct iz_engine *e, int unit);

enum { TRACKS = 1024 };
static int64_t first_sample[TRACKS], compared;

static float rounded(float x, enum iz_dtype t)
{
    uint16_t y;
    if (t == IZ_F32)
        return x;
    iz_cast(&y, t, &x, IZ_F32, 1);
    iz_cast(&x, IZ_F32, &y, t, 1);
    return x;
}

/* ---- contributions ---- */

/* Of the call that begins with this sample, to element i of a unit's gradient;
 * use: 0 its own, 1 the tied one. */
struct source {
    int64_t sample;
    int unit, use;
};

/* Of several binades, so that nearly every order rounds otherwise. */
static float contribution(struct source s, int64_t i, enum iz_dtype t)
{
    uint64_t h = iz_mix(
        iz_mix((uint64_t)s.sample * 64 + (uint64_t)(s.unit * 2 + s.use)) +
        (uint64_t)i * IZ_GOLDEN);
    float x = (float)((double)(h >> 11) * 0x1p-53 - 0.5);
    return rounded(ldexpf(x, (int)(h % 6) - 8), t);
}

struct fill_arg {
    struct source source;
    int64_t n, padded;
    enum iz_dtype type;
};

/* buf: unit gradient. */
static void run_fill(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fill_arg *a = arg;
    int64_t size = iz_dtype_bytes(a->type);
    for (int64_t i = 0; i < a->padded; i++) {
        float v = i < a->n ? contribution(a->source, i, a->type) : 0;
        iz_cast((char *)buf[0] + i * size, a->type, &v, IZ_F32, 1);
    }
}

static void fill(struct iz_engine *e, starpu_data_handle_t grad, int64_t sample,
                 int unit, int use)
{
    const struct iz_plan_unit *g = &e->plan.unit[unit];
    struct fill_arg a = {
        {sample, unit, use}, g->n, g->padded, e->plan.param_type};
    struct iz_task t =
        iz_task_of(e, IZ_BACKWARD, IZ_ON_COMPUTE, run_fill, unit);
    if (!grad)
        return;
    iz_task_add(&t, grad, STARPU_RW);
    iz_step_submit(e, &t, &a, sizeof(a));
}

void __wrap_iz_units_batch(struct iz_engine *e, struct iz_track *track,
                           enum iz_split split, int64_t first, int64_t tasks)
{
    if (track - e->track >= TRACKS)
        iz_die("summed: more tracks than %d", TRACKS);
    first_sample[track - e->track] = first;
    __real_iz_units_batch(e, track, split, first, tasks);
}

void __wrap_iz_units_call(struct iz_engine *e, const struct iz_call *c,
                          struct iz_track *track)
{
    int64_t sample = first_sample[track - e->track];
    __real_iz_units_call(e, c, track);
    if (c->call != IZ_CALL_BACKWARD)
        return;
    fill(e, c->grad, sample, c->unit, 0);
    if (c->tied_grad)
        fill(e, c->tied_grad, sample, e->model->unit[c->unit].tied_unit, 1);
}

/* ---- the slow sum ---- */

struct slow {
    const struct iz_plan *p;
    int64_t step, i;
    int unit, use;
    int at[IZ_SUM_LEVELS]; /* slice, micro-batch, rank of a group, group */
};

/* Of the first `levels` levels. */
static float slow_sum(struct slow *s, int levels)
{
    const struct iz_plan *p = s->p;
    const struct iz_sum_level *l = &p->sum.level[levels - 1];
    volatile float sum = 0;
    if (levels == 0) {
        int64_t micro =
            s->step * p->micro_batches + s->at[IZ_SUM_MICRO_BATCHES];
        int64_t rank =
            s->at[IZ_SUM_GROUPS] * iz_sum_group(&p->sum) + s->at[IZ_SUM_RANKS];
        int64_t row = micro * p->ranks + rank;
        int64_t slice = row * p->slices + s->at[IZ_SUM_SLICES];
        struct source of = {slice * p->samples, s->unit, s->use};
        return contribution(of, s->i, p->param_type);
    }
    for (int k = 0; k < l->n; k++) {
        s->at[l->over] = k;
        float x = slow_sum(s, levels - 1);
        sum = rounded(k ? sum + x : x, l->kept);
    }
    return rounded(sum, l->given);
}

/* With several micro-batches the two uses of a tied parameter are summed apart,
 * and then added; with one, what the ranks have is added to the same sum. */
static float slow_element(struct slow *s)
{
    const struct iz_plan_unit *g = &s->p->unit[s->unit];
    enum iz_dtype kept = s->p->grad_type;
    if (!g->ties)
        return slow_sum(s, IZ_SUM_LEVELS);
    s->use = 1;
    float tied = slow_sum(s, IZ_SUM_LEVELS);
    s->use = 0;
    float own = slow_sum(s, g->split_accum ? IZ_SUM_LEVELS : IZ_SUM_LEVELS - 1);
    volatile float sum = own + tied;
    return rounded(sum, kept);
}

static void tell(void)
{
    printf("summed: %lld elements compared\n", (long long)compared);
}

static void compare(struct iz_engine *e, int unit)
{
    const struct iz_plan *p = &e->plan;
    const struct iz_plan_unit *g = &p->unit[unit];
    struct slow s = {.p = p, .step = e->step, .unit = unit};
    const char *acc = (const char *)starpu_variable_get_local_ptr(
        e->unit[unit].grad_handle[0][0]);
    int64_t size = iz_dtype_bytes(p->grad_type);
    int64_t first = p->zero.state.whole ? 0 : g->shard * p->rank;
    int64_t before = p->zero.grad.whole ? 0 : g->shard * p->rank;
    for (int64_t k = first; k < first + g->owned; k++) {
        float got, want = 0;
        iz_cast(&got, IZ_F32, acc + (k - before) * size, p->grad_type, 1);
        s.i = k;
        if (k < g->n)
            want = slow_element(&s);
        if (memcmp(&got, &want, sizeof(got)) != 0)
            iz_die("summed: step %lld, unit %d, element %lld: %.9g, not %.9g",
                   (long long)e->step, unit, (long long)k, (double)got,
                   (double)want);
        compared++;
    }
}

void __wrap_iz_update_unit(struct iz_engine *e, int unit)
{
    if (compared == 0 && e->plan.rank == 0)
        atexit(tell);
    iz_graph_wait(e->graph);
    if (e->plan.unit[unit].n)
        compare(e, unit);
    __real_iz_update_unit(e, unit);
}
