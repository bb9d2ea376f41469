/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/report/summary.h"

#include <math.h>
#include <string.h>

#include "codelets/base/units.h"
#include "runtime/plan/fit.h"

#define COLUMNS 96
#define EACH 8 /* workers of one kind that are told apart */

/* ---- what is asked of the engine ---- */

static enum iz_where where_of(const struct iz_engine *e, int w)
{
    static const enum iz_where kinds[] = {IZ_ON_COMM, IZ_ON_H2D, IZ_ON_D2H,
                                          IZ_ON_IO, IZ_ON_COMPUTE};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (iz_graph_has(e->graph, kinds[i], w))
            return kinds[i];
    return !e->plan.target.gpu && iz_graph_has(e->graph, IZ_ON_HOST, w)
               ? IZ_ON_COMPUTE
               : IZ_ON_HOST;
}

struct iz_time_shares *iz_summary_shares_open(const struct iz_engine *e)
{
    enum iz_where where[STARPU_NMAXWORKERS];
    for (int w = 0; w < STARPU_NMAXWORKERS; w++)
        where[w] = where_of(e, w);
    return iz_time_shares_open(where, STARPU_NMAXWORKERS);
}

/* A row of the table of workers; those of links come last. */
struct place_row {
    const char *name;
    enum iz_where where;
    enum iz_use use;
};

static const struct place_row place_rows[] = {
    {"compute", IZ_ON_COMPUTE, IZ_USES},     {"host", IZ_ON_HOST, IZ_USES},
    {"network", IZ_ON_COMM, IZ_USE_NETWORK}, {"up", IZ_ON_H2D, IZ_USE_UP},
    {"down", IZ_ON_D2H, IZ_USE_DOWN},        {"disk", IZ_ON_IO, IZ_USE_DISK},
};
enum {
    PLACE_ROWS = sizeof(place_rows) / sizeof(place_rows[0]),
    LINKS_FROM = 2
};

/* Workers of a kind, without the addresses of workers that are not there. */
static int workers_of(const struct iz_engine *e, enum iz_where where,
                      int id[STARPU_NMAXWORKERS])
{
    bool gpu = e->plan.target.gpu;
    enum iz_where has = where == IZ_ON_COMPUTE && !gpu ? IZ_ON_HOST : where;
    int n = 0;
    if (where == IZ_ON_HOST && !gpu)
        return 0;
    for (int w = 0; w < STARPU_NMAXWORKERS; w++)
        if (iz_graph_has(e->graph, has, w))
            id[n++] = w;
    return n;
}

static double mean_busy(const struct iz_engine *e, const double *worker,
                        enum iz_where where)
{
    int id[STARPU_NMAXWORKERS], n = workers_of(e, where, id);
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += worker[id[i]];
    return n ? sum / n : 0;
}

/* ---- the limit ---- */

static struct iz_bottleneck_setting setting_of(const struct iz_engine *e)
{
    const struct iz_config *c = e->config;
    const struct iz_plan *p = &e->plan;
    return (struct iz_bottleneck_setting){
        .gpu = p->target.gpu,
        .recomputes = iz_plan_recomputed(p) > 0,
        .recompute_asked = c->run.recompute != IZ_RECOMPUTE_AUTO,
        .overlap = c->run.overlap,
        .overlap_comm = c->zero.overlap_comm,
        .breadth_first = c->run.schedule == IZ_BREADTH_FIRST,
        .rings = p->zero.fetch,
        .half = c->dtype != IZ_F32,
        .param_on_disk = p->zero.param.home == IZ_HOME_NVME,
        .frozen_on_disk = p->zero.frozen.home == IZ_HOME_NVME,
        .state_on_disk = p->zero.state.home == IZ_HOME_NVME,
        .boundary_on_disk = p->act.boundary_home == IZ_HOME_NVME,
        .divisible = p->target.gpu && p->zero.state.home == IZ_HOME_CPU &&
                     p->zero.param.home != IZ_HOME_NVME &&
                     c->zero.optimizer.ratio > 0,
        .few_slices = iz_plan_slices(c, p->target.workers) > p->slices,
        .workers = p->target.workers,
        .samples = c->micro_batch,
        .ring = p->ring[0].params,
        .slices = p->slices,
        .micro_batches = p->micro_batches,
        .in_flight = c->run.in_flight};
}

