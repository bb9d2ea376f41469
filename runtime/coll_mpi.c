/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives over MPI, the only file that includes mpi.h.  Everything is
 * sent with non-blocking calls and waited for by polling, so that a wait can
 * end and does not eat a core.  The sums are our own: MPI fixes no order of
 * summation. */
#include "runtime/coll.h"

#include <errno.h>
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "codelets/die.h"
#include "codelets/flat.h"
#include "codelets/mix.h"

/* Bytes per peer and message, so that a buffer may be larger than an int, and
 * so that every few megabytes a new wait starts with fast polling. */
#define GATHER_PIECE ((int64_t)4 << 20)
#define BROADCAST_PIECE ((int64_t)1 << 28)

enum { ABORT_S = 5 }; /* how long MPI_Abort may take */

struct iz_coll_state {
    MPI_Request *request; /* 4 * size: two pieces in flight to and from each */
    const void **piece;   /* size: what is summed, in rank order */
    char *scratch;
    int64_t scratch_bytes;
};

static void check(int rc, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int len = 0;

    if (rc == MPI_SUCCESS)
        return;
    MPI_Error_string(rc, text, &len);
    iz_die("%s: MPI says: %s", what, text);
}

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Between two polls: nothing for as long as a message takes within a host, then
 * give way to a thread that has work, then sleep. */
