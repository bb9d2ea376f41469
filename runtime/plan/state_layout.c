/* SPDX-License-Identifier: Apache-2.0 */
/* The one place that knows how a chunk's states lie; see state_layout.h. */
#include "runtime/plan/state_layout.h"

#include "runtime/plan/plan.h"

struct iz_state_layout iz_plan_states(const struct iz_plan *p,
                                      enum iz_home home, int64_t room,
                                      int64_t lacks)
{
    bool apart = p->target.gpu &&
                 (home == IZ_HOME_NONE) != (p->zero.param.home == IZ_HOME_NONE);
    struct iz_state_layout l = {.room = room,
                                .lacks = lacks,
                                .master = p->param_type != IZ_F32 || apart,
                                .lower = p->optimizer.remainder,
                                .states =
                                    iz_optimizer(p->optimizer.type)->states,
                                .type = p->optimizer.moments,
                                .optimizer = p->optimizer.type};
    l.bytes = l.master ? iz_state_master_bytes(&l) * room : 0;
    for (int i = 0; i < l.states; i++) {
        l.at[i] = l.bytes;
        l.bytes += iz_moment_bytes(l.type, room - iz_state_lacks(&l, i));
    }
    return l;
}

int64_t iz_state_lacks(const struct iz_state_layout *l, int i)
{
    return iz_optimizer(l->optimizer)->state[i].of_elements ? l->lacks : 0;
}

struct iz_moments iz_state_array(const struct iz_state_layout *l, void *chunk,
                                 int i)
{
    return (struct iz_moments){(char *)chunk + l->at[i], l->type,
                               iz_optimizer(l->optimizer)->state[i].which,
                               l->room - iz_state_lacks(l, i)};
}

int iz_state_list(const struct iz_state_layout *l,
                  struct iz_state_bytes out[IZ_STATE_BYTES])
{
    int bytes =
        (int)iz_moment_bytes(l->type, IZ_MOMENT_BLOCK) / IZ_MOMENT_BLOCK;
    int n = 0;
    if (l->master)
        out[n++] = (struct iz_state_bytes){0, iz_state_master_bytes(l), 1};
    for (int i = 0; i < l->states; i++) {
        out[n++] = (struct iz_state_bytes){l->at[i], bytes, 1};
        if (l->type == IZ_MOMENT_FP8)
            out[n++] = (struct iz_state_bytes){
                l->at[i] + l->room - iz_state_lacks(l, i), 1, IZ_MOMENT_BLOCK};
    }
    return n;
}

double iz_state_traffic(const struct iz_plan *p, int64_t n, int64_t lacks)
{
    const struct iz_optimizer *o = iz_optimizer(p->optimizer.type);
    int64_t states = 0;
    for (int i = 0; i < o->states; i++)
        states += iz_moment_bytes(p->optimizer.moments,
                                  n - (o->state[i].of_elements ? lacks : 0));
    /* The gradient, the master and its parameter; halves go both ways. */
    return (p->optimizer.remainder ? 10.0 : 12.0) * (double)n +
           2.0 * (double)states;
}
