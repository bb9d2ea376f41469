/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/machine/machine_file.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/machine/cores.h"
#include "runtime/plan/limits.h"

#define MOST INT64_C(4000000000000000000)

enum { COUNT = 1, /* an int */ OPTIONAL = 2 /* 0 where it is missing */ };

#define AT(member) offsetof(struct iz_machine, member)

static const struct field {
    const char *name;
    size_t offset;
    int how;
} fields[] = {
    {"gpus", AT(gpus), COUNT},
    {"cores", AT(cores), COUNT},
    {"host_bytes", AT(host_bytes), 0},
    {"host_bytes_per_s", AT(host_bytes_per_s), 0},
    {"core_flops_per_s", AT(core_flops_per_s), 0},
    {"core_bytes_per_s", AT(core_bytes_per_s), 0},
    {"core_fused_flops_per_s", AT(core_fused_flops_per_s), OPTIONAL},
    {"core_bf16_flops_per_s", AT(core_bf16_flops_per_s), OPTIONAL},
    {"core_squares_per_s", AT(core_squares_per_s), OPTIONAL},
    {"core_moments_per_s", AT(core_moments_per_s), OPTIONAL},
    {"core_fp8_moments_per_s", AT(core_fp8_moments_per_s), OPTIONAL},
    {"disk_bytes", AT(disk_bytes), 0},
    {"disk_bytes_per_s", AT(disk_bytes_per_s), 0},
    {"node_bytes_per_s", AT(node_bytes_per_s), 0},
    {"gpu_capability", AT(gpu_capability), COUNT | OPTIONAL},
    {"gpu_bytes", AT(gpu_bytes), 0},
    {"gpu_bytes_per_s", AT(gpu_bytes_per_s), 0},
    {"fp32_flops_per_s", AT(flops_per_s[IZ_F32]), 0},
    {"bf16_flops_per_s", AT(flops_per_s[IZ_BF16]), 0},
    {"fp16_flops_per_s", AT(flops_per_s[IZ_F16]), 0},
    {"gpu_attention_flops_per_s", AT(gpu_attention_flops_per_s[0][0]),
     OPTIONAL},
    {"gpu_attention_backward_flops_per_s", AT(gpu_attention_flops_per_s[0][1]),
     OPTIONAL},
    {"gpu_cudnn_flops_per_s", AT(gpu_attention_flops_per_s[1][0]), OPTIONAL},
    {"gpu_cudnn_backward_flops_per_s", AT(gpu_attention_flops_per_s[1][1]),
     OPTIONAL},
    {"gpu_sum_flops_per_s", AT(gpu_sum_flops_per_s), OPTIONAL},
    {"gpu_squares_bytes_per_s", AT(gpu_squares_bytes_per_s), OPTIONAL},
    {"up_bytes_per_s", AT(up_bytes_per_s), 0},
    {"up_both_bytes_per_s", AT(up_both_bytes_per_s), OPTIONAL},
    {"up_busy_bytes_per_s", AT(up_busy_bytes_per_s), OPTIONAL},
    {"down_bytes_per_s", AT(down_bytes_per_s), 0},
    {"down_both_bytes_per_s", AT(down_both_bytes_per_s), OPTIONAL},
    {"peer_bytes_per_s", AT(peer_bytes_per_s), 0},
    {"launch_ns", AT(launch_ns), 0},
    {"kernel_ns", AT(kernel_ns), 0},
    {"copy_ns", AT(copy_ns), 0},
    {"message_ns", AT(message_ns), 0},
};
#define FIELDS ((int)(sizeof(fields) / sizeof(fields[0])))

/* What a missing or 0 field takes from another one, in this order. */
static const struct {
    size_t of, is;
} otherwise[] = {
    {AT(gpu_attention_flops_per_s[0][0]), AT(flops_per_s[IZ_F16])},
    {AT(gpu_attention_flops_per_s[0][1]), AT(gpu_attention_flops_per_s[0][0])},
    {AT(gpu_attention_flops_per_s[1][0]), AT(gpu_attention_flops_per_s[0][0])},
    {AT(gpu_attention_flops_per_s[1][1]), AT(gpu_attention_flops_per_s[0][1])},
    {AT(gpu_sum_flops_per_s), AT(flops_per_s[IZ_F16])},
    {AT(gpu_squares_bytes_per_s), AT(gpu_bytes_per_s)},
    {AT(up_both_bytes_per_s), AT(up_bytes_per_s)},
    {AT(up_busy_bytes_per_s), AT(up_bytes_per_s)},
    {AT(down_both_bytes_per_s), AT(down_bytes_per_s)},
};

