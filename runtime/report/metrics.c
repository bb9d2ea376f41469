/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/report/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "runtime/base/progress.h"
#include "runtime/report/summary.h"
#include "runtime/report/time_shares.h"

/* Of the main thread, between events: how long, and how long it waited. */
struct watch {
    int64_t seen_ns, seen_waited_ns, ns, waited_ns;
};

/* Of submission over execution. */
struct lead {
    double least_s, sum_s;
    int64_t n;
};

struct iz_metrics {
    struct iz_engine *e;
    struct iz_time_shares *shares; /* of the rank that speaks */
    FILE *json, *tasks;
    struct iz_sink line; /* of a task */
    bool quiet, tty;
    int columns;                /* of the terminal */
    bool told_json, told_tasks; /* of lines that could not be written */
    bool torn;                  /* metrics.jsonl ends within a line */
    bool live;                  /* an unfinished line stands on the terminal */
    double gemm_rate;
    int64_t last_ns;  /* time of the previous step; 0: not to be counted */
    int64_t first_ns; /* of the first step that counts */
    double train_s;   /* time of `steps` steps */
    int64_t steps, skipped, lost_spans;
    struct iz_event last, last_eval; /* of a step, an evaluation */
    int64_t open_ns;
    struct watch watch;
    struct lead lead;
};

static int metrics_open_file(struct iz_metrics *m, FILE **f, const char *name)
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

/* The processes of a run that was just killed may be there for a moment. */
static int lock_soon(int fd, const char *output)
{
    enum { TRIES = 100, TELL = 20 };
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB); i++) {
        if (errno != EWOULDBLOCK || i == TRIES)
            return errno;
        if (i == TELL)
            fprintf(stderr,
                    "izar: run.output: another run writes into %s: waiting a "
                    "few seconds for its end\n",
                    output);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    return 0;
}

int iz_metrics_claim(const char *output)
{
    char path[IZ_PATH_MAX + 32], last;
    snprintf(path, sizeof(path), "%s/metrics.jsonl", output);
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int why = fd < 0 ? errno : lock_soon(fd, output);
    if (why == EWOULDBLOCK)
        fprintf(stderr,
                "izar: run.output: another run writes into %s and goes on: "
                "wait for its end, or choose another directory\n",
                output);
    else if (fd < 0)
        fprintf(stderr, "izar: %s: %s\n", path, strerror(why));
    else if (why)
        fprintf(stderr,
                "izar: run.output: %s cannot be locked (%s): see that no other "
                "run writes there\n",
                output, strerror(why));
    if (fd >= 0 && why != EWOULDBLOCK) {
        off_t end = lseek(fd, 0, SEEK_END);
        if (end > 0 && pread(fd, &last, 1, end - 1) == 1 && last != '\n' &&
            write(fd, "\n", 1) < 0)
            fprintf(stderr, "izar: %s: %s\n", path, strerror(errno));
        return fd;
    }
    if (fd >= 0)
        close(fd);
    return -why;
}

int iz_metrics_open(struct iz_metrics **out, struct iz_engine *e,
                    double gemm_rate, bool quiet)
{
    struct iz_metrics *m = *out = iz_take(1, sizeof(*m), "the metrics");
    m->e = e;
    m->quiet = quiet;
    m->gemm_rate = gemm_rate;
    m->columns = iz_progress_columns(STDOUT_FILENO, e->plan.ranks);
    m->tty = m->columns > 0;
    m->open_ns = m->last_ns = iz_clock_ns();
    m->shares = quiet ? NULL : iz_summary_shares_open(e);
    int r = quiet ? 0 : metrics_open_file(m, &m->json, "metrics.jsonl");
    if (!r && !quiet && e->config->run.task_log)
        r = metrics_open_file(m, &m->tasks, "tasks.jsonl");
    if (r)
        iz_metrics_close(out);
    return r;
}

static void tell_lost(const struct iz_metrics *m, const char *name, bool lost,
                      bool *told)
{
    if (lost && !*told)
        fprintf(stderr, "izar: %s/%s.jsonl: %s: lines are being lost\n",
                m->e->config->run.output, name, strerror(errno));
    *told |= lost;
}

