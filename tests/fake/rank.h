/* SPDX-License-Identifier: Apache-2.0 */
/* Which rank a process is before MPI has told it. */
#pragma once

#include <stdlib.h>
#include <string.h>

/* Whether it is the one that a variable names; as Open MPI's launcher says, or
 * MPICH's, and without one it is the first. */
static inline int is_rank(const char *variable)
{
    const char *wanted = getenv(variable);
    const char *here = getenv("OMPI_COMM_WORLD_RANK");
    here = here ? here : getenv("PMI_RANK");
    return wanted && strcmp(wanted, here ? here : "0") == 0;
}
