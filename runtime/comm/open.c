/* SPDX-License-Identifier: Apache-2.0 */
/* Start and end of the ranks: MPI, which rank is on which host, what the ranks
 * of a host share, and how a rank that fails ends the others. */
#include <errno.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/comm/state.h"

enum { SEAT_BYTES = 4096 };
enum { ABORT_S = 5 }; /* how long MPI_Abort may take */
enum { SHARE_S = 5 }; /* ranks that have just met, for one that fails */
enum { TURNS = 16, TURNS_A_SECOND = 10 };

static MPI_Win seats = MPI_WIN_NULL; /* memory that ranks of a host share */
static volatile sig_atomic_t abort_status;

static void end_alone(int sig)
{
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

/* The launcher of another MPI starts ranks that do not see each other: each
 * would be a run of its own. */
static int check_launcher(void)
{
    static const char *const name[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
    int size, len;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (size_t i = 0; size == 1 && i < sizeof(name) / sizeof(*name); i++) {
        const char *n = getenv(name[i]);
        if (!n || atoi(n) < 2)
            continue;
        MPI_Get_library_version(mpi, &len);
        fprintf(stderr,
                "izar: %s: the launcher started %s ranks, of which this "
                "program's MPI (%.*s) sees one: start it by the mpirun of its "
                "own MPI, or build it with the launcher's (meson's option "
                "mpi)\n",
                name[i], n, (int)strcspn(mpi, ",\n"), mpi);
        return -ENOTSUP;
    }
    return 0;
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
    return check_launcher();
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

/* The greatest common divisor of where hosts begin among the ranks. */
int iz_coll_host_group(const struct iz_coll *c)
{
    const int *host = c->state->host;
    int64_t g = c->size;
    for (int r = 1; r < c->size; r++)
        if (host[r] != host[r - 1])
            g = gcd64(g, r);
    return (int)g;
}

int iz_coll_sum_group(const struct iz_coll *c)
{
    return c->sum_group ? c->sum_group : c->size;
}

/* A few cache lines of each rank that all ranks of the host see. */
static bool find_seats(struct iz_coll *c, MPI_Comm host)
{
    struct iz_coll_state *s = c->state;
    struct iz_seat *own = NULL;
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "alloc_shared_noncontig", "true"); /* pages apart */
    int rc = MPI_Win_allocate_shared(SEAT_BYTES, 1, info, host, &own, &seats);
    MPI_Info_free(&info);
    if (rc != MPI_SUCCESS) {
        seats = MPI_WIN_NULL;
        snprintf(s->why, sizeof(s->why), "MPI shares no memory on this host");
        return false;
    }
    for (int r = 0; r < c->size; r++) {
        MPI_Aint bytes;
        int unit;
        if (s->host[r] == s->host[c->rank] &&
            (MPI_Win_shared_query(seats, s->index[r], &bytes, &unit,
                                  &s->seat[r]) != MPI_SUCCESS ||
             !s->seat[r])) {
            snprintf(s->why, sizeof(s->why),
                     "MPI does not show what ranks share");
            return false;
        }
    }
    return true;
}

/* Where it fails for the host's first rank alone, Open MPI leaves the others in
 * the call. */
static bool share_seats(struct iz_coll *c, MPI_Comm host)
{
    bool found = find_seats(c, host);
    c->timeout_s = found ? 0 : SHARE_S;
    iz_coll_barrier(c, "ranks in MPI_Win_allocate_shared, which fails here (is "
                       "/dev/shm full?)");
    c->timeout_s = 0;
    return iz_coll_all_ok(c, found);
}

/* Reading each other's memory is for all ranks or for none. */
static void find_local(struct iz_coll *c, MPI_Comm host)
{
    struct iz_coll_state *s = c->state;
    int can, most = 0;
    MPI_Allreduce(&c->local_size, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    s->can_read_local = most == 1; /* there is nobody whose memory to read */
    if (most == 1)
        return;
    can = share_seats(c, host) && iz_local_try(c);
    s->can_read_local = iz_coll_all_ok(c, can != 0);
    if (!s->can_read_local && !*s->why)
        snprintf(s->why, sizeof(s->why), "it cannot be read on another host");
}

const char *iz_coll_read_local(struct iz_coll *c, bool wanted)
{
    c->state->reads_local =
        wanted && c->state->can_read_local && seats != MPI_WIN_NULL;
    if (!c->state->reads_local)
        iz_local_forbid();
    return c->state->can_read_local ? NULL : c->state->why;
}

static void set_ending(const struct iz_coll *c)
{
    char prefix[32] = "";
    if (c->size > 1)
        snprintf(prefix, sizeof(prefix), "rank %d: ", c->rank);
    iz_die_set(prefix, abort_ranks);
}

static void *for_ranks(int n, size_t size)
{
    return iz_take(n, (int64_t)size, "the state of the ranks");
}

static void make_state(struct iz_coll *c)
{
    struct iz_coll_state *s = c->state = for_ranks(1, sizeof(*s));
    c->first = for_ranks(c->size + 1, sizeof(*c->first));
    s->addend = for_ranks(c->size, sizeof(*s->addend));
    s->host = for_ranks(c->size, sizeof(*s->host));
    s->index = for_ranks(c->size, sizeof(*s->index));
    s->seat = for_ranks(c->size, sizeof(*s->seat));
    iz_flight_open(c);
}

int iz_coll_open(struct iz_coll **out, int *argc, char ***argv)
{
    struct iz_coll *c = for_ranks(1, sizeof(*c));
    int err = start_mpi(argc, argv);
    MPI_Comm host = MPI_COMM_NULL;
    if (err == 0) {
        find_ranks(c, &host);
        set_ending(c);
        make_state(c);
        find_hosts(c, host);
        find_local(c, host);
        iz_coll_read_local(c, true);
        c->order_hash = 0; /* what follows is the caller's */
    }
    if (host != MPI_COMM_NULL)
        MPI_Comm_free(&host);
    if (err != 0)
        iz_coll_close(&c);
    *out = c;
    return err;
}

void iz_coll_close(struct iz_coll **c)
{
    struct iz_coll_state *s = *c ? (*c)->state : NULL;
    int started = 0, ended = 0;
    if (!*c)
        return;
    iz_die_set("", NULL);
    if (seats != MPI_WIN_NULL)
        MPI_Win_free(&seats);
    MPI_Initialized(&started);
    MPI_Finalized(&ended);
    if (started && !ended)
        MPI_Finalize();
    if (s) {
        iz_coll_gone_close(*c);
        iz_flight_close(*c);
        free(s->addend);
        free(s->host);
        free(s->index);
        free(s->seat);
    }
    free(s);
    free((*c)->first);
    free(*c);
    *c = NULL;
}
