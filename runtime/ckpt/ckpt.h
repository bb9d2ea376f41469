/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints: a directory step-00000100/ with one safetensors file per rank
 * and an index that names every logical parameter, so that the files mean the
 * same at any number of ranks.  Written under a temporary name, synced, then
 * renamed: a crash leaves the previous checkpoint as it was. */
#pragma once

#include "runtime/ckpt/rank_file.h"
#include "runtime/comm/coll.h"

/* Copies elements [from, from + n) of a rank's range into the run.  Called with
 * n <= IZ_CKPT_BLOCK, in ascending order. */
struct iz_ckpt_sink {
    void (*put)(void *arg, int64_t from, const float *in, int64_t n);
    void *arg;
};

/* Where one parameter lies in the flat arrays; the index lists it. */
struct iz_ckpt_name {
    char name[96], array[64]; /* "h.3.ln_1.weight" lies in "h.3/..." */
    int64_t offset, rows, cols;
};

/* A number that a resumed run needs; stored exactly, as hex-float text. */
struct iz_ckpt_scalar {
    char name[48];
    double value;
};

#define IZ_CKPT_EXACT "none"

/* Of hexadecimal digits, with '\0': made when a run begins, and kept by all
 * that go on with it. */
#define IZ_CKPT_ID 17

/* Whose a checkpoint is, all borrowed: the model section as JSON, the identity
 * of the run as lines of text, and its id; and what the keys of the section are
 * in checkpoints that are older than they, as JSON.  NULL: none. */
struct iz_ckpt_of {
    const char *model, *identity, *id, *before;
};

struct iz_ckpt {
    const char *dir; /* run's output; checkpoints lie in dir/checkpoints */
    int keep_last;   /* so many are kept after a successful save; 0: all */
    /* Of each flat fp32 array what this rank writes, or loads into the sinks:
     * "h.3/m", the master or a state of one unit's parameters, laid end to end
     * without padding.  What the ranks write lies end to end. */
    struct iz_rank_range *array;
    struct iz_ckpt_sink *sink; /* [n_arrays]; NULL: a load only checks */
    int n_arrays;
    const struct iz_ckpt_name *names;
    int n_names;
    struct iz_ckpt_scalar *scalar;
    int n_scalars;
    /* The model and the name of the optimizer that has the states must be the
     * same when it is loaded. */
    struct iz_ckpt_of of;
    const char *optimizer;
    /* How the run rounds its states: IZ_MOMENT_ROUNDING, or IZ_CKPT_EXACT. */
    const char *rounding;
};

/* ---- dir.c: the directories, and the files in them ---- */

/* dir/checkpoints/step-00000100 was complete when it got that name, and has an
 * index.json; step-....tmp is being written or removed; step-....old is one
 * that is just being replaced, and complete as well. */

#define IZ_CKPT_PATH 1280
/* Of a file in such a directory. */
#define IZ_CKPT_FILE_PATH (IZ_CKPT_PATH + 64)

/* The first rank removes what a crash left, before anybody saves. */
int iz_ckpt_dir_sweep(const char *dir);
/* Removes what was written for the checkpoint of `step`. */
void iz_ckpt_dir_abort(const char *dir, int64_t step);

/* The newest complete checkpoint below `limit`; -ENOENT if there is none. */
int64_t iz_ckpt_dir_newest(const char *dir, int64_t limit);

/* Where the complete checkpoint of `step` lies.  -ENOENT if nowhere. */
int iz_ckpt_dir_find(const char *dir, int64_t step, char path[IZ_CKPT_PATH]);

/* The id of the run that wrote the checkpoint of `step`, and its identity,
 * malloc'ed, if `identity` is not NULL; "" and NULL where it does not tell.
 * Negative errno, nothing printed: it cannot be read. */
int iz_ckpt_whose(const char *dir, int64_t step, char id[IZ_CKPT_ID],
                  char **identity);

struct iz_ckpt_writer {
    const struct iz_ckpt *k; /* borrowed */
    int64_t step;
    int rank, ranks;
    int fd;
    int64_t data, bytes; /* where data begin; of the whole file */
    char path[IZ_CKPT_FILE_PATH];
};

/* Creates the file, and its directory if no other rank has; the first four
 * members are set.  From here to the end of close the arrays have offsets and
 * hashes.  Negative errno with the reason printed, here and below. */
int iz_ckpt_writer_open(struct iz_ckpt_writer *w);
/* Block b of array i; in any order, different ones at the same time. */
int iz_ckpt_writer_block(const struct iz_ckpt_writer *w, int i, int64_t b,
                         const float *in);
/* Header and sync; also after an error, which it returns. */
int iz_ckpt_writer_close(struct iz_ckpt_writer *w, int err);

/* One rank, when every rank's file is on the disk: it looks whether it sees
 * them all and whole; then index, rename, and removal of checkpoints that are
 * too old. */
int iz_ckpt_commit(const struct iz_ckpt *k, int64_t step, int ranks);

/* Opens a rank's file in a checkpoint's folder.  Negative errno with the reason
 * printed: also when it is of another step, rank or number of ranks. */
int iz_ckpt_file_open(struct iz_rank_file **f, const char *dir, int64_t step,
                      int rank, int ranks);

/* ---- index.c: index.json ---- */

/* What the rank files mean together, and what a run must have in common with
 * them to resume. */

/* An index that was read. */
struct iz_ckpt_index {
    char *path;
    FILE *err; /* for faults; NULL: they are not printed */
    json_t *root;
    int64_t step;
    int ranks;
    struct iz_ckpt_file *file; /* [ranks] */
};

/* The name of a rank's file: "rank-00000-of-00002.safetensors". */
#define IZ_CKPT_FILE "rank-%05d-of-%05d.safetensors"

/* Writes and syncs `path`; file[ranks].  Negative errno with the reason
 * printed. */
int iz_ckpt_index_write(const char *path, const struct iz_ckpt *k, int64_t step,
                        int ranks, const struct iz_ckpt_file *file);

/* Reads the index of a checkpoint's folder and checks it against its own
 * checksum.  `quiet` prints nothing. */
int iz_ckpt_index_open(struct iz_ckpt_index **out, const char *dir, bool quiet);
void iz_ckpt_index_close(struct iz_ckpt_index **x);

/* Bytes of all files in the checkpoint's folder; -EINVAL after naming one on
 * `err` (which may be NULL) that is missing or has not its size; file[ranks].
 */
int64_t iz_ckpt_files_bytes(const char *dir, int ranks,
                            const struct iz_ckpt_file *file, FILE *err);

/* Whether the run has the model, arrays, parameters and scalars of the
 * checkpoint. -EINVAL with the first difference printed. */
int iz_ckpt_index_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k);

/* Fills k's scalars; after a check that succeeded. */
void iz_ckpt_index_scalars(const struct iz_ckpt_index *x, struct iz_ckpt *k);

/* ---- load.c: loading ---- */

/* Fills arrays and scalars from the checkpoint of `step`, which any number of
 * ranks may have written.  Checks every file before it puts anything.  A
 * missing, truncated or foreign file is named, and every rank returns a
 * negative errno. */
int iz_ckpt_load(struct iz_ckpt *k, int64_t step, struct iz_coll *c);
