/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of a run's end; see summary.h. */
#include "runtime/report/summary.h"

#include <string.h>

#define COLUMNS 96
#define EACH 8 /* workers of one place that are told apart */

static double mib(double bytes)
{
    return bytes / 1048576;
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

/* ---- what is asked of the engine ---- */

static enum iz_where place_of(const struct iz_engine *e, int w)
{
    static const enum iz_where places[] = {IZ_ON_LANE, IZ_ON_UP, IZ_ON_DOWN,
                                           IZ_ON_IO, IZ_ON_COMPUTE};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++)
        if (iz_graph_has(e->graph, places[i], w))
            return places[i];
    return !e->plan.target.gpu && iz_graph_has(e->graph, IZ_ON_HOST, w)
               ? IZ_ON_COMPUTE
               : IZ_ON_HOST;
}

int iz_summary_shares_open(struct iz_time_shares **out,
                           const struct iz_engine *e)
{
    enum iz_where place[STARPU_NMAXWORKERS];
    for (int w = 0; w < STARPU_NMAXWORKERS; w++)
        place[w] = place_of(e, w);
    return iz_time_shares_open(out, place, STARPU_NMAXWORKERS);
}

/* A row of the table of workers. */
struct place_row {
    const char *name;
    enum iz_where where;
};

static const struct place_row place_rows[] = {
    {"compute", IZ_ON_COMPUTE}, {"host", IZ_ON_HOST}, {"network", IZ_ON_LANE},
    {"up", IZ_ON_UP},           {"down", IZ_ON_DOWN}, {"disk", IZ_ON_IO},
};
#define PLACE_ROWS ((int)(sizeof(place_rows) / sizeof(place_rows[0])))

/* Workers of a place, without the addresses of workers that are not there. */
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

static struct iz_limit_setting setting_of(const struct iz_engine *e)
{
    const struct iz_config *c = e->config;
    const struct iz_plan *p = &e->plan;
    return (struct iz_limit_setting){
        .gpu = p->target.gpu,
        .recompute = p->recompute,
        .overlap = c->run.overlap,
        .overlap_comm = c->zero.overlap_comm,
        .breadth_first = c->run.schedule == IZ_BREADTH_FIRST,
        .rings = p->fetch,
        .half = c->dtype != IZ_F32,
        .param_on_disk = p->param_home == IZ_HOME_NVME,
        .state_on_disk = p->state_home == IZ_HOME_NVME,
        .divisible = p->target.gpu && p->state_home == IZ_HOME_CPU &&
                     p->param_home != IZ_HOME_NVME &&
                     c->zero.optimizer.ratio > 0,
        .slices_fixed = c->run.slices > 0,
        .ranks = p->ranks,
        .workers = p->target.workers,
        .ring = p->ring[0].params,
        .slices = p->slices,
        .micro_batches = p->micro_batches,
        .in_flight = c->run.in_flight};
}

