/* SPDX-License-Identifier: Apache-2.0 */
/* Which rank a process is before MPI has told it. */
#pragma once

#include <stdlib.h>

/* As Open MPI's launcher says, or MPICH's; NULL: there was none. */
static inline const char *rank_here(void)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    return rank ? rank : getenv("PMI_RANK");
}