static int read_field(struct iz_machine *m, const struct field *f,
                      const json_t *v, const char *path, FILE *err)
{
    bool count = f->how & COUNT;
    int64_t most = count ? 1 << 20 : MOST;
    int64_t n = !v && f->how & OPTIONAL ? 0 : iz_json_number(v, most);
    char *at = (char *)m + f->offset, found[IZ_WHY_MAX];
    if (!v && n < 0)
        return iz_text_refuse(err, "%s: %s: is missing", path, f->name);
    if (n < 0) {
        iz_key_describe(found, sizeof(found), v);
        return iz_text_refuse(
            err, "%s: %s: expected an integer from 0 to %" PRId64 ", found %s",
            path, f->name, most, found);
    }
    if (count)
        *(int *)at = (int)n;
    else
        *(int64_t *)at = n;
    return 0;
}

static bool known(const char *key)
{
    for (int i = 0; i < FIELDS; i++)
        if (!strcmp(fields[i].name, key))
            return true;
    return !strcmp(key, "name") || !strcmp(key, "sources");
}

static int read_fields(struct iz_machine *m, const json_t *j, const char *path,
                       FILE *err)
{
    int r = 0;
    const char *name = json_string_value(json_object_get(j, "name"));
    snprintf(m->name, sizeof(m->name), "%s", name ? name : path);
    for (int i = 0; i < FIELDS; i++)
        if (read_field(m, &fields[i], json_object_get(j, fields[i].name), path,
                       err))
            r = -EINVAL;
    for (const char *k = iz_json_key(j, NULL); k; k = iz_json_key(j, k))
        if (!known(k))
            r = iz_text_refuse(err, "%s: %s: unknown key", path, k);
    for (size_t i = 0; i < sizeof(otherwise) / sizeof(otherwise[0]); i++) {
        int64_t *of = (int64_t *)((char *)m + otherwise[i].of);
        if (!*of)
            *of = *(int64_t *)((char *)m + otherwise[i].is);
    }
    if (!m->gpu_capability)
        m->gpu_capability = 80;
    if (!m->core_squares_per_s)
        m->core_squares_per_s = m->core_bytes_per_s / iz_dtype_bytes(IZ_F32);
    if (!r && m->gpu_capability < 70)
        r = iz_text_refuse(
            err,
            "%s: gpu_capability: %d: there are kernels for 70 (7.0) and later",
            path, m->gpu_capability);
    if (!r && (m->host_bytes_per_s < 1 || m->cores < 1))
        r = iz_text_refuse(err, "%s: cores or host_bytes_per_s is less than 1",
                           path);
    return r;
}

int iz_machine_read(struct iz_machine *m, const struct iz_config *c,
                    const char *path, FILE *err)
{
    json_t *j = iz_json_read(path, err);
    *m = (struct iz_machine){0};
    int r = j ? read_fields(m, j, path, err) : -EINVAL;
    if (c->run.device == IZ_DEVICE_CPU)
        m->gpus = 0;
    json_decref(j);
    return r;
}

void iz_machine_print(const struct iz_machine *m, FILE *out)
{
    fputs("\"name\": ", out);
    iz_json_print(out, m->name);
    for (const struct field *f = fields; f < fields + FIELDS; f++) {
        const char *at = (const char *)m + f->offset;
        int64_t n = f->how & COUNT ? *(const int *)at : *(const int64_t *)at;
        if (n || !(f->how & OPTIONAL))
            fprintf(out, ",\n  \"%s\": %" PRId64, f->name, n);
    }
    fputs(",\n", out);
}

int iz_machine_ranks(const struct iz_machine *m, int ranks)
{
    if (m->gpus)
        return (int)min64(ranks, m->gpus);
    return m->node_bytes_per_s ? 1 : ranks;
}

static double seconds(int64_t ns)
{
    return (double)ns * 1e-9;
}