void iz_metrics_close(struct iz_metrics **m)
{
    if (!*m)
        return;
    struct stat st;
    if ((*m)->json && fstat(fileno((*m)->json), &st) == 0 && st.st_nlink == 0)
        fprintf(stderr,
                "izar: %s/metrics.jsonl was removed during the run: its lines "
                "are lost\n",
                (*m)->e->config->run.output);
    if ((*m)->json)
        fclose((*m)->json);
    if ((*m)->tasks)
        tell_lost(*m, "tasks", fclose((*m)->tasks) != 0, &(*m)->told_tasks);
    iz_time_shares_close(&(*m)->shares);
    free(*m);
    *m = NULL;
}

static void flush(struct iz_metrics *m)
{
    m->torn = fflush(m->json) != 0;
    tell_lost(m, "metrics", m->torn, &m->told_json);
    tell_lost(m, "tasks", m->tasks && ferror(m->tasks), &m->told_tasks);
}

void iz_metrics_line(struct iz_metrics *m, const char *fmt, ...)
{
    va_list ap;
    if (!m->json)
        return;
    if (m->torn) /* the rest of the line before is lost */
        fputc('\n', m->json);
    va_start(ap, fmt);
    vfprintf(m->json, fmt, ap);
    va_end(ap);
    fputc('\n', m->json);
    flush(m);
}

static void take_span(void *arg, const struct iz_span *s)
{
    struct iz_metrics *m = arg;
    if (m->shares)
        iz_time_shares_add(m->shares, s);
    if (!m->tasks)
        return;
    m->line.fd = -1;
    m->line.n = 0;
    iz_span_print(&m->line, s, m->open_ns);
    iz_sink_text(&m->line, "\n");
    fwrite(m->line.buf, 1, (size_t)m->line.n, m->tasks);
}

static void drain(struct iz_metrics *m)
{
    m->lost_spans += iz_graph_spans(m->e->graph, take_span, m);
}

/* The window of the summary reaches to this event. */
static void watch(struct iz_metrics *m, int64_t time_ns)
{
    int64_t waited = m->e->events.waited_ns + iz_graph_waited_ns(m->e->graph);
    if (!m->shares)
        return;
    iz_time_shares_until(m->shares, time_ns);
    if (m->watch.seen_ns) {
        m->watch.ns += time_ns - m->watch.seen_ns;
        m->watch.waited_ns += waited - m->watch.seen_waited_ns;
    }
    m->watch.seen_ns = time_ns;
    m->watch.seen_waited_ns = waited;
}

static double submitting(const struct iz_metrics *m)
{
    double waited = (double)m->watch.waited_ns / (double)m->watch.ns;
    return m->watch.ns <= 0 || waited > 1 ? 0 : 1 - waited;
}

/* ---- figures ---- */

static double tokens_per_step(const struct iz_engine *e)
{
    return (double)e->config->train_batch_size * e->model->tokens;
}

static double hidden_percent(const struct iz_metrics *m, unsigned kinds)
{
    struct iz_kind_time t = iz_time_shares_kinds(m->shares, kinds);
    return iz_units_percent(t.hidden_s, t.seconds);
}

/* JSON has no word for these. */
static const char *metrics_number(char *out, size_t size, double v)
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

#define NO_TARGETS "no targets" /* what has a loss of none says */

static const char *loss_number(char out[40], const struct iz_event *v)
{
    return v->targets ? metrics_number(out, 40, v->loss) : "null";
}

/* The usual short form where there is one. */
static const char *short_item(const struct iz_metrics *m)
{
    const char *item = m->e->model->item;
    return strcmp(item, "token") ? item : "tok";
}

/* ---- lines ---- */

/* Of pairs: means, TRL's names after `head`; "" without. */
static const char *of_pairs(char *out, size_t size, const struct iz_aux *t,
                            const char *head)
{
    static const char *const names[IZ_PAIR_FIGURES] = {
        [IZ_REWARDS_CHOSEN] = "rewards/chosen",
        [IZ_REWARDS_REJECTED] = "rewards/rejected",
        [IZ_REWARDS_ACCURACIES] = "rewards/accuracies",
        [IZ_REWARDS_MARGINS] = "rewards/margins",
        [IZ_LOGPS_CHOSEN] = "logps/chosen",
        [IZ_LOGPS_REJECTED] = "logps/rejected"};
    char number[40];
    size_t n = 0;
    out[0] = '\0';
    for (int i = 0; i < IZ_PAIR_FIGURES && t->pairs > 0; i++)
        n += (size_t)snprintf(
            out + n, size - n, ", \"%s%s\": %s", head, names[i],
            metrics_number(number, sizeof(number), t->pair[i] / t->pairs));
    return out;
}

