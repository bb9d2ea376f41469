/* SPDX-License-Identifier: Apache-2.0 */
/* The directories of checkpoints: dir/checkpoints/step-00000100 is complete
 * because it has that name; step-....tmp is being written or removed;
 * step-....old is one that is just being replaced, and complete as well. */
#pragma once

#include <stdint.h>

#define IZ_CKPT_PATH 1280
/* Of a file in such a directory. */
#define IZ_CKPT_FILE_PATH (IZ_CKPT_PATH + 64)

/* The first rank removes what a crash left, before anybody saves. */
int iz_ckpt_dir_sweep(const char *dir);
/* Makes the directory in which the checkpoint of `step` is written if it is not
 * there; its path in `path`.  Negative errno with the reason printed. */
int iz_ckpt_dir_join(const char *dir, int64_t step, char path[IZ_CKPT_PATH]);

/* The path of that directory. */
int iz_ckpt_dir_tmp(const char *dir, int64_t step, char path[IZ_CKPT_PATH]);

/* Gives the written and synced directory its name, in place of an older
 * checkpoint of the same step. */
int iz_ckpt_dir_commit(const char *dir, int64_t step);

/* Removes the directory of iz_ckpt_dir_join. */
void iz_ckpt_dir_abort(const char *dir, int64_t step);

/* Removes all but the `keep` newest checkpoints up to `step`. */
void iz_ckpt_dir_prune(const char *dir, int64_t step, int keep);

/* The newest complete checkpoint below `limit`; -ENOENT if there is none. */
int64_t iz_ckpt_dir_newest(const char *dir, int64_t limit);

/* Where the complete checkpoint of `step` lies.  -ENOENT if nowhere. */
int iz_ckpt_dir_find(const char *dir, int64_t step, char path[IZ_CKPT_PATH]);
