/* SPDX-License-Identifier: Apache-2.0 */
/* Progress line, metrics.jsonl and summary; see metrics.h. */
#include "runtime/metrics.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "runtime/overlap.h"

struct iz_metrics {
    struct iz_engine *e;
    struct iz_overlap *overlap;
    FILE *json, *tasks;
    bool quiet, tty;
    int columns; /* of the terminal */
    bool broken; /* a line could not be written */
    bool live;   /* an unfinished line stands on the terminal */
    double gemm_rate;
    int64_t last_ns;  /* time of the previous step; 0: not to be counted */
    int64_t first_ns; /* of the first step that counts */
    double train_s;   /* time of `steps` steps */
    int64_t steps, skipped, lost_spans;
    double last_loss, last_eval;
    int64_t open_ns;
};

static int open_file(struct iz_metrics *m, FILE **f, const char *name)
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/%s", m->e->config->run.output, name);
    *f = fopen(path, "a");
    if (*f)
        return 0;
    int why = errno;
    fprintf(stderr, "izar: %s: %s\n", path, strerror(why));
    return -why;
}

/* Columns of the terminal that somebody watches, or 0.  Open MPI gives every
 * rank a terminal, watched or not, so with several ranks the caller has to say
 * so. */
static int terminal_columns(int ranks)
{
    struct winsize w;
    const char *live = getenv("IZ_LIVE");
    if (getenv("IZ_PLAIN") || !isatty(STDOUT_FILENO) || (ranks > 1 && !live))
        return 0;
    if (live && atoi(live) > 1)
        return atoi(live);
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) || !w.ws_col ? 80 : w.ws_col;
}

int iz_metrics_open(struct iz_metrics **out, struct iz_engine *e,
                    double gemm_rate, bool quiet)
{
    struct iz_metrics *m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    *out = m;
    m->e = e;
    m->quiet = quiet;
    m->gemm_rate = gemm_rate;
    m->columns = terminal_columns(e->plan.ranks);
    m->tty = m->columns > 0;
    m->last_eval = m->last_loss = NAN;
    m->open_ns = m->last_ns = iz_now_ns();
    int r = iz_overlap_open(&m->overlap);
    if (!r && !quiet)
        r = open_file(m, &m->json, "metrics.jsonl");
    if (!r && !quiet && e->config->run.task_log)
        r = open_file(m, &m->tasks, "tasks.jsonl");
    if (r)
        iz_metrics_close(out);
    return r;
}

void iz_metrics_close(struct iz_metrics **m)
{
    if (!*m)
        return;
    if ((*m)->json)
        fclose((*m)->json);
    if ((*m)->tasks)
        fclose((*m)->tasks);
    iz_overlap_close(&(*m)->overlap);
    free(*m);
    *m = NULL;
}

void iz_metrics_line(struct iz_metrics *m, const char *fmt, ...)
{
    va_list ap;
    if (!m->json)
        return;
    va_start(ap, fmt);
    vfprintf(m->json, fmt, ap);
    va_end(ap);
    fputc('\n', m->json);
    if (fflush(m->json) && !m->broken) {
        m->broken = true;
        fprintf(stderr, "izar: %s/metrics.jsonl: %s: lines are being lost\n",
                m->e->config->run.output, strerror(errno));
    }
}

static void take_span(void *arg, const struct iz_span *s)
{
    struct iz_metrics *m = arg;
    iz_overlap_add(m->overlap, s);
    if (m->tasks)
        fprintf(m->tasks,
                "{\"task\": \"%s\", \"unit\": %d, \"step\": %d, "
                "\"worker\": %d, \"begin_us\": %.3f, \"end_us\": %.3f}\n",
                iz_kinds[s->kind].name, s->unit, s->step, s->worker,
                (double)(s->begin_ns - m->open_ns) * 1e-3,
                (double)(s->end_ns - m->open_ns) * 1e-3);
}

static void drain(struct iz_metrics *m, bool last)
{
    m->lost_spans += iz_graph_spans(m->e->graph, take_span, m);
    iz_overlap_settle(m->overlap, last);
}