/* For people. */
static const char *margin(char *out, size_t size, const struct iz_aux *t)
{
    out[0] = '\0';
    if (t->pairs > 0)
        snprintf(out, size, "  margin %.4f in favour of %.0f%%",
                 t->pair[IZ_REWARDS_MARGINS] / t->pairs,
                 100 * t->pair[IZ_REWARDS_ACCURACIES] / t->pairs);
    return out;
}

/* The whole line; a terminal shows as much of it as it has columns. */
static void print_step(struct iz_metrics *m, const struct iz_event *v,
                       double rate, double flops)
{
    char line[320], loss[32] = NO_TARGETS, some[64] = "";
    char scale[32] = "", adam[32] = "", pairs[80];
    int64_t all = iz_data_targets(m->e->data, v->samples);
    if (m->e->config->dtype == IZ_F16)
        snprintf(scale, sizeof(scale), "  scale %g%s", v->loss_scale,
                 v->skipped ? " skipped" : "");
    else if (v->skipped)
        snprintf(scale, sizeof(scale), "  skipped");
    if (v->targets)
        snprintf(loss, sizeof(loss), "loss %.4f", v->loss);
    if (v->targets && v->targets < all && m->e->config->data.group == 1)
        snprintf(some, sizeof(some), "  %lld of %lld targets",
                 (long long)v->targets, (long long)all);
    if (m->e->plan.target.workers > 1 ||
        m->e->plan.target.gpu) /* else nothing can run beside it */
        snprintf(adam, sizeof(adam), " adam %.0f%%",
                 hidden_percent(m, IZ_KINDS_OPTIMIZER));
    snprintf(line, sizeof(line),
             "step %lld/%lld  %s%s%s  %.0f %s/s  %.0f%% of GEMM  grad "
             "%.3f  "
             "lr %.3g%s  hidden:%s comm %.0f%%  %.0f MiB",
             (long long)v->step, (long long)m->e->config->run.steps, loss,
             margin(pairs, sizeof(pairs), &v->aux), some, rate, short_item(m),
             iz_units_percent(flops, m->gemm_rate), v->grad_norm, v->lr, scale,
             adam, hidden_percent(m, IZ_KINDS_LINKS),
             iz_units_mib(iz_memory_peak_resident()));
    if (m->tty)
        printf("\r\033[K%.*s", m->columns - 1, line);
    else
        printf("%s\n", line);
    m->live = m->tty;
    fflush(stdout);
}

void iz_metrics_between(struct iz_metrics *m)
{
    if (m->live)
        putchar('\n');
    m->live = false;
}

static double unix_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Of a step: means over routers and their tasks; "" without experts. */
static const char *of_experts(char *out, size_t size, const struct iz_event *v,
                              const struct iz_engine *e)
{
    const struct iz_aux *t = &v->aux;
    double blocks = t->routers / (double)(e->plan.micro_batches *
                                          e->plan.slices * e->plan.ranks);
    char loss[40], balance[40], z[40];
    out[0] = '\0';
    if (t->routers > 0)
        snprintf(
            out, size,
            ", \"router_loss\": %s, \"router_balance\": %s, "
            "\"router_z\": %s, \"expert_least\": %.9g, "
            "\"expert_most\": %.9g, \"dropped\": 0",
            metrics_number(loss, sizeof(loss), t->loss / t->routers * blocks),
            metrics_number(balance, sizeof(balance), t->balance / t->routers),
            metrics_number(z, sizeof(z), t->z / t->routers), t->least, t->most);
    return out;
}

/* For people: the loss, and what it is the mean of. */
static void print_eval(struct iz_metrics *m, const struct iz_event *v)
{
    const struct iz_model *model = m->e->model;
    int64_t all = iz_data_windows(m->e->data, IZ_VAL);
    int group = m->e->config->data.group;
    char text[80];
    iz_metrics_between(m);
    printf("step %lld  validation ", (long long)v->step);
    if (v->targets)
        printf("loss %.4f%s%s", v->loss, group > 1 ? "" : " nats per ",
               group > 1 ? "" : model->item);
    else
        printf(NO_TARGETS);
    printf("%s (%lld", margin(text, sizeof(text), &v->aux),
           (long long)v->samples / group);
    if (v->samples < all)
        printf(" of %lld", (long long)all / group);
    if (model->record.bytes)
        printf(" %ss)\n", model->item);
    else
        printf(" %s, %lld targets)\n", group > 1 ? "pairs" : "windows",
               (long long)v->targets);
    fflush(stdout);
}