enum iz_bottleneck iz_summary_bottleneck(const struct iz_summary *s, char *text,
                                         size_t size)
{
    struct iz_bottleneck_measured m = {.usage = iz_time_shares_total(s->shares),
                                       .submitting = s->submitting};
    struct iz_bottleneck_setting set = setting_of(s->e);
    m.host_busy = mean_busy(s->e, m.usage.worker, IZ_ON_HOST);
    iz_bottleneck_text(text, size, &m, &set);
    return iz_bottleneck_find(&m);
}

/* Words, with lines of at most COLUMNS that begin at column `indent`. */
static void fold(FILE *out, const char *text, int indent)
{
    int at = indent;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (at > indent && at + 1 + n > COLUMNS) {
            fprintf(out, "\n%*s", indent, "");
            at = indent;
        } else if (at > indent) {
            fputc(' ', out);
            at++;
        }
        fprintf(out, "%.*s", n, text);
        at += n;
        text += n + (text[n] == ' ');
    }
    fputc('\n', out);
}

void iz_summary_print_bottleneck(const struct iz_summary *s, FILE *out)
{
    static const char head[] = "limited by: ";
    char text[512];
    iz_summary_bottleneck(s, text, sizeof(text));
    fputs(head, out);
    fold(out, text, (int)sizeof(head) - 1);
}

/* ---- tables: the same figures as text and as a line of JSON ---- */

static void write_tasks(const struct iz_summary *s, bool json, FILE *out)
{
    const char *before = "";
    if (json)
        fprintf(out, "{\"tasks\": {");
    else
        fprintf(out, "\n  %-12s %10s %10s %10s\n", "task", "count", "seconds",
                "hidden %");
    for (int k = 0; k < IZ_KINDS; k++) {
        struct iz_kind_time t = iz_time_shares_kind(s->shares, (enum iz_kind)k);
        if (!t.tasks)
            continue;
        fprintf(out,
                json ? "%s\"%s\": {\"count\": %lld, \"seconds\": %.6f, "
                       "\"hidden_percent\": %.2f}"
                     : "%s  %-12s %10lld %10.2f %10.1f\n",
                before, iz_kinds[k].name, (long long)t.tasks, t.seconds,
                iz_units_percent(t.hidden_s, t.seconds));
        before = json ? ", " : "";
    }
    fputs(json ? "}}\n" : "", out);
}

static double file_bytes(const struct iz_nvme *f)
{
    int64_t read = 0, written = 0;
    if (f)
        iz_nvme_counts(f, &read, &written);
    return (double)(read + written);
}

/* Collectives through the host's memory copy to and from the GPU themselves:
 * such bytes are counted apart.  Tasks on touched rows were submitted with the
 * most that they may move. */
static double link_bytes(const struct iz_engine *e, const struct place_row *r)
{
    bool rows = e->plan.touched.reads && !e->simulated;
    if (r->use == IZ_USE_UP)
        return (double)e->counts.up_bytes;
    if (r->use == IZ_USE_DOWN)
        return (double)e->counts.down_bytes;
    if (rows && r->use == IZ_USE_NETWORK)
        return (double)e->coll->received_bytes;
    if (rows && r->use == IZ_USE_DISK)
        return file_bytes(e->file.state) + file_bytes(e->file.param) +
               file_bytes(e->file.boundary);
    return iz_graph_bytes(e->graph, r->where);
}

static void write_links(const struct iz_summary *s, bool json, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    int id[STARPU_NMAXWORKERS], n = 0;
    fputs(json ? "{\"links\": {" : "", out);
    for (int i = LINKS_FROM; i < PLACE_ROWS; i++) {
        const struct place_row *r = &place_rows[i];
        bool copies = r->use == IZ_USE_UP || r->use == IZ_USE_DOWN;
        double bytes = link_bytes(s->e, r);
        /* What its own workers move, in the time that they take. */
        double own = copies ? iz_graph_bytes(s->e->graph, r->where) : bytes;
        double seconds = iz_time_shares_seconds(s->shares, r->use);
        double hidden =
            iz_units_percent(t.beside_units_s[r->use], t.task_s[r->use]);
        if (!workers_of(s->e, r->where, id))
            continue;
        if (json) {
            fprintf(out,
                    "%s\"%s\": {\"bytes\": %.0f, \"seconds\": %.6f, "
                    "\"busy_percent\": %.2f, \"hidden_percent\": %.2f}",
                    n++ ? ", " : "", r->name, bytes, seconds,
                    100 * t.busy[r->use], hidden);
            continue;
        }
        if (!n++)
            fprintf(out, "\n  %-12s %10s %10s %10s %10s\n", "link", "MiB",
                    "seconds", "hidden %", "MiB/s");
        fprintf(out, "  %-12s %10.1f %10.2f %10.1f", r->name,
                iz_units_mib(bytes), seconds, hidden);
        if (seconds > 0)
            fprintf(out, " %10.1f\n", iz_units_mib(own) / seconds);
        else /* the comm worker moved them with its collectives */
            fprintf(out, " %10s\n", "-");
    }
    fputs(json ? "}}\n" : "", out);
}