enum iz_limit iz_summary_limit(const struct iz_summary *s, char *text,
                               size_t size)
{
    struct iz_limit_measured m = {.usage = iz_time_shares_total(s->shares),
                                  .submitting = s->submitting};
    struct iz_limit_setting set = setting_of(s->e);
    m.host_busy = mean_busy(s->e, m.usage.worker, IZ_ON_HOST);
    iz_limit_text(text, size, &m, &set);
    return iz_limit_find(&m);
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

void iz_summary_print_limit(const struct iz_summary *s, FILE *out)
{
    static const char head[] = "limited by: ";
    char text[512];
    iz_summary_limit(s, text, sizeof(text));
    fputs(head, out);
    fold(out, text, (int)sizeof(head) - 1);
}

/* ---- time ---- */

static void print_tasks(const struct iz_summary *s, FILE *out)
{
    fprintf(out, "\n  %-12s %10s %10s %10s\n", "task", "count", "seconds",
            "hidden %");
    for (int k = 0; k < IZ_KINDS; k++) {
        struct iz_kind_time t = iz_time_shares_kind(s->shares, (enum iz_kind)k);
        if (t.tasks)
            fprintf(out, "  %-12s %10lld %10.2f %10.1f\n", iz_kinds[k].name,
                    (long long)t.tasks, t.seconds,
                    percent(t.hidden_s, t.seconds));
    }
}

struct link_row {
    const char *name;
    enum iz_use use;
    enum iz_where where;
};

static const struct link_row link_rows[] = {
    {"network", IZ_USE_NETWORK, IZ_ON_LANE},
    {"up", IZ_USE_UP, IZ_ON_UP},
    {"down", IZ_USE_DOWN, IZ_ON_DOWN},
    {"disk", IZ_USE_DISK, IZ_ON_IO},
};
#define LINK_ROWS ((int)(sizeof(link_rows) / sizeof(link_rows[0])))

static double file_bytes(const struct iz_nvme *f)
{
    int64_t read = 0, written = 0;
    if (f)
        iz_nvme_counts(f, &read, &written);
    return (double)(read + written);
}

/* Collectives through the host's memory copy to and from the GPU themselves:
 * such bytes are counted apart. */
static double link_bytes(const struct iz_engine *e, const struct link_row *r)
{
    /* Tasks on touched rows were submitted with the most that they may move. */
    if (e->plan.step_reads && !e->simulated && r->use == IZ_USE_NETWORK)
        return (double)e->coll->received_bytes;
    if (e->plan.step_reads && !e->simulated && r->use == IZ_USE_DISK)
        return file_bytes(e->state_file) + file_bytes(e->param_file);
    switch (r->use) {
    case IZ_USE_UP:
        return (double)e->up_bytes;
    case IZ_USE_DOWN:
        return (double)e->down_bytes;
    default:
        return iz_graph_bytes(e->graph, r->where);
    }
}

/* What its own workers move, in the time that they take. */
static double rate_bytes(const struct iz_engine *e, const struct link_row *r)
{
    bool copies = r->use == IZ_USE_UP || r->use == IZ_USE_DOWN;
    return copies ? iz_graph_bytes(e->graph, r->where) : link_bytes(e, r);
}

static bool link_exists(const struct iz_engine *e, const struct link_row *r)
{
    int id[STARPU_NMAXWORKERS];
    return workers_of(e, r->where, id) > 0;
}

static void print_links(const struct iz_summary *s, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    bool head = false;
    for (int i = 0; i < LINK_ROWS; i++) {
        const struct link_row *r = &link_rows[i];
        double bytes = link_bytes(s->e, r);
        double seconds = iz_time_shares_seconds(s->shares, r->use);
        if (!link_exists(s->e, r))
            continue;
        if (!head)
            fprintf(out, "\n  %-12s %10s %10s %10s %10s\n", "link", "MiB",
                    "seconds", "hidden %", "MiB/s");
        head = true;
        fprintf(out, "  %-12s %10.1f %10.2f %10.1f", r->name, mib(bytes),
                seconds, percent(t.beside_units_s[r->use], t.task_s[r->use]));
        if (seconds > 0)
            fprintf(out, " %10.1f\n", mib(rate_bytes(s->e, r)) / seconds);
        else /* the lane moved them with its collectives */
            fprintf(out, " %10s\n", "-");
    }
}

static void print_each(const double *worker, const int *id, int n, FILE *out)
{
    double least = 1, most = 0;
    for (int i = 0; i < n; i++) {
        double idle = 1 - worker[id[i]];
        least = idle < least ? idle : least;
        most = idle > most ? idle : most;
        if (n > 1 && n <= EACH)
            fprintf(out, "  %5.1f", 100 * idle);
    }
    if (n > EACH)
        fprintf(out, "  %5.1f to %.1f", 100 * least, 100 * most);
    fputc('\n', out);
}

static void print_workers(const struct iz_summary *s, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    int id[STARPU_NMAXWORKERS];
    if (t.window_s <= 0)
        return;
    fprintf(out, "\n  %-12s %10s %10s   of %.2f s of whole steps\n", "workers",
            "number", "idle %", t.window_s);
    for (int i = 0; i < PLACE_ROWS; i++) {
        int n = workers_of(s->e, place_rows[i].where, id);
        if (!n)
            continue;
        fprintf(out, "  %-12s %10d %10.1f", place_rows[i].name, n,
                100 * (1 - mean_busy(s->e, t.worker, place_rows[i].where)));
        print_each(t.worker, id, n, out);
    }
}

void iz_summary_print_time(const struct iz_summary *s, FILE *out)
{
    print_tasks(s, out);
    print_links(s, out);
    print_workers(s, out);
}

void iz_summary_print_memory(const struct iz_summary *s, FILE *out)
{
    const struct iz_bytes *plan = &s->e->plan.bytes;
    fputc('\n', out);
    iz_bytes_print(iz_memory_bytes(s->e->memory), out);
    fprintf(out, "  %-16s", "planned");
    for (int t = 0; t < IZ_TIERS; t++)
        fprintf(out, " %12.2f",
                mib((double)iz_bytes_tier(plan, (enum iz_tier)t)));
    fputc('\n', out);
}

/* ---- JSON ---- */

static void tasks_json(const struct iz_summary *s, FILE *out)
{
    const char *comma = "";
    fprintf(out, "{\"tasks\": {");
    for (int k = 0; k < IZ_KINDS; k++) {
        struct iz_kind_time t = iz_time_shares_kind(s->shares, (enum iz_kind)k);
        if (!t.tasks)
            continue;
        fprintf(out,
                "%s\"%s\": {\"count\": %lld, \"seconds\": %.6f, "
                "\"hidden_percent\": %.2f}",
                comma, iz_kinds[k].name, (long long)t.tasks, t.seconds,
                percent(t.hidden_s, t.seconds));
        comma = ", ";
    }
    fprintf(out, "}}\n");
}

static void links_json(const struct iz_summary *s, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    const char *comma = "";
    fprintf(out, "{\"links\": {");
    for (int i = 0; i < LINK_ROWS; i++) {
        const struct link_row *r = &link_rows[i];
        if (!link_exists(s->e, r))
            continue;
        fprintf(out,
                "%s\"%s\": {\"bytes\": %.0f, \"seconds\": %.6f, "
                "\"busy_percent\": %.2f, \"hidden_percent\": %.2f}",
                comma, r->name, link_bytes(s->e, r),
                iz_time_shares_seconds(s->shares, r->use), 100 * t.busy[r->use],
                percent(t.beside_units_s[r->use], t.task_s[r->use]));
        comma = ", ";
    }
    fprintf(out, "}}\n");
}

static void workers_json(const struct iz_summary *s, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    int id[STARPU_NMAXWORKERS];
    const char *comma = "";
    fprintf(out, "{\"workers\": {");
    for (int i = 0; i < PLACE_ROWS; i++) {
        int n = workers_of(s->e, place_rows[i].where, id);
        if (!n)
            continue;
        fprintf(out, "%s\"%s\": [", comma, place_rows[i].name);
        for (int k = 0; k < n; k++)
            fprintf(out, "%s%.2f", k ? ", " : "", 100 * (1 - t.worker[id[k]]));
        fprintf(out, "]");
        comma = ", ";
    }
    fprintf(out, "}, \"unit\": \"idle percent\"}\n");
}

static void limit_json(const struct iz_summary *s, FILE *out)
{
    struct iz_time_total t = iz_time_shares_total(s->shares);
    char text[512];
    enum iz_limit limit = iz_summary_limit(s, text, sizeof(text));
    fprintf(out, "{\"limit\": {\"by\": \"%s\", \"text\": \"%s\", ",
            iz_limit_names[limit], text);
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
    tasks_json(s, out);
    links_json(s, out);
    workers_json(s, out);
    limit_json(s, out);
    memory_json(s, out);
}