/* ---- figures ---- */

static double tokens_per_step(const struct iz_engine *e)
{
    return (double)e->config->train_batch_size * e->model->tokens;
}

/* Seconds and hidden part of several kinds. */
static struct iz_kind_time sum_kinds(const struct iz_metrics *m,
                                     const enum iz_kind *k, int n)
{
    struct iz_kind_time t = {0};
    for (int i = 0; i < n; i++) {
        const struct iz_kind_time *o = iz_overlap_kind(m->overlap, k[i]);
        t.seconds += o->seconds;
        t.hidden_s += o->hidden_s;
        t.tasks += o->tasks;
    }
    return t;
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static const enum iz_kind optimizer_kinds[] = {IZ_ADAM};
static const enum iz_kind comm_kinds[] = {IZ_FETCH, IZ_REDUCE, IZ_OFFLOAD};
static const enum iz_kind disk_kinds[] = {IZ_LOAD, IZ_STORE};

static double hidden_percent(const struct iz_metrics *m,
                             const enum iz_kind *kinds, int n)
{
    struct iz_kind_time t = sum_kinds(m, kinds, n);
    return percent(t.hidden_s, t.seconds);
}

/* JSON has no word for these. */
static const char *number(char *out, size_t size, double v)
{
    if (isfinite(v))
        snprintf(out, size, "%.17g", v);
    else
        snprintf(out, size, "\"%s\"",
                 isnan(v) ? "nan"
                 : v > 0  ? "inf"
                          : "-inf");
    return out;
}

/* ---- lines ---- */

/* The whole line; a terminal shows as much of it as it has columns. */
static void print_step(struct iz_metrics *m, const struct iz_event *v,
                       double rate, double flops)
{
    char line[256], scale[32] = "", adam[32] = "";
    if (m->e->config->dtype == IZ_F16)
        snprintf(scale, sizeof(scale), "  scale %g%s", v->loss_scale,
                 v->skipped ? " skipped" : "");
    if (m->e->plan.target.workers > 1 ||
        m->e->plan.target.gpu) /* else nothing can run beside it */
        snprintf(adam, sizeof(adam), " adam %.0f%%",
                 hidden_percent(m, optimizer_kinds, 1));
    snprintf(
        line, sizeof(line),
        "step %lld/%lld  loss %.4f  %.0f tok/s  %.0f%% of GEMM  grad %.3f  "
        "lr %.3g%s  hidden:%s comm %.0f%%  %.0f MiB",
        (long long)v->step, (long long)m->e->config->run.steps, v->loss, rate,
        percent(flops, m->gemm_rate), v->grad_norm, v->lr, scale, adam,
        hidden_percent(m, comm_kinds, 3),
        (double)iz_memory_peak_resident() / 1048576);
    if (m->tty)
        printf("\r\033[K%.*s", m->columns - 1, line);
    else
        printf("%s\n", line);
    m->live = m->tty;
    fflush(stdout);
}

static void finish_line(struct iz_metrics *m)
{
    if (m->live)
        putchar('\n');
    m->live = false;
}

static void step_event(struct iz_metrics *m, const struct iz_event *v)
{
    double s = (double)(v->time_ns - m->last_ns) * 1e-9;
    double rate = tokens_per_step(m->e) / s;
    double flops = m->e->plan.step_flops / s;
    bool counted = m->last_ns != 0 && m->first_ns != 0;
    char loss[40], norm[40];
    if (!m->first_ns)
        m->first_ns = v->time_ns; /* the first step warms up */
    if (counted) {
        m->train_s += s;
        m->steps++;
    }
    m->last_ns = v->time_ns;
    m->last_loss = v->loss;
    m->skipped += v->skipped;
    iz_metrics_line(m,
                    "{\"step\": %lld, \"loss\": %s, \"grad_norm\": %s, "
                    "\"lr\": %.17g, \"loss_scale\": %.17g, \"skipped\": %s, "
                    "\"seconds\": %.6f, \"tokens_per_s\": %.1f, "
                    "\"gflop_per_s\": %.2f, \"gemm_percent\": %.2f}",
                    (long long)v->step, number(loss, sizeof(loss), v->loss),
                    number(norm, sizeof(norm), v->grad_norm), v->lr,
                    v->loss_scale, v->skipped ? "true" : "false", s, rate,
                    flops * 1e-9, percent(flops, m->gemm_rate));
    int64_t every = m->e->config->run.log_interval;
    bool show = m->tty || v->step % every == 0 || v->step == 1 ||
                v->step == m->e->config->run.steps || v->failure;
    if (!m->quiet && show)
        print_step(m, v, rate, flops);
}

void iz_metrics_event(struct iz_metrics *m, const struct iz_event *v)
{
    drain(m, false);
    if (!v->eval) {
        step_event(m, v);
        return;
    }
    m->last_eval = v->loss;
    char loss[40];
    iz_metrics_line(m, "{\"step\": %lld, \"validation_loss\": %s}",
                    (long long)v->step, number(loss, sizeof(loss), v->loss));
    if (m->quiet)
        return;
    finish_line(m);
    printf("step %lld  validation loss %.4f nats per token\n",
           (long long)v->step, v->loss);
    fflush(stdout);
    m->last_ns = v->time_ns;
}

void iz_metrics_pause(struct iz_metrics *m)
{
    finish_line(m);
    m->last_ns = iz_now_ns();
}

/* ---- summary ---- */

static void print_kinds(const struct iz_metrics *m)
{
    printf("  %-10s %10s %10s %10s\n", "task", "count", "seconds", "hidden %");
    for (int k = 0; k < IZ_KINDS; k++) {
        const struct iz_kind_time *t = iz_overlap_kind(m->overlap, k);
        if (t->tasks)
            printf("  %-10s %10lld %10.2f %10.1f\n", iz_kinds[k].name,
                   (long long)t->tasks, t->seconds,
                   percent(t->hidden_s, t->seconds));
    }
}

static void print_bytes(const struct iz_metrics *m)
{
    const struct iz_engine *e = m->e;
    int64_t read = 0, written = 0, r, w;
    printf("  parameters fetched %.1f MiB", (double)e->fetched_bytes / 1048576);
    if (e->plan.ranks > 1)
        printf(", collectives sent %.1f MiB received %.1f MiB",
               (double)e->coll->sent_bytes / 1048576,
               (double)e->coll->received_bytes / 1048576);
    if (e->plan.target.gpu)
        printf(", to the GPU %.1f MiB, from it %.1f MiB",
               (double)e->up_bytes / 1048576, (double)e->down_bytes / 1048576);
    for (int i = 0; i < 2; i++) {
        struct iz_nvme *f = i ? e->param_file : e->state_file;
        if (!f)
            continue;
        iz_nvme_counts(f, &r, &w);
        read += r;
        written += w;
    }
    if (read | written)
        printf(", disk read %.1f MiB written %.1f MiB", (double)read / 1048576,
               (double)written / 1048576);
    printf("\n");
}

static void print_hidden(const struct iz_metrics *m)
{
    struct iz_kind_time o = sum_kinds(m, optimizer_kinds, 1);
    struct iz_kind_time c = sum_kinds(m, comm_kinds, 3);
    struct iz_kind_time d = sum_kinds(m, disk_kinds, 2);
    printf("  optimizer %.2f s, %.1f %% of it beside forward or backward%s\n",
           o.seconds, percent(o.hidden_s, o.seconds),
           m->e->plan.target.workers == 1 && !m->e->plan.target.gpu
               ? " (one compute worker: nothing can run beside it)"
               : "");
    printf("  fetch and reduce %.2f s, %.1f %% of it beside forward or "
           "backward\n",
           c.seconds, percent(c.hidden_s, c.seconds));
    if (d.tasks)
        printf("  disk %.2f s, %.1f %% of it beside forward or backward\n",
               d.seconds, percent(d.hidden_s, d.seconds));
}

static void summary_json(struct iz_metrics *m, const char *reason, double rate,
                         double flops)
{
    struct iz_engine *e = m->e;
    char loss[40], val[40];
    iz_metrics_line(
        m,
        "{\"summary\": {\"reason\": \"%s\", \"steps\": %lld, \"loss\": %s, "
        "\"validation_loss\": %s, \"tokens_per_s\": %.1f, "
        "\"gflop_per_s\": %.2f, \"gemm_gflop_per_s\": %.2f, "
        "\"gemm_percent\": %.2f, \"optimizer_hidden_percent\": %.1f, "
        "\"comm_hidden_percent\": %.1f, \"tasks\": %lld, "
        "\"fetched_bytes\": %lld, \"sent_bytes\": %lld, "
        "\"up_bytes\": %lld, \"down_bytes\": %lld, "
        "\"peak_resident_bytes\": %lld, \"skipped_steps\": %lld, "
        "\"order_hash\": \"%016llx\"}}",
        reason, (long long)e->step, number(loss, sizeof(loss), m->last_loss),
        number(val, sizeof(val), m->last_eval), rate, flops * 1e-9,
        m->gemm_rate * 1e-9, percent(flops, m->gemm_rate),
        hidden_percent(m, optimizer_kinds, 1), hidden_percent(m, comm_kinds, 3),
        (long long)iz_graph_submitted(e->graph), (long long)e->fetched_bytes,
        (long long)e->coll->sent_bytes, (long long)e->up_bytes,
        (long long)e->down_bytes, (long long)iz_memory_peak_resident(),
        (long long)m->skipped, (unsigned long long)e->coll->order_hash);
}

static void memory_json(struct iz_metrics *m)
{
    const struct iz_bytes *plan = &m->e->plan.bytes;
    const struct iz_bytes *have = iz_memory_bytes(m->e->memory);
    for (int t = 0; t < IZ_TIERS; t++)
        for (int c = 0; c < IZ_MEM_CLASSES; c++)
            if (plan->b[t][c] | have->b[t][c])
                iz_metrics_line(m,
                                "{\"memory\": \"%s\", \"tier\": \"%s\", "
                                "\"planned_bytes\": %lld, "
                                "\"allocated_bytes\": %lld}",
                                iz_class_names[c], iz_tier_names[t],
                                (long long)plan->b[t][c],
                                (long long)have->b[t][c]);
}

void iz_metrics_summary(struct iz_metrics *m, const char *reason)
{
    struct iz_engine *e = m->e;
    iz_graph_wait(e->graph); /* the last updates count too */
    drain(m, true);
    if (m->quiet)
        return;
    finish_line(m);
    double s = m->steps ? m->train_s / (double)m->steps : 0;
    double rate = s > 0 ? tokens_per_step(e) / s : 0;
    double flops = s > 0 ? e->plan.step_flops / s : 0;
    printf("\n%s after %lld steps: loss %.4f", reason, (long long)e->step,
           m->last_loss);
    if (isfinite(m->last_eval))
        printf(", validation loss %.4f", m->last_eval);
    printf(
        "\n  %.0f tokens/s, %.1f GFLOP/s per rank = %.1f %% of the GEMM rate "
        "measured at the start (%.1f GFLOP/s on %d worker%s)\n",
        rate, flops * 1e-9, percent(flops, m->gemm_rate), m->gemm_rate * 1e-9,
        e->plan.tasks_at_once, e->plan.tasks_at_once > 1 ? "s" : "");
    print_hidden(m);
    print_bytes(m);
    print_kinds(m);
    iz_bytes_print(iz_memory_bytes(e->memory), stdout);
    printf("  largest resident set %.1f MiB\n",
           (double)iz_memory_peak_resident() / 1048576);
    if (m->lost_spans)
        printf("  (%lld task times were lost: shares are approximate)\n",
               (long long)m->lost_spans);
    fflush(stdout);
    summary_json(m, reason, rate, flops);
    memory_json(m);
}