/* The text has the mean of a kind, and each of its workers where they are few;
 * JSON has each. */
static void write_workers(const struct iz_summary *s, bool json, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    int id[STARPU_NMAXWORKERS];
    const char *comma = "";
    if (!json && t.window_s <= 0)
        return;
    if (json)
        fprintf(out, "{\"workers\": {");
    else
        fprintf(out, "\n  %-12s %10s %10s   of %.2f s of whole steps\n",
                "workers", "number", "idle %", t.window_s);
    for (int i = 0; i < PLACE_ROWS; i++) {
        const struct place_row *r = &place_rows[i];
        int n = workers_of(s->e, r->where, id);
        double least = 1, most = 0;
        if (!n)
            continue;
        if (json)
            fprintf(out, "%s\"%s\": [", comma, r->name);
        else
            fprintf(out, "  %-12s %10d %10.1f", r->name, n,
                    100 * (1 - mean_busy(s->e, t.worker, r->where)));
        for (int k = 0; k < n; k++) {
            double idle = 1 - t.worker[id[k]];
            least = fmin(least, idle);
            most = fmax(most, idle);
            if (json)
                fprintf(out, "%s%.2f", k ? ", " : "", 100 * idle);
            else if (n > 1 && n <= EACH)
                fprintf(out, "  %5.1f", 100 * idle);
        }
        if (!json && n > EACH)
            fprintf(out, "  %5.1f to %.1f", 100 * least, 100 * most);
        fputs(json ? "]" : "\n", out);
        comma = ", ";
    }
    fputs(json ? "}, \"unit\": \"idle percent\"}\n" : "", out);
}

void iz_summary_print_time(const struct iz_summary *s, FILE *out)
{
    write_tasks(s, false, out);
    write_links(s, false, out);
    write_workers(s, false, out);
}

void iz_summary_print_memory(const struct iz_summary *s, FILE *out)
{
    const struct iz_bytes *plan = &s->e->plan.bytes;
    fputc('\n', out);
    iz_bytes_print(iz_memory_bytes(s->e->memory), out);
    fprintf(out, "  %-16s", "planned");
    for (int t = 0; t < IZ_TIERS; t++)
        fprintf(out, " %12.2f",
                iz_units_mib(iz_bytes_tier(plan, (enum iz_tier)t)));
    fputc('\n', out);
}

/* ---- JSON alone ---- */

static void limit_json(const struct iz_summary *s, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    char text[512];
    enum iz_bottleneck limit = iz_summary_bottleneck(s, text, sizeof(text));
    fprintf(out, "{\"limit\": {\"by\": \"%s\", \"text\": \"%s\", ",
            iz_bottleneck_names[limit], text);
    fprintf(out, "\"window_s\": %.6f, \"submitting\": %.4f, \"share\": {",
            t.window_s, s->submitting);
    for (int c = 0; c < IZ_USES; c++)
        fprintf(out, "%s\"%s\": %.4f", c ? ", " : "", iz_use_names[c],
                t.share[c]);
    fprintf(out, "}}}\n");
}

static void memory_json(const struct iz_summary *s, FILE *out)
{
    const struct iz_bytes *plan = &s->e->plan.bytes;
    const struct iz_bytes *have = iz_memory_bytes(s->e->memory);
    for (int t = 0; t < IZ_TIERS; t++)
        for (int c = 0; c < IZ_MEM_CLASSES; c++)
            if (plan->b[t][c] | have->b[t][c])
                fprintf(out,
                        "{\"memory\": \"%s\", \"tier\": \"%s\", "
                        "\"planned_bytes\": %lld, "
                        "\"allocated_bytes\": %lld}\n",
                        iz_class_names[c], iz_tier_names[t],
                        (long long)plan->b[t][c], (long long)have->b[t][c]);
}

void iz_summary_json(const struct iz_summary *s, FILE *out)
{
    write_tasks(s, true, out);
    write_links(s, true, out);
    write_workers(s, true, out);
    limit_json(s, out);
    memory_json(s, out);
}
