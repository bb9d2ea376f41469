/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, GPU, ranks and disk of a simulation: memory is counted and is
 * addresses without anything behind them; nothing else is ever used, because no
 * task is executed. */
#include <errno.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/gpu/device.h"
#include "runtime/comm/coll.h"
#include "runtime/machine/cores.h"
#include "runtime/tier/memory.h"
#include "runtime/tier/nvme.h"

static void never(const char *what)
{
    iz_die("a simulation does not %s", what);
}

/* ---- memory ---- */

struct iz_memory {
    struct iz_bytes count;
    char *next;
};

int iz_memory_open(struct iz_memory **out, struct iz_graph *g, bool pin_cpu)
{
    (void)g;
    (void)pin_cpu;
    *out = calloc(1, sizeof(**out));
    if (!*out)
        return -ENOMEM;
    (*out)->next = (char *)(UINTPTR_MAX / 4 + 1);
    return 0;
}

int iz_memory_open_gpu(struct iz_memory *m, const struct iz_bytes *bytes,
                       int64_t buffers, const char *wish)
{
    (void)wish;
    (void)m;
    (void)bytes;
    (void)buffers;
    return 0;
}

void iz_memory_close(struct iz_memory **m)
{
    free(*m);
    *m = NULL;
}

void *iz_memory_take(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                     int64_t bytes)
{
    char *p = m->next;
    m->next += (bytes + 8191) / 4096 * 4096;
    m->count.b[tier][c] += bytes;
    return p;
}

void iz_memory_note(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                    int64_t bytes)
{
    m->count.b[tier][c] += bytes;
}

struct iz_shadow iz_memory_shadow(const struct iz_memory *m)
{
    (void)m;
    return (struct iz_shadow){0};
}

const struct iz_bytes *iz_memory_bytes(const struct iz_memory *m)
{
    return &m->count;
}

/* ---- GPU ---- */

int iz_device_use(int index, struct iz_device_info *info)
{
    (void)index;
    (void)info;
    return 0;
}

void *iz_device_stream_open(void)
{
    static char stream;
    return &stream;
}

void iz_device_stream_close(void *stream)
{
    (void)stream;
}

void *iz_device_worker_stream(void)
{
    never("have streams");
    return NULL;
}

void iz_device_copy(void *stream, void *dst, const void *src, int64_t bytes)
{
    (void)stream;
    (void)dst;
    (void)src;
    (void)bytes;
    never("copy");
}

void iz_device_clear(void *stream, void *p, int64_t bytes)
{
    (void)stream;
    (void)p;
    (void)bytes;
    never("clear memory");
}

void iz_device_wait(void *stream)
{
    (void)stream;
    never("wait for a GPU");
}

/* ---- ranks ---- */

int iz_coll_gpu_open(struct iz_coll *c, const struct iz_coll_gpu *g)
{
    (void)c;
    (void)g;
    return 0;
}

void iz_coll_gpu_close(struct iz_coll *c)
{
    (void)c;
}

void iz_topo_bind(struct iz_topo *t, struct iz_graph *g)
{
    (void)t;
    (void)g;
    never("bind workers");
}

void iz_topo_release(struct iz_topo *t)
{
    (void)t;
    never("bind workers");
}

bool iz_coll_all_ok(struct iz_coll *c, bool ok)
{
    (void)c;
    (void)ok;
    never("agree with other ranks");
    return false;
}

/* The others refuse what this one does. */
int iz_coll_refuser(struct iz_coll *c, bool refuses)
{
    return refuses ? c->rank : -1;
}

void iz_coll_all_gather(struct iz_coll *c, void *full, int64_t shard_bytes,
                        const char *what)
{
    (void)c;
    (void)full;
    (void)shard_bytes;
    never(what);
}

void iz_coll_reduce_scatter(struct iz_coll *c, void *out,
                            enum iz_dtype out_type, bool accumulate, void *full,
                            enum iz_dtype wire, int64_t shard, double *norm2,
                            const char *what)
{
    (void)norm2;
    (void)c;
    (void)out;
    (void)out_type;
    (void)accumulate;
    (void)full;
    (void)wire;
    (void)shard;
    never(what);
}

void iz_coll_all_gather_parts(struct iz_coll *c, void *full, const char *what)
{
    (void)c;
    (void)full;
    never(what);
}

void iz_coll_reduce_scatter_parts(struct iz_coll *c, void *out,
                                  enum iz_dtype out_type, bool accumulate,
                                  void *full, enum iz_dtype wire, double *norm2,
                                  const char *what)
{
    (void)norm2;
    (void)c;
    (void)out;
    (void)out_type;
    (void)accumulate;
    (void)full;
    (void)wire;
    never(what);
}

void iz_coll_gpu_all_gather(struct iz_coll *c, struct iz_exec *x, void *full,
                            const void *shard, int64_t shard_bytes,
                            const char *what)
{
    (void)c;
    (void)x;
    (void)full;
    (void)shard;
    (void)shard_bytes;
    never(what);
}

void iz_coll_gpu_reduce_scatter(struct iz_coll *c, struct iz_exec *x,
                                const struct iz_coll_gpu_sum *s)
{
    (void)c;
    (void)x;
    never(s->what);
}

void iz_coll_gather_doubles(struct iz_coll *c, double *all, int per_rank,
                            const char *what)
{
    (void)c;
    (void)all;
    (void)per_rank;
    never(what);
}

void iz_coll_barrier(struct iz_coll *c, const char *what)
{
    (void)c;
    never(what);
}

/* ---- disk ---- */

struct iz_nvme {
    int64_t bytes;
};

int iz_nvme_open(struct iz_nvme **out, const char *dir, const char *name,
                 int64_t bytes, bool checksum)
{
    (void)dir;
    (void)name;
    (void)checksum;
    *out = calloc(1, sizeof(**out));
    if (!*out)
        return -ENOMEM;
    (*out)->bytes = bytes;
    return 0;
}

void iz_nvme_close(struct iz_nvme **f)
{
    free(*f);
    *f = NULL;
}

void iz_nvme_counts(const struct iz_nvme *f, int64_t *read, int64_t *written)
{
    (void)f;
    *read = *written = 0;
}

void iz_nvme_read(struct iz_nvme *f, void *buf, int64_t offset, int64_t bytes)
{
    (void)f;
    (void)buf;
    (void)offset;
    (void)bytes;
    never("read");
}

void iz_nvme_write(struct iz_nvme *f, const void *buf, int64_t offset,
                   int64_t bytes)
{
    (void)f;
    (void)buf;
    (void)offset;
    (void)bytes;
    never("write");
}