/* What a rank has of one core, which several of `ranks` may share. */
static double core_part(const struct iz_machine *m, int ranks)
{
    double part = (double)m->cores / iz_machine_ranks(m, ranks);
    return part < 1 ? part : 1;
}

struct iz_rate iz_machine_compute(const struct iz_machine *m, enum iz_dtype t,
                                  bool bf16_products, int ranks)
{
    double part = core_part(m, ranks);
    struct iz_rate r = {.flops_per_s = (double)m->flops_per_s[t],
                        .bytes_per_s = (double)m->gpu_bytes_per_s,
                        .latency_s = seconds(m->kernel_ns)};
    if (!m->gpus)
        r = (struct iz_rate){
            .flops_per_s = (double)(bf16_products ? m->core_bf16_flops_per_s
                                                  : m->core_flops_per_s) *
                           part,
            .bytes_per_s = (double)m->core_bytes_per_s * part};
    else if (t != IZ_F32)
        r.sum_flops_per_s = (double)m->gpu_sum_flops_per_s;
    for (int i = 0; i < 4; i++)
        r.attention_flops_per_s[i / 2][i % 2] =
            !m->gpus      ? (double)m->core_fused_flops_per_s * part
            : t != IZ_F32 ? (double)m->gpu_attention_flops_per_s[i / 2][i % 2]
                          : 0;
    int64_t both[] = {m->up_both_bytes_per_s, m->down_both_bytes_per_s};
    int64_t alone[] = {m->up_bytes_per_s, m->down_bytes_per_s};
    for (int i = 0; m->gpus && i < 2; i++)
        r.bus_bytes_per_s[i] = (double)(both[i] ? both[i] : alone[i]);
    return r;
}

static bool by_nccl(const struct iz_machine *m, const struct iz_config *c,
                    int ranks)
{
    return m->gpus && ranks > 1 && c->run.comm != IZ_COMM_MPI;
}

/* Of a description without rates all may be. */
static bool computes_in(const struct iz_machine *m, enum iz_dtype t)
{
    const int64_t *rate = m->flops_per_s;
    return rate[t] || !(rate[IZ_F32] || rate[IZ_BF16] || rate[IZ_F16]);
}

int iz_machine_target(struct iz_target *t, const struct iz_machine *m,
                      const struct iz_config *c, int ranks, FILE *err)
{
    enum iz_dtype params = c->dtype;
    enum iz_product_type asked = c->run.cpu_products;
    int cores = m->cores / iz_machine_ranks(m, ranks);
    bool gpu = m->gpus > 0;
    int workers =
        c->run.workers ? c->run.workers : cores - iz_cores_spare(cores, gpu);
    const char *type = iz_dtype_name(params);
    if (!gpu && c->run.device == IZ_DEVICE_CUDA)
        return iz_text_refuse(err, "run.device: cuda: %s has no GPU", m->name);
    if (gpu && !computes_in(m, params))
        return iz_text_refuse(err,
                              "%s.enabled: the GPUs of %s do not compute in %s "
                              "(its %s_flops_per_s is 0): use another type",
                              type, m->name, type, type);
    bool bf16_products = !gpu && params == IZ_BF16 &&
                         asked != IZ_PRODUCTS_F32 &&
                         m->core_bf16_flops_per_s > 0;
    if (!gpu && asked == IZ_PRODUCTS_BF16 && !bf16_products)
        return iz_text_refuse(
            err,
            "run.cpu_products: bf16: the cores of %s make no products of bf16 "
            "(its core_bf16_flops_per_s is 0)",
            m->name);
    if (!gpu && c->run.muon_products == IZ_MUON_GPU)
        return iz_text_refuse(
            err, "run.muon_products: gpu: %s has none: use auto or host",
            m->name);
    *t = (struct iz_target){
        .workers = workers > 0 ? workers : 1,
        .gpu = gpu,
        .nccl = by_nccl(m, c, ranks),
        .numerics = {.bf16_products = bf16_products,
                     .capability = m->gpu_capability},
        .act = gpu ? params : IZ_F32,
        .host_group = (int)gcd64(iz_machine_ranks(m, ranks), ranks),
        .compute = iz_machine_compute(m, params, bf16_products, ranks)};
    return 0;
}

