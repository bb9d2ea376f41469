/* SPDX-License-Identifier: Apache-2.0 */
/* Messages over MPI and the small collectives, with the check that all ranks
 * have started the same ones.  Everything is sent with non-blocking calls and
 * waited for by polling, so that a wait can end and does not eat a core. */
#include <errno.h>
#include <mpi.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/comm/state.h"

#define BROADCAST_MESSAGE ((int64_t)1 << 28)

#define TIMEOUT_NS 20000000 /* between two looks at the clock */

static void comm_mpi_check(int rc, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int len = 0;
    if (rc == MPI_SUCCESS)
        return;
    MPI_Error_string(rc, text, &len);
    iz_die("%s: MPI says: %s", what, text);
}

/* Of each set 2 * size requests: of a fragment, at most one to and from each
 * rank, or one for each part of the ranks. */
static MPI_Request *requests_of(const struct iz_coll *c, int set)
{
    return (MPI_Request *)c->state->requests + (ptrdiff_t)2 * c->size * set;
}

void iz_flight_open(struct iz_coll *c)
{
    c->state->requests = iz_take(2 * (int64_t)c->size * IZ_FLIGHT_SETS,
                                 sizeof(MPI_Request), "messages");
}

void iz_flight_close(struct iz_coll *c)
{
    free(c->state->requests);
}

void iz_coll_sleep(const struct iz_coll *c, double start_s, const char *what,
                   struct iz_futex *f, uint32_t seen)
{
    long ns = iz_coll_nap_ns(iz_coll_waited(c, start_s, what));
    bool remote = c->local_size < c->size;
    int flag;
    if (remote)
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag,
                   MPI_STATUS_IGNORE);
    if (ns)
        iz_futex_sleep(f, seen, remote ? ns : TIMEOUT_NS);
}

static void wait_all(const struct iz_coll *c, int n, MPI_Request *r,
                     const char *what)
{
    double start = iz_coll_now();
    int done = 0;
    for (;;) {
        comm_mpi_check(MPI_Testall(n, r, &done, MPI_STATUSES_IGNORE), what);
        if (done)
            return;
        iz_coll_pause(c, start, what);
    }
}

/* One collective of MPI, which rc says has begun. */
static void finish(struct iz_coll *c, int rc, MPI_Request *r, const char *what)
{
    iz_coll_opens(c, true);
    comm_mpi_check(rc, what);
    wait_all(c, 1, r, what);
    iz_coll_opens(c, false);
}

void iz_flight_recv(struct iz_flight *f, int set, void *p, int64_t bytes,
                    int from)
{
    MPI_Request *r = requests_of(f->c, set) + f->n[set]++;
    comm_mpi_check(
        MPI_Irecv(p, (int)bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD, r),
        f->what);
}

void iz_flight_send(struct iz_flight *f, int set, const void *p, int64_t bytes,
                    int to)
{
    MPI_Request *r = requests_of(f->c, set) + f->n[set]++;
    if (f->c->state->host[to] != f->c->state->host[f->c->rank])
        f->c->far_bytes += bytes;
    comm_mpi_check(MPI_Isend(p, (int)bytes, MPI_BYTE, to, 0, MPI_COMM_WORLD, r),
                   f->what);
}

void iz_flight_wait(struct iz_flight *f, int set)
{
    if (f->n[set] > 0)
        wait_all(f->c, f->n[set], requests_of(f->c, set), f->what);
    f->n[set] = 0;
}

void iz_coll_gather_doubles(struct iz_coll *c, double *all, int per_rank,
                            const char *what)
{
    int64_t bytes = (int64_t)per_rank * (int64_t)sizeof(*all) * (c->size - 1);
    MPI_Request r;
    iz_coll_begin(c, IZ_COLL_DOUBLES, per_rank, what);
    finish(c,
           MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, per_rank,
                          MPI_DOUBLE, MPI_COMM_WORLD, &r),
           &r, what);
    iz_coll_count(c, bytes, bytes);
}

void iz_coll_barrier(struct iz_coll *c, const char *what)
{
    MPI_Request r;
    iz_coll_begin(c, IZ_COLL_BARRIER, 0, what);
    finish(c, MPI_Ibarrier(MPI_COMM_WORLD, &r), &r, what);
}

void iz_coll_broadcast(struct iz_coll *c, void *p, int64_t bytes, int root,
                       const char *what)
{
    iz_coll_begin(c, IZ_COLL_BROADCAST, bytes, what);
    for (int64_t at = 0; at < bytes; at += BROADCAST_MESSAGE) {
        int64_t n = min64(bytes - at, BROADCAST_MESSAGE);
        MPI_Request r;
        finish(c,
               MPI_Ibcast((char *)p + at, (int)n, MPI_BYTE, root,
                          MPI_COMM_WORLD, &r),
               &r, what);
    }
    bool sends = c->rank == root;
    iz_coll_count(c, sends ? bytes * (c->size - 1) : 0, sends ? 0 : bytes);
}

/* Of all ranks' numbers. */
static int least(struct iz_coll *c, int mine)
{
    const char *what = "the agreement of all ranks";
    MPI_Request r;
    if (!c->state)
        return mine;
    iz_coll_begin(c, IZ_COLL_ALL_OK, 0, what);
    finish(c,
           MPI_Iallreduce(MPI_IN_PLACE, &mine, 1, MPI_INT, MPI_MIN,
                          MPI_COMM_WORLD, &r),
           &r, what);
    return mine;
}

bool iz_coll_all_ok(struct iz_coll *c, bool ok)
{
    return least(c, ok) != 0;
}

int iz_coll_refuser(struct iz_coll *c, bool refuses)
{
    int first = least(c, refuses ? c->rank : c->size);
    return first < c->size ? first : -1;
}

/* ---- the same collectives on all ranks ---- */

void iz_coll_tell_order(const struct iz_coll *c, double own[2])
{
    own[0] = (double)(c->order_hash >> 32);
    own[1] = (double)(c->order_hash & 0xffffffffU);
}

static bool differs(const double *all, int per, int r)
{
    const double *v = all + r * per;
    return v[0] != all[0] || v[1] != all[1];
}

bool iz_coll_hear_order(const struct iz_coll *c, const double *all, int per,
                        char *out, size_t size)
{
    size_t used = 0;
    int n = 0;
    for (int r = 1; r < c->size; r++)
        n += differs(all, per, r);
    if (n == 0)
        return true;
    const char *before = n > 1 ? "ranks " : "rank ";
    for (int r = 1; r < c->size && used < size; r++) {
        if (!differs(all, per, r))
            continue;
        used += (size_t)snprintf(out + used, size - used, "%s%d", before, r);
        before = ", ";
    }
    return false;
}

int iz_coll_check_order(struct iz_coll *c)
{
    double *all = iz_take(2 * (int64_t)c->size, sizeof(*all),
                          "what %d ranks have started", c->size);
    char who[256];
    iz_coll_tell_order(c, all + 2 * c->rank);
    iz_coll_gather_doubles(c, all, 2, "order of collectives");
    bool same = iz_coll_hear_order(c, all, 2, who, sizeof(who));
    free(all);
    if (!same && c->rank == 0)
        fprintf(
            stderr,
            "izar: %s started other collectives than rank 0, or in "
            "another order: what was saved since the last step may be wrong\n",
            who);
    return same ? 0 : -EPROTO;
}