static void relax(double waited_s)
{
    long ns = waited_s < 0.02 ? 20000 : 50000;

    if (waited_s < 20e-6)
        return;
    if (waited_s < 2e-3)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static void wait_all(struct iz_coll *c, int n, MPI_Request *r, const char *what)
{
    double start = now_s();
    int done = 0;

    for (;;) {
        double waited;

        check(MPI_Testall(n, r, &done, MPI_STATUSES_IGNORE), what);
        if (done)
            return;
        waited = now_s() - start;
        if (c->timeout_s > 0 && waited > c->timeout_s)
            iz_die("waited %g s for %s: is another rank dead or stopped?",
                   c->timeout_s, what);
        relax(waited);
    }
}

/* Every collective starts here. */
static void begin(struct iz_coll *c, int kind, int64_t bytes, const char *what)
{
    uint64_t h = iz_mix(c->order_hash + IZ_GOLDEN * (uint64_t)(kind + 1));

    h = iz_mix(h + (uint64_t)bytes);
    c->order_hash = iz_mix_text(h, what);
}

enum { ALL_GATHER, REDUCE_SCATTER, DOUBLES, BARRIER, BROADCAST, ALL_OK, NOTE };

void iz_coll_note(struct iz_coll *c, const char *what, int64_t sent_bytes,
                  int64_t received_bytes)
{
    begin(c, NOTE, sent_bytes, what);
    c->sent_bytes += sent_bytes;
    c->received_bytes += received_bytes;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The messages of one collective.  Two groups of requests: the pieces number k
 * and k + 1 are in flight at the same time, in group k % 2. */
struct flight {
    struct iz_coll *c;
    const char *what;
    MPI_Request *request[2];
    int n[2];
};

static struct flight flight_of(struct iz_coll *c, const char *what)
{
    MPI_Request *r = c->state->request;

    return (struct flight){
        .c = c, .what = what, .request = {r, r + (ptrdiff_t)2 * c->size}};
}

static void post_recv(struct flight *f, int group, void *p, int64_t bytes,
                      int from)
{
    MPI_Request *r = &f->request[group][f->n[group]++];

    check(MPI_Irecv(p, (int)bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD, r),
          f->what);
    f->c->received_bytes += bytes;
}

static void post_send(struct flight *f, int group, const void *p, int64_t bytes,
                      int to)
{
    MPI_Request *r = &f->request[group][f->n[group]++];

    check(MPI_Isend(p, (int)bytes, MPI_BYTE, to, 0, MPI_COMM_WORLD, r),
          f->what);
    f->c->sent_bytes += bytes;
}

static void wait_group(struct flight *f, int group)
{
    wait_all(f->c, f->n[group], f->request[group], f->what);
    f->n[group] = 0;
}

/* The k-th peer to receive from and to send to: everybody at another one first,
 * so that no rank is the target of all. */
static int peer_from(const struct iz_coll *c, int k)
{
    return (c->rank + c->size - k) % c->size;
}

static int peer_to(const struct iz_coll *c, int k)
{
    return (c->rank + k) % c->size;
}

static void gather_piece(struct flight *f, int group, char *full,
                         int64_t shard_bytes, int64_t at)
{
    const struct iz_coll *c = f->c;
    int64_t bytes = min64(GATHER_PIECE, shard_bytes - at);

    for (int k = 1; k < c->size; k++) {
        int from = peer_from(c, k);

        post_recv(f, group, full + from * shard_bytes + at, bytes, from);
    }
    for (int k = 1; k < c->size; k++)
        post_send(f, group, full + c->rank * shard_bytes + at, bytes,
                  peer_to(c, k));
}

void iz_coll_all_gather(struct iz_coll *c, void *full, int64_t shard_bytes,
                        const char *what)
{
    struct flight f = flight_of(c, what);
    int group = 0;

    begin(c, ALL_GATHER, shard_bytes, what);
    for (int64_t at = 0; at < shard_bytes; at += GATHER_PIECE) {
        gather_piece(&f, group, full, shard_bytes, at);
        group = !group;
        wait_group(&f, group);
    }
    wait_group(&f, !group);
}

static void need_scratch(struct iz_coll *c, int64_t bytes, const char *what)
{
    struct iz_coll_state *s = c->state;

    if (bytes <= s->scratch_bytes)
        return;
    free(s->scratch);
    s->scratch = aligned_alloc(64, (size_t)bytes);
    if (s->scratch == NULL)
        iz_die("%s: no memory for %lld bytes of scratch", what,
               (long long)bytes);
    s->scratch_bytes = bytes;
}

/* One reduce-scatter.  Piece k of the shard is received into one half of the
 * scratch while piece k - 1 is being summed from the other. */
struct reduction {
    struct flight f;
    char *out, *full;
    enum iz_dtype out_type, wire;
    bool accumulate;
    int64_t shard_bytes, piece_bytes; /* of the wire type */
};

/* Where the piece at `at` of this rank's shard as rank `from` has it is, or
 * will be when the group has arrived. */
static char *reduce_source(const struct reduction *d, int group, int from,
                           int64_t at)
{
    const struct iz_coll *c = d->f.c;
    int slot = from < c->rank ? from : from - 1;

    if (from == c->rank)
        return d->full + from * d->shard_bytes + at;
    return c->state->scratch + (group * (c->size - 1) + slot) * d->piece_bytes;
}

static void reduce_post(struct reduction *d, int group, int64_t at)
{
    const struct iz_coll *c = d->f.c;
    int64_t bytes = min64(d->piece_bytes, d->shard_bytes - at);

    for (int k = 1; k < c->size; k++) {
        int from = peer_from(c, k);

        post_recv(&d->f, group, reduce_source(d, group, from, at), bytes, from);
    }
    for (int k = 1; k < c->size; k++) {
        int to = peer_to(c, k);

        post_send(&d->f, group, d->full + to * d->shard_bytes + at, bytes, to);
    }
}

static void reduce_sum(struct reduction *d, int group, int64_t at)
{
    const struct iz_coll *c = d->f.c;
    const void **piece = c->state->piece;
    int64_t bytes = min64(d->piece_bytes, d->shard_bytes - at);
    int64_t size = iz_dtype_bytes(d->wire);
    char *out = d->out + at / size * iz_dtype_bytes(d->out_type);

    wait_group(&d->f, group);
    for (int r = 0; r < c->size; r++)
        piece[r] = reduce_source(d, group, r, at);
    iz_flat_sum(out, d->out_type, d->accumulate, piece, c->size, d->wire,
                bytes / size);
}

void iz_coll_reduce_scatter(struct iz_coll *c, void *out,
                            enum iz_dtype out_type, bool accumulate, void *full,
                            enum iz_dtype wire, int64_t shard, const char *what)
{
    int64_t bytes = shard * iz_dtype_bytes(wire), last = 0;
    struct reduction d = {.f = flight_of(c, what),
                          .out = out,
                          .full = full,
                          .out_type = out_type,
                          .wire = wire,
                          .accumulate = accumulate,
                          .shard_bytes = bytes,
                          .piece_bytes = iz_coll_piece_bytes(c, bytes)};
    int group = 0;

    begin(c, REDUCE_SCATTER, bytes, what);
    if (bytes == 0)
        return;
    need_scratch(c, iz_coll_scratch_bytes(c, bytes), what);
    reduce_post(&d, group, 0);
    for (int64_t at = d.piece_bytes; at < bytes; at += d.piece_bytes) {
        reduce_post(&d, !group, at);
        reduce_sum(&d, group, last);
        group = !group;
        last = at;
    }
    reduce_sum(&d, group, last);
}

void iz_coll_gather_doubles(struct iz_coll *c, double *all, int per_rank,
                            const char *what)
{
    int64_t bytes = (int64_t)per_rank * (int64_t)sizeof *all * (c->size - 1);
    MPI_Request r;

    begin(c, DOUBLES, per_rank, what);
    check(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, per_rank,
                         MPI_DOUBLE, MPI_COMM_WORLD, &r),
          what);
    wait_all(c, 1, &r, what);
    c->sent_bytes += bytes;
    c->received_bytes += bytes;
}

void iz_coll_barrier(struct iz_coll *c, const char *what)
{
    MPI_Request r;

    begin(c, BARRIER, 0, what);
    check(MPI_Ibarrier(MPI_COMM_WORLD, &r), what);
    wait_all(c, 1, &r, what);
}

void iz_coll_broadcast(struct iz_coll *c, void *p, int64_t bytes, int root,
                       const char *what)
{
    begin(c, BROADCAST, bytes, what);
    for (int64_t at = 0; at < bytes; at += BROADCAST_PIECE) {
        int64_t n = min64(BROADCAST_PIECE, bytes - at);
        MPI_Request r;

        check(MPI_Ibcast((char *)p + at, (int)n, MPI_BYTE, root, MPI_COMM_WORLD,
                         &r),
              what);
        wait_all(c, 1, &r, what);
    }
    if (c->rank == root)
        c->sent_bytes += bytes * (c->size - 1);
    else
        c->received_bytes += bytes;
}

bool iz_coll_all_ok(struct iz_coll *c, bool ok)
{
    const char *what = "the agreement of all ranks";
    int all = ok;
    MPI_Request r;

    begin(c, ALL_OK, 0, what);
    check(MPI_Iallreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN,
                         MPI_COMM_WORLD, &r),
          what);
    wait_all(c, 1, &r, what);
    return all != 0;
}