struct iz_limits iz_machine_limits(const struct iz_machine *m,
                                   const struct iz_config *c, int ranks)
{
    int64_t own = c->run.memory_limit_bytes;
    int64_t own_device = c->run.device_memory_limit_bytes;
    int peers = by_nccl(m, c, ranks) ? ranks : 0;
    int64_t device =
        m->gpus ? m->gpu_bytes - iz_plan_reserve(m->gpu_bytes, peers) : 0;
    return (struct iz_limits){
        .host = own ? own : m->host_bytes / iz_machine_ranks(m, ranks),
        .device = own_device ? own_device : device,
        .beside = !own,
        .tables = !own_device};
}

/* How long a sum among ranks of a group, or among the groups, moves one part of
 * each: what is local comes from peers, while what is remote shares the link of
 * the node.  local, remote: parts that a rank receives. */
static double sum_level(const struct iz_machine *m, int ranks, int64_t local,
                        int64_t remote)
{
    int share = iz_machine_ranks(m, ranks);
    double link = (double)m->node_bytes_per_s / share;
    double peer = (double)m->peer_bytes_per_s, seconds = 0;
    if (local)
        seconds = (double)local / peer;
    if (remote)
        seconds = fmax(seconds,
                       (double)remote / (share > 1 ? fmin(link, peer) : link));
    return seconds;
}

/* Bytes per second of the N - 1 parts that the first rank receives: of all
 * parts of its position from its group, then of its own from the others. */
static double sum_rate(const struct iz_machine *m, const struct iz_plan *p)
{
    int local = iz_machine_ranks(m, p->ranks), g = iz_sum_group(&p->sum);
    int64_t groups = p->ranks / g, peers = min64(g, local) - 1;
    int64_t beside =
        (local - 1) / g; /* groups of which the node has a member */
    double s =
        sum_level(m, p->ranks, peers * groups, (g - 1 - peers) * groups) +
        sum_level(m, p->ranks, beside, groups - 1 - beside);
    return s > 0 ? (p->ranks - 1) / s : (double)m->peer_bytes_per_s;
}

/* Bytes per second in an all-gather among n ranks, of which those of a node
 * receive the same bytes: a ring that passes all ranks of a node before it
 * leaves it crosses the node's link once. */
static double gather_rate(const struct iz_machine *m, const struct iz_plan *p,
                          int n)
{
    int local = iz_machine_ranks(m, p->ranks);
    double peer = (double)m->peer_bytes_per_s;
    double node = (double)m->node_bytes_per_s;
    if (local % n == 0)
        return peer; /* no group is on two nodes */
    return local > 1 ? fmin(node, peer) : node;
}

/* Bytes per second of the shards that a rank receives for its group's copy: of
 * all that the ranks of a node receive one part in ranks / local is there, and
 * the others share its link. */
static double copy_rate(const struct iz_machine *m, const struct iz_plan *p)
{
    int local = iz_machine_ranks(m, p->ranks);
    double peer = (double)m->peer_bytes_per_s;
    double link = (double)m->node_bytes_per_s / local;
    if (p->ranks <= local)
        return peer;
    link *= (double)p->ranks / (p->ranks - local);
    return local > 1 ? fmin(link, peer) : link;
}

/* A collective with so many messages, each of which starts anew. */
static struct iz_rate network(const struct iz_machine *m, double bytes_per_s,
                              int messages)
{
    return (struct iz_rate){.bytes_per_s = bytes_per_s,
                            .latency_s = seconds(m->message_ns) * messages};
}