static void step_event(struct iz_metrics *m, const struct iz_event *v)
{
    double s = (double)(v->time_ns - m->last_ns) * 1e-9;
    bool worked = v->targets || !v->skipped;
    double rate = worked ? tokens_per_step(m->e) / s : 0;
    double flops = worked ? m->e->plan.step_flops / s : 0;
    bool counted = m->last_ns != 0 && m->first_ns != 0 && worked;
    char loss[40], norm[40], experts[256], pairs[512];
    if (!m->first_ns && worked)
        m->first_ns = v->time_ns; /* the first step warms up */
    if (counted) {
        m->train_s += s;
        m->steps++;
    }
    m->last_ns = v->time_ns;
    m->last = *v;
    m->skipped += v->skipped;
    iz_metrics_line(
        m,
        "{\"step\": %lld, \"time\": %.3f, \"loss\": %s, "
        "\"targets\": %lld, \"grad_norm\": %s, "
        "\"lr\": %.17g, \"loss_scale\": %.17g, \"skipped\": %s, "
        "\"seconds\": %.6f, \"%ss_per_s\": %.1f, "
        "\"gflop_per_s\": %.2f, \"gemm_percent\": %.2f, "
        "\"resident_bytes\": %lld%s%s}",
        (long long)v->step, unix_s(), loss_number(loss, v),
        (long long)v->targets, metrics_number(norm, sizeof(norm), v->grad_norm),
        v->lr, v->loss_scale, v->skipped ? "true" : "false", s,
        m->e->model->item, rate, flops * 1e-9,
        iz_units_percent(flops, m->gemm_rate), (long long)iz_memory_resident(),
        of_experts(experts, sizeof(experts), v, m->e),
        of_pairs(pairs, sizeof(pairs), &v->aux, ""));
    int64_t every = m->e->config->run.log_interval;
    bool show = m->tty || v->step % every == 0 || v->step == 1 ||
                v->step == m->e->config->run.steps || v->failure;
    if (!m->quiet && show)
        print_step(m, v, rate, flops);
}

/* When a step ended, how long had all of the next one been submitted?  Below
 * zero, workers may have waited for the main thread. */
static void count_lead(struct iz_metrics *m, const struct iz_event *v)
{
    const struct iz_engine *e = m->e;
    if (e->step <= v->step)
        return;
    double s =
        (double)(v->time_ns - e->events.submitted_ns[v->step % IZ_EVENTS]) *
        1e-9;
    if (m->lead.n++ == 0 || s < m->lead.least_s)
        m->lead.least_s = s;
    m->lead.sum_s += s;
}

static void submission_json(struct iz_metrics *m)
{
    const struct iz_engine *e = m->e;
    if (m->lead.n)
        iz_metrics_line(m,
                        "{\"submission\": {\"seconds\": %.6f, "
                        "\"least_lead_s\": %.6f, \"mean_lead_s\": %.6f}}",
                        (double)e->counts.submit_ns * 1e-9, m->lead.least_s,
                        m->lead.sum_s / (double)m->lead.n);
}

void iz_metrics_event(struct iz_metrics *m, const struct iz_event *v)
{
    drain(m);
    watch(m, v->time_ns);
    if (!v->eval) {
        count_lead(m, v);
        step_event(m, v);
        return;
    }
    m->last_eval = *v;
    char loss[40], pairs[512];
    iz_metrics_line(m,
                    "{\"step\": %lld, \"time\": %.3f, "
                    "\"validation_loss\": %s, \"samples\": %lld, "
                    "\"targets\": %lld%s}",
                    (long long)v->step, unix_s(), loss_number(loss, v),
                    (long long)v->samples, (long long)v->targets,
                    of_pairs(pairs, sizeof(pairs), &v->aux, "eval_"));
    if (!m->quiet)
        print_eval(m, v);
    m->last_ns = v->time_ns;
}

void iz_metrics_pause(struct iz_metrics *m)
{
    drain(m);
    if (m->shares)
        iz_time_shares_stop(m->shares, false);
    m->watch.seen_ns = 0;
    iz_metrics_between(m);
    m->last_ns = iz_clock_ns();
}

/* ---- summary ---- */

