/* SPDX-License-Identifier: Apache-2.0 */
/* MPI, in the only file that includes mpi.h: start and end, messages, and the
 * small collectives.  Everything is sent with non-blocking calls and waited for
 * by polling, so that a wait can end and does not eat a core. */
#include "runtime/comm/state.h"

#include <errno.h>
#include <mpi.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"

#define BROADCAST_PIECE ((int64_t)1 << 28)

enum { SEAT_BYTES = 4096 };
enum { ABORT_S = 5 }; /* how long MPI_Abort may take */
enum { TURNS = 16, TURNS_A_SECOND = 10 };
/* How long a rank is gone before others say so: its own last words, or the
 * launcher, come first. */
enum { LOST_S = 1 };

#define SPIN_S 20e-6        /* what waking takes */
#define LOOK_S 0.1          /* of a wait, before others are looked for */
#define TIMEOUT_NS 20000000 /* between two looks at the clock */

struct iz_requests {
    /* 2 * size each: a piece to and from each rank. */
    MPI_Request *group[IZ_FLIGHT_GROUPS];
    MPI_Win seats;
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

double iz_coll_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check_all_there(const struct iz_coll *c, double now,
                            const char *what)
{
    _Atomic double *since = &c->state->lost_s;
    int lost = iz_near_lost(c);

    if (lost < 0)
        return;
    if (*since == 0)
        *since = now;
    else if (now - *since > LOST_S)
        iz_die("%s: rank %d is gone", what, lost);
}

double iz_coll_waited(const struct iz_coll *c, double start_s, const char *what)
{
    double now = iz_coll_now(), s = now - start_s;

    if (c->timeout_s > 0 && s > c->timeout_s)
        iz_die("waited %g s for %s: is another rank dead or stopped?",
               c->timeout_s, what);
    if (s > LOOK_S)
        check_all_there(c, now, what);
    return s;
}

/* A sixteenth of the wait so far, so that it ends late by no more than that. */
static long nap_ns(double waited_s)
{
    double ns = waited_s * 1e9 / 16;

    return ns < 20e3 ? 20000 : ns > 1e6 ? 1000000 : (long)ns;
}

/* Between two polls: nothing for as long as a message takes within a host, then
 * sleep.  Not sched_yield: called over and over, it moves the thread so far
 * back in the fair scheduler of recent kernels that threads beside it starve.
 */
void iz_coll_pause(const struct iz_coll *c, double start_s, const char *what)
{
    double s = iz_coll_waited(c, start_s, what);

    if (s >= SPIN_S)
        nanosleep(&(struct timespec){.tv_nsec = nap_ns(s)}, NULL);
}

void iz_coll_sleep(const struct iz_coll *c, double start_s, const char *what,
                   struct iz_futex *f, uint32_t seen)
{
    double s = iz_coll_waited(c, start_s, what);
    bool far = c->local_size < c->size;
    int flag;

    if (far)
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag,
                   MPI_STATUS_IGNORE);
    if (s >= SPIN_S)
        iz_futex_sleep(f, seen, far ? nap_ns(s) : TIMEOUT_NS);
}

static void wait_all(const struct iz_coll *c, int n, MPI_Request *r,
                     const char *what)
{
    double start = iz_coll_now();
    int done = 0;

    for (;;) {
        check(MPI_Testall(n, r, &done, MPI_STATUSES_IGNORE), what);
        if (done)
            return;
        iz_coll_pause(c, start, what);
    }
}

void iz_coll_begin(struct iz_coll *c, enum iz_coll_kind kind, int64_t bytes,
                   const char *what)
{
    uint64_t h = iz_mix(c->order_hash + IZ_GOLDEN * (uint64_t)(kind + 1));

    h = iz_mix(h + (uint64_t)bytes);
    c->order_hash = iz_mix_text(h, what);
}

void iz_coll_note(struct iz_coll *c, const char *what, int64_t sent_bytes,
                  int64_t received_bytes)
{
    iz_coll_begin(c, IZ_COLL_NOTE, sent_bytes, what);
    c->sent_bytes += sent_bytes;
    c->received_bytes += received_bytes;
}

static MPI_Request *next_request(struct iz_flight *f, int group)
{
    return &f->c->state->requests->group[group][f->n[group]++];
}

