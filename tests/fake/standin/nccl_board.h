/* SPDX-License-Identifier: Apache-2.0 */
/* The memory through which the ranks of a communicator of the stand-in for
 * NCCL exchange data: processes of one machine. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <nccl.h>

#include "codelets/base/build.h"

#define IZ_BOARD_RANKS 16
#define IZ_BOARD_CHUNK (256 * 1024) /* bytes of a collective at once */
#define IZ_BOARD_MAIL (64 * 1024)   /* bytes of a message at once */

enum iz_verb { IZ_ALL_GATHER, IZ_SEND, IZ_RECV };

/* What all ranks of a collective, or both sides of a message, must agree on. */
struct iz_signature {
    enum iz_verb verb; /* IZ_SEND in a message */
    int type, root;
    int64_t count, number; /* elements; how many such calls came before */
};

/* A rank's place on the board. */
struct iz_seat {
    atomic_int pid, left, device;
    _Atomic int64_t begun; /* collectives that this rank has begun */
    struct iz_signature now;
    char data[IZ_BOARD_CHUNK];
};

/* One piece of a message on its way. */
struct iz_mail {
    atomic_int full;
    struct iz_signature now;
    char data[IZ_BOARD_MAIL];
};

struct iz_board {
    atomic_int arrived, phase;
    struct iz_seat seat[IZ_BOARD_RANKS];
    struct iz_mail mail[IZ_BOARD_RANKS][IZ_BOARD_RANKS]; /* [from][to] */
};

struct ncclComm {
    struct iz_board *board;
    int rank, ranks, device;
    int64_t sent[IZ_BOARD_RANKS], received[IZ_BOARD_RANKS];
    _Atomic int64_t issued, done; /* groups of calls, which run in order */
    atomic_bool aborted;
};

/* Opens the board and waits for all ranks; refuses two on one device. */
ncclResult_t iz_board_open(struct ncclComm *c, const char *name);
void iz_board_close(struct ncclComm *c);

/* A look at something that others will change. */
struct iz_wait {
    const struct ncclComm *c;
    const char *what;
    double since_s;
};

struct iz_wait iz_wait_begin(const struct ncclComm *c, const char *what);
/* Call between two looks: false when the communicator was aborted.  Ends the
 * program after IZ_STANDIN_TIMEOUT_S. */
bool iz_wait_more(struct iz_wait *w);

/* Waits for all ranks; false when aborted. */
bool iz_board_barrier(struct ncclComm *c, const char *what);

/* Ends the program: what this rank calls and what another does. */
IZ_NORETURN void iz_board_mismatch(const struct ncclComm *c,
                                   const struct iz_signature *mine, int other,
                                   const struct iz_signature *theirs);
bool iz_signature_same(const struct iz_signature *a,
                       const struct iz_signature *b);

/* Whether a rank that has not left the board no longer exists. */
bool iz_board_lost(const struct ncclComm *c);

/* What IZ_STANDIN_FAULT and IZ_STANDIN_BLOCKS ask for; see standin.h. */
void iz_fault(const struct ncclComm *c, int64_t group);
void iz_blocks(const char *function);