/* MPI_Abort tells the launcher to end all ranks; should it hang, the alarm ends
 * at least this one, and the launcher notices. */
static void abort_ranks(int status)
{
    signal(SIGALRM, SIG_DFL);
    alarm(ABORT_S);
    MPI_Abort(MPI_COMM_WORLD, status);
}

static int start_mpi(int *argc, char ***argv)
{
    int level = MPI_THREAD_SINGLE;

    if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &level) !=
        MPI_SUCCESS) {
        fprintf(stderr, "izar: MPI does not start\n");
        return -EIO;
    }
    if (level < MPI_THREAD_SERIALIZED) {
        fprintf(stderr, "izar: this MPI may be called from the main thread "
                        "only; it must offer MPI_THREAD_SERIALIZED\n");
        return -ENOTSUP;
    }
    return 0;
}

/* From here on, errors are ours to report. */
static void find_ranks(struct iz_coll *c)
{
    MPI_Comm host;

    MPI_Comm_rank(MPI_COMM_WORLD, &c->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c->size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL,
                        &host);
    MPI_Comm_rank(host, &c->local_rank);
    MPI_Comm_size(host, &c->local_size);
    MPI_Comm_free(&host);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

static void set_ending(const struct iz_coll *c)
{
    char prefix[32] = "";

    if (c->size > 1)
        snprintf(prefix, sizeof prefix, "rank %d: ", c->rank);
    iz_die_set(prefix, abort_ranks);
}

static int make_state(struct iz_coll *c)
{
    struct iz_coll_state *s = calloc(1, sizeof *s);
    size_t size = (size_t)c->size;

    c->state = s;
    if (s == NULL)
        return -ENOMEM;
    s->request = calloc(4 * size, sizeof(MPI_Request));
    s->piece = calloc(size, sizeof *s->piece);
    return s->request != NULL && s->piece != NULL ? 0 : -ENOMEM;
}

int iz_coll_open(struct iz_coll **out, int *argc, char ***argv)
{
    struct iz_coll *c = calloc(1, sizeof *c);
    int err = c == NULL ? -ENOMEM : start_mpi(argc, argv);

    if (err == 0) {
        find_ranks(c);
        set_ending(c);
        err = make_state(c);
    }
    if (err == -ENOMEM)
        fprintf(stderr, "izar: no memory for the state of the ranks\n");
    if (err != 0)
        iz_coll_close(&c);
    *out = c;
    return err;
}

static void finalize_mpi(void)
{
    int started = 0, ended = 0;

    MPI_Initialized(&started);
    MPI_Finalized(&ended);
    if (started && !ended)
        MPI_Finalize();
}

void iz_coll_close(struct iz_coll **c)
{
    struct iz_coll_state *s = *c == NULL ? NULL : (*c)->state;

    if (*c == NULL)
        return;
    iz_die_set("", NULL);
    finalize_mpi();
    if (s != NULL) {
        free(s->request);
        free(s->piece);
        free(s->scratch);
    }
    free(s);
    free(*c);
    *c = NULL;
}