void iz_flight_recv(struct iz_flight *f, int group, void *p, int64_t bytes,
                    int from)
{
    check(MPI_Irecv(p, (int)bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD,
                    next_request(f, group)),
          f->what);
}

void iz_flight_send(struct iz_flight *f, int group, const void *p,
                    int64_t bytes, int to)
{
    check(MPI_Isend(p, (int)bytes, MPI_BYTE, to, 0, MPI_COMM_WORLD,
                    next_request(f, group)),
          f->what);
}

void iz_flight_wait(struct iz_flight *f, int group)
{
    if (f->n[group] > 0)
        wait_all(f->c, f->n[group], f->c->state->requests->group[group],
                 f->what);
    f->n[group] = 0;
}

void iz_coll_gather_doubles(struct iz_coll *c, double *all, int per_rank,
                            const char *what)
{
    int64_t bytes = (int64_t)per_rank * (int64_t)sizeof *all * (c->size - 1);
    MPI_Request r;

    iz_coll_begin(c, IZ_COLL_DOUBLES, per_rank, what);
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

    iz_coll_begin(c, IZ_COLL_BARRIER, 0, what);
    check(MPI_Ibarrier(MPI_COMM_WORLD, &r), what);
    wait_all(c, 1, &r, what);
}

void iz_coll_broadcast(struct iz_coll *c, void *p, int64_t bytes, int root,
                       const char *what)
{
    iz_coll_begin(c, IZ_COLL_BROADCAST, bytes, what);
    for (int64_t at = 0; at < bytes; at += BROADCAST_PIECE) {
        int64_t left = bytes - at;
        int64_t n = left < BROADCAST_PIECE ? left : BROADCAST_PIECE;
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

/* Of all ranks' numbers. */
static int least(struct iz_coll *c, int mine)
{
    const char *what = "the agreement of all ranks";
    MPI_Request r;

    iz_coll_begin(c, IZ_COLL_ALL_OK, 0, what);
    check(MPI_Iallreduce(MPI_IN_PLACE, &mine, 1, MPI_INT, MPI_MIN,
                         MPI_COMM_WORLD, &r),
          what);
    wait_all(c, 1, &r, what);
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

static volatile sig_atomic_t abort_status;

static void end_alone(int sig)
{
    (void)sig;
    _exit(abort_status);
}

/* MPI_Abort tells the launcher to end all ranks.  It may hang: Open MPI 4.1's
 * launcher loses a rank's last message now and then ("Data unpack ..."), and
 * the rank waits for its receipt.  The alarm then ends at least this rank, with
 * its own status, and the launcher notices.  And that launcher may crash on a
 * message that comes while it ends: where all ranks' waits end at the same
 * time, the first one's call ends the others in their turns. */
static void abort_ranks(int status)
{
    int rank = 0;

    abort_status = status;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    signal(SIGTERM, SIG_DFL); /* a run would finish its step */
    rank = rank < TURNS ? rank : TURNS;
    nanosleep(&(struct timespec){.tv_sec = rank / TURNS_A_SECOND,
                                 .tv_nsec = rank % TURNS_A_SECOND *
                                            (1000000000L / TURNS_A_SECOND)},
              NULL);
    signal(SIGALRM, end_alone);
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
static void find_ranks(struct iz_coll *c, MPI_Comm *host)
{
    MPI_Comm_rank(MPI_COMM_WORLD, &c->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c->size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL,
                        host);
    MPI_Comm_rank(*host, &c->local_rank);
    MPI_Comm_size(*host, &c->local_size);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(*host, MPI_ERRORS_RETURN);
}

/* Which rank is where. */
static void find_hosts(struct iz_coll *c, MPI_Comm host)
{
    struct iz_coll_state *s = c->state;
    int first = c->rank;

    MPI_Bcast(&first, 1, MPI_INT, 0, host);
    MPI_Allgather(&first, 1, MPI_INT, s->host, 1, MPI_INT, MPI_COMM_WORLD);
    MPI_Allgather(&c->local_rank, 1, MPI_INT, s->index, 1, MPI_INT,
                  MPI_COMM_WORLD);
}

int iz_coll_host(const struct iz_coll *c, int r)
{
    return c->state->host[r];
}

/* A few cache lines of each rank that all ranks of the host see. */
static bool find_seats(struct iz_coll *c, MPI_Comm host)
{
    struct iz_coll_state *s = c->state;
    struct iz_seat *own = NULL;
    MPI_Info info;
    int rc;

    MPI_Info_create(&info);
    MPI_Info_set(info, "alloc_shared_noncontig", "true"); /* pages apart */
    rc = MPI_Win_allocate_shared(SEAT_BYTES, 1, info, host, &own,
                                 &s->requests->seats);
    MPI_Info_free(&info);
    if (rc != MPI_SUCCESS) {
        s->requests->seats = MPI_WIN_NULL;
        snprintf(s->why, sizeof s->why, "MPI shares no memory on this host");
        return false;
    }
    for (int r = 0; r < c->size; r++) {
        MPI_Aint bytes;
        int unit;

        if (s->host[r] == s->host[c->rank] &&
            (MPI_Win_shared_query(s->requests->seats, s->index[r], &bytes,
                                  &unit, &s->seat[r]) != MPI_SUCCESS ||
             !s->seat[r])) {
            snprintf(s->why, sizeof s->why,
                     "MPI does not show what ranks share");
            return false;
        }
    }
    return true;
}

/* Reading each other's memory is for all ranks or for none. */
static void find_near(struct iz_coll *c, MPI_Comm host)
{
    struct iz_coll_state *s = c->state;
    int can, most = 0;

    MPI_Allreduce(&c->local_size, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    s->can_near = most == 1; /* there is nobody whose memory to read */
    if (most == 1)
        return;
    can = iz_coll_all_ok(c, find_seats(c, host)) && iz_near_try(c);
    s->can_near = iz_coll_all_ok(c, can != 0);
    if (can && !s->can_near)
        snprintf(s->why, sizeof s->why, "it cannot be read on another host");
}

const char *iz_coll_near(struct iz_coll *c, bool wanted)
{
    c->state->near = wanted && c->state->can_near &&
                     c->state->requests->seats != MPI_WIN_NULL;
    if (!c->state->near)
        iz_near_forbid();
    return c->state->can_near ? NULL : c->state->why;
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
    s->requests = calloc(1, sizeof *s->requests);
    s->piece = calloc(size, sizeof *s->piece);
    c->first = calloc(size + 1, sizeof *c->first);
    s->host = calloc(size, sizeof *s->host);
    s->index = calloc(size, sizeof *s->index);
    s->seat = calloc(size, sizeof *s->seat);
    if (s->requests == NULL || s->piece == NULL || s->host == NULL ||
        c->first == NULL || s->index == NULL || s->seat == NULL)
        return -ENOMEM;
    s->requests->seats = MPI_WIN_NULL;
    for (int i = 0; i < IZ_FLIGHT_GROUPS; i++) {
        s->requests->group[i] = calloc(2 * size, sizeof(MPI_Request));
        if (s->requests->group[i] == NULL)
            return -ENOMEM;
    }
    return 0;
}

int iz_coll_open(struct iz_coll **out, int *argc, char ***argv)
{
    struct iz_coll *c = calloc(1, sizeof *c);
    int err = c == NULL ? -ENOMEM : start_mpi(argc, argv);
    MPI_Comm host = MPI_COMM_NULL;

    if (err == 0) {
        find_ranks(c, &host);
        set_ending(c);
        err = make_state(c);
    }
    if (err == 0) {
        find_hosts(c, host);
        find_near(c, host);
        iz_coll_near(c, true);
        c->order_hash = 0; /* what follows is the caller's */
    }
    if (host != MPI_COMM_NULL)
        MPI_Comm_free(&host);
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

static void free_state(struct iz_coll_state *s)
{
    if (s->requests != NULL)
        for (int i = 0; i < IZ_FLIGHT_GROUPS; i++)
            free(s->requests->group[i]);
    free(s->requests);
    free(s->piece);
    free(s->scratch);
    free(s->host);
    free(s->index);
    free(s->seat);
    free(s);
}

void iz_coll_close(struct iz_coll **c)
{
    struct iz_coll_state *s = *c == NULL ? NULL : (*c)->state;

    if (*c == NULL)
        return;
    iz_die_set("", NULL);
    if (s != NULL && s->requests != NULL && s->requests->seats != MPI_WIN_NULL)
        MPI_Win_free(&s->requests->seats);
    finalize_mpi();
    if (s != NULL) {
        iz_near_close(*c);
        free_state(s);
    }
    free((*c)->first);
    free(*c);
    *c = NULL;
}
