/* SPDX-License-Identifier: Apache-2.0 */
/* A build without NCCL: it gives those declarations of nccl.h that nobody calls
 * then a body that ends the job (codelets/meson.build). */
#include <errno.h>
#include <stdio.h>

#include "codelets/base/die.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#include "codelets/nccl_none.h"

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
