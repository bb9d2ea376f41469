/* SPDX-License-Identifier: Apache-2.0 */
/* See cores_print.h. */
#include "runtime/machine/cores_print.h"

static bool solid(const struct iz_binding *b)
{
    return b->last - b->first + 1 == b->cores;
}

/* Whether b follows a as `step` cores and `turn` GPUs further on say. */
static bool follows(const struct iz_binding *a, const struct iz_binding *b,
                    int step, int turn)
{
    return a->host == b->host && a->workers == b->workers &&
           a->cores == b->cores && a->shared == b->shared &&
           a->foreign == b->foreign && a->host_cores == b->host_cores &&
           (a->gpu < 0) == (b->gpu < 0) && solid(a) && solid(b) &&
           b->first - a->first == step && b->gpu - a->gpu == turn;
}

/* Ranks from the first of b on that one line can tell. */
static int count_alike(const struct iz_binding *b, int n)
{
    int k = 1;
    if (n > 1) {
        int step = b[1].first - b[0].first, turn = b[1].gpu - b[0].gpu;
        while (k < n && step >= 0 && turn >= 0 &&
               follows(&b[k - 1], &b[k], step, turn))
            k++;
    }
    return k;
}

static void print_nodes(uint64_t nodes, FILE *out)
{
    const char *before = nodes & (nodes - 1) ? ", NUMA nodes " : ", NUMA node ";
    for (int i = 0; i < 64; i++) {
        int last = i;
        if (!(nodes >> i & 1))
            continue;
        while (last < 63 && nodes >> (last + 1) & 1)
            last++;
        fprintf(out, "%s%d", before, i);
        if (last > i)
            fprintf(out, "-%d", last);
        before = ",";
        i = last;
    }
}

static void cores_print_line(const struct iz_binding *b, int rank, int k,
                             bool named, FILE *out)
{
    const struct iz_binding *z = b + k - 1;
    uint64_t nodes = 0;
    for (int i = 0; i < k; i++)
        nodes |= b[i].nodes;
    if (k > 1)
        fprintf(out, "      ranks %d-%d", rank, rank + k - 1);
    else
        fprintf(out, "      rank %d", rank);
    if (named)
        fprintf(out, " on %s", b->name);
    fprintf(out, ": %d worker%s%s on core%s %s", b->workers,
            b->workers > 1 ? "s" : "", k > 1 ? " each" : "",
            b->cores > 1 || z->first != b->first ? "s" : "", b->list);
    if (z->first != b->first)
        fprintf(out, k > 2 ? " ... %s" : " and %s", z->list);
    fprintf(out, " of %d", b->host_cores);
    if (b->gpu >= 0 && z->gpu != b->gpu)
        fprintf(out, k > 2 ? ", GPUs %d ... %d" : ", GPUs %d and %d", b->gpu,
                z->gpu);
    else if (b->gpu >= 0)
        fprintf(out, ", GPU %d", b->gpu);
    print_nodes(nodes, out);
    fprintf(out, "%s%s\n", b->shared ? ", shared with other ranks" : "",
            b->foreign ? ", bound as the environment says" : "");
}

void iz_binding_print(const struct iz_binding *b, int n, FILE *out)
{
    bool named = false;
    for (int i = 1; i < n; i++)
        named |= b[i].host != b[0].host;
    for (int i = 0, k; i < n; i += k) {
        k = count_alike(b + i, n - i);
        cores_print_line(b + i, i, k, named, out);
    }
}
