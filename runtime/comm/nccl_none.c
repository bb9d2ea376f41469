/* SPDX-License-Identifier: Apache-2.0 */
/* A build without NCCL. */
#include <errno.h>
#include <stdio.h>

#include "codelets/base/die.h"
#include "runtime/comm/nccl.h"

bool iz_nccl_built(void)
{
    return false;
}

int iz_nccl_open(struct iz_nccl **out, struct iz_coll *c)
{
    *out = NULL;
    fprintf(stderr, "izar: run.comm: nccl: built without NCCL\n");
    return -ENOTSUP;
}

void iz_nccl_close(struct iz_nccl **n)
{
    *n = NULL;
}

void iz_nccl_all_gather(struct iz_nccl *n, void *stream, void *full,
                        int64_t shard_bytes, int ranks, const char *what)
{
    iz_die("%s: built without NCCL", what);
}

void iz_nccl_refresh(struct iz_nccl *n, void *stream, void *out,
                     const void *own, int64_t shard_bytes, int ranks,
                     const char *what)
{
    iz_die("%s: built without NCCL", what);
}

void iz_nccl_exchange(struct iz_nccl *n, void *stream, void *in,
                      const void *full, int64_t part_bytes,
                      const struct iz_nccl_team *t, const char *what)
{
    iz_die("%s: built without NCCL", what);
}
