/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before a program: ranks are on hosts of their own.  HOSTS has a letter
 * per rank, and ranks of one letter share a host; MPI shares no memory with one
 * of a capital letter, as where /dev/shm is full. */
#include <ctype.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

static int host(void)
{
    const char *hosts = getenv("HOSTS");
    int rank = 0;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return hosts && rank < (int)strlen(hosts) ? hosts[rank] : 0;
}

int MPI_Win_allocate_shared(MPI_Aint size, int unit, MPI_Info info,
                            MPI_Comm comm, void *base, MPI_Win *win)
{
    return isupper(host())
               ? MPI_ERR_NO_MEM
               : PMPI_Win_allocate_shared(size, unit, info, comm, base, win);
}

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info,
                        MPI_Comm *out)
{
    if (!getenv("HOSTS") || type != MPI_COMM_TYPE_SHARED)
        return PMPI_Comm_split_type(comm, type, key, info, out);
    return PMPI_Comm_split(comm, tolower(host()), key, out);
}