int iz_machine_check(const struct iz_machine *m, const struct iz_plan *p,
                     FILE *err)
{
    int local = iz_machine_ranks(m, p->ranks);
    bool gpu = p->target.gpu;
    static const char *const products[] = {[IZ_F32] = "fp32_flops_per_s",
                                           [IZ_BF16] = "bf16_flops_per_s",
                                           [IZ_F16] = "fp16_flops_per_s"};
    static const char units[] = "units are computed by its GPUs",
                      host_units[] = "units are computed by its cores";
    const struct {
        const char *key, *use;
        bool used;
        int64_t per_s;
    } rate[] = {
        {products[p->param_type], units, gpu, m->flops_per_s[p->param_type]},
        {"gpu_bytes_per_s", units, gpu, m->gpu_bytes_per_s},
        {"core_flops_per_s", host_units, !gpu, m->core_flops_per_s},
        {"core_bytes_per_s", host_units, !gpu, m->core_bytes_per_s},
        {"peer_bytes_per_s", "ranks of a node exchange bytes", local > 1,
         m->peer_bytes_per_s},
        {"node_bytes_per_s", "the ranks are on several nodes", local < p->ranks,
         m->node_bytes_per_s},
        {"disk_bytes_per_s", "the plan has bytes on nvme",
         iz_bytes_tier(&p->bytes, IZ_TIER_NVME) > 0, m->disk_bytes_per_s},
        {"up_bytes_per_s", "there is a GPU", gpu, m->up_bytes_per_s},
        {"down_bytes_per_s", "there is a GPU", gpu, m->down_bytes_per_s},
    };
    for (size_t i = 0; i < sizeof(rate) / sizeof(rate[0]); i++)
        if (rate[i].used && rate[i].per_s <= 0)
            return iz_text_refuse(err, "--machine: %s: %s is 0, and %s",
                                  m->name, rate[i].key, rate[i].use);
    return 0;
}

/* A worker of the host has what its core gets of the memory, and all busy ones
 * share what the host gives.  Where all cores get more than core_bytes_per_s of
 * it, one alone does so too. */
void iz_machine_rates(const struct iz_machine *m, const struct iz_plan *p,
                      struct iz_rate rate[IZ_RATES])
{
    double ranks = iz_machine_ranks(m, p->ranks);
    double part = core_part(m, p->ranks), host = (double)m->host_bytes_per_s;
    rate[IZ_ON_HOST] =
        (struct iz_rate){.flops_per_s = (double)m->core_flops_per_s,
                         .bytes_per_s = part * fmax((double)m->core_bytes_per_s,
                                                    host / m->cores),
                         .latency_s = 1e-6,
                         .all_bytes_per_s = host / ranks};
    rate[IZ_ON_HOST].moments_per_s[IZ_MOMENT_BF16] =
        part * (double)m->core_moments_per_s;
    rate[IZ_ON_HOST].moments_per_s[IZ_MOMENT_FP8] =
        part * (double)m->core_fp8_moments_per_s;
    rate[IZ_ON_COMPUTE] = p->target.compute;
    rate[IZ_ON_COMPUTE].latency_s = p->target.gpu ? seconds(m->launch_ns) : 0;
    rate[IZ_RATE_SQUARES] = rate[IZ_ON_COMPUTE];
    rate[IZ_RATE_SQUARES].bytes_per_s = (double)m->gpu_squares_bytes_per_s;
    int others = p->ranks - 1, group = p->zero.group;
    rate[IZ_ON_COMM] = network(m, sum_rate(m, p), others);
    rate[IZ_RATE_GATHER] = network(m, gather_rate(m, p, p->ranks), others);
    rate[IZ_RATE_GROUP] = network(m, gather_rate(m, p, group), group - 1);
    rate[IZ_RATE_COPY] = network(m, copy_rate(m, p), p->ranks / group);
    rate[IZ_ON_H2D] =
        (struct iz_rate){.bytes_per_s = (double)m->up_bytes_per_s,
                         .latency_s = seconds(m->copy_ns),
                         .both_bytes_per_s = (double)m->up_both_bytes_per_s,
                         .busy_bytes_per_s = (double)m->up_busy_bytes_per_s};
    rate[IZ_ON_D2H] =
        (struct iz_rate){.bytes_per_s = (double)m->down_bytes_per_s,
                         .latency_s = seconds(m->copy_ns),
                         .both_bytes_per_s = (double)m->down_both_bytes_per_s};
    rate[IZ_ON_IO] =
        (struct iz_rate){.bytes_per_s = (double)m->disk_bytes_per_s / ranks / 2,
                         .latency_s = 100e-6};
    double squares = (double)m->core_squares_per_s * part;
    rate[IZ_ON_HOST].squares_per_s = rate[IZ_ON_COMM].squares_per_s = squares;
    if (!p->target.gpu) /* else they are passes of their own, in bytes */
        rate[IZ_ON_COMPUTE].squares_per_s = squares;
    for (int w = 0; w < IZ_RATES; w++)
        if (rate[w].bytes_per_s <= 0)
            rate[w].bytes_per_s = 1; /* not there: nothing should use it */
}
