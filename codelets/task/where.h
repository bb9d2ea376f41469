/* SPDX-License-Identifier: Apache-2.0 */
/* Where tasks run; also for code that only counts what they take. */
#pragma once

/* Kinds of workers: which ones may run a task. */
enum iz_where {
    IZ_ON_COMPUTE, /* the GPU if there is one, else as IZ_ON_HOST */
    IZ_ON_HOST,    /* the CPU's compute workers */
    IZ_ON_COMM, /* collectives: one worker, in submission order on every rank */
    IZ_ON_H2D,  /* copies to the GPU */
    IZ_ON_D2H,  /* copies to the host */
    IZ_ON_IO,   /* disk: workers that sleep in the kernel */
    IZ_WORKER_KINDS,
    /* The comm worker's rates for an all-gather, of which data for several
     * ranks of one host cross the network once; for one within a group of
     * ranks; and for what brings a group its copy of all parameters. */
    IZ_RATE_GATHER = IZ_WORKER_KINDS,
    IZ_RATE_GROUP,
    IZ_RATE_COPY,
    IZ_RATE_SQUARES, /* the GPU's, of passes that square a gradient */
    IZ_RATES
};

/* The bytes of a task are those of its worker kind: of memory for compute and
 * host, of the link for up and down, of the network for comm, of the disk. */
