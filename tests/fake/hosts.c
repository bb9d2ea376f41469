/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before a program: ranks are on hosts of their own.  HOSTS has a letter
 * per rank, and ranks of one letter share a host. */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info,
                        MPI_Comm *out)
{
    const char *hosts = getenv("HOSTS");
    int rank = 0;
    if (!hosts || type != MPI_COMM_TYPE_SHARED)
        return PMPI_Comm_split_type(comm, type, key, info, out);
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return PMPI_Comm_split(comm, rank < (int)strlen(hosts) ? hosts[rank] : 0,
                           key, out);
}