static void summary_json(struct iz_metrics *m, const char *reason, double rate,
                         double flops)
{
    struct iz_engine *e = m->e;
    char loss[40], val[40];
    iz_metrics_line(
        m,
        "{\"summary\": {\"reason\": \"%s\", \"steps\": %lld, \"loss\": %s, "
        "\"validation_loss\": %s, \"%ss_per_s\": %.1f, "
        "\"gflop_per_s\": %.2f, \"gemm_gflop_per_s\": %.2f, "
        "\"gemm_percent\": %.2f, \"optimizer_hidden_percent\": %.1f, "
        "\"comm_hidden_percent\": %.1f, \"tasks\": %lld, "
        "\"fetched_bytes\": %lld, \"sent_bytes\": %lld, "
        "\"far_bytes\": %lld, \"up_bytes\": %lld, \"down_bytes\": %lld, "
        "\"peak_resident_bytes\": %lld, \"skipped_steps\": %lld, "
        "\"order_hash\": \"%016llx\"}}",
        reason, (long long)e->step, loss_number(loss, &m->last),
        loss_number(val, &m->last_eval), e->model->item, rate, flops * 1e-9,
        m->gemm_rate * 1e-9, iz_units_percent(flops, m->gemm_rate),
        hidden_percent(m, IZ_KINDS_OPTIMIZER),
        hidden_percent(m, IZ_KINDS_LINKS),
        (long long)iz_graph_submitted(e->graph),
        (long long)e->counts.fetched_bytes, (long long)e->coll->sent_bytes,
        (long long)e->coll->far_bytes, (long long)e->counts.up_bytes,
        (long long)e->counts.down_bytes, (long long)iz_memory_peak_resident(),
        (long long)m->skipped, (unsigned long long)e->coll->order_hash);
}

/* What there was: a run may have no step, or a last one without targets. */
static void print_losses(const struct iz_metrics *m, const char *reason)
{
    const char *before = ":";
    printf("\n%s after %lld steps", reason, (long long)m->e->step);
    if (m->last.targets)
        printf("%s loss %.4f", before, m->last.loss);
    else if (m->last.samples)
        printf("%s " NO_TARGETS " in the last one", before);
    before = m->last.samples ? "," : before;
    if (m->last_eval.targets)
        printf("%s validation loss %.4f", before, m->last_eval.loss);
    if (m->skipped)
        printf("%s %lld skipped", before, (long long)m->skipped);
    printf("\n");
}

void iz_metrics_summary(struct iz_metrics *m, const char *reason)
{
    struct iz_engine *e = m->e;
    iz_graph_wait(e->graph); /* the last updates count too */
    drain(m);
    if (m->quiet)
        return;
    iz_metrics_between(m);
    iz_time_shares_stop(m->shares, true);
    struct iz_summary t = {
        .e = e, .shares = m->shares, .submitting = submitting(m)};
    double s = m->steps ? m->train_s / (double)m->steps : 0;
    double rate = s > 0 ? tokens_per_step(e) / s : 0;
    double flops = s > 0 ? e->plan.step_flops / s : 0;
    print_losses(m, reason);
    const struct iz_aux *aux = &m->last.aux;
    char pairs[80];
    if (aux->pairs > 0)
        printf("last step:%s of its pairs\n",
               margin(pairs, sizeof(pairs), aux));
    if (aux->routers > 0)
        printf("experts had %.2f to %.2f of an even share of rows in the last "
               "step, balance %.3f; no row was dropped\n",
               aux->least, aux->most, aux->balance / aux->routers);
    iz_summary_print_bottleneck(&t, stdout);
    printf("\n  %.0f %ss/s, %.1f GFLOP/s per rank: %.1f %% of GEMM (%.1f "
           "GFLOP/s on %d worker%s)\n",
           rate, e->model->item, flops * 1e-9,
           iz_units_percent(flops, m->gemm_rate), m->gemm_rate * 1e-9,
           e->plan.tasks_at_once, e->plan.tasks_at_once > 1 ? "s" : "");
    if (e->counts.fetched_bytes)
        printf("  parameters fetched %.1f MiB\n",
               iz_units_mib(e->counts.fetched_bytes));
    iz_summary_print_time(&t, stdout);
    iz_summary_print_memory(&t, stdout);
    printf("  largest resident set %.1f MiB\n",
           iz_units_mib(iz_memory_peak_resident()));
    if (m->lost_spans)
        printf("  (%lld task times were lost: shares are approximate)\n",
               (long long)m->lost_spans);
    fflush(stdout);
    summary_json(m, reason, rate, flops);
    iz_summary_json(&t, m->json);
    submission_json(m);
    flush(m);
}
