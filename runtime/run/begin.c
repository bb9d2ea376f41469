/* SPDX-License-Identifier: Apache-2.0 */
/* What a run does before its first step, but for its plan: config, model,
 * output, engine. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/mix.h"
#include "runtime/base/durable.h"
#include "runtime/base/hash.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/engine_arrays.h"
#include "runtime/formats/imported.h"
#include "runtime/hf/adapter.h"
#include "runtime/hf/hf.h"
#include "runtime/model/prepare.h"
#include "runtime/report/box.h"
#include "runtime/run/identity.h"
#include "runtime/step/train.h"

/* Ranks that find the same faults, as in one file, tell them once. */
static void tell_faults(const struct run *r, const char *text)
{
    int64_t mine = text ? (int64_t)iz_hash(text, (int64_t)strlen(text)) : 0;
    int64_t *all = iz_agree_numbers(r->coll, &mine, 1, "the config");
    int q = 0;
    while (all[q] != mine)
        q++;
    free(all);
    if (q == r->coll->rank && text)
        fputs(text, stderr);
}

static int read_config(struct run *r)
{
    struct iz_text faults;
    FILE *err = iz_text_open(&faults);
    bool tells = iz_run_first(r) && !r->o.replay;
    int s =
        iz_config_read(&r->c, &r->p->section, r->o.path, r->o.set, r->o.n_set,
                       iz_run_ranks(r), tells ? stdout : NULL, err);
    char *text = iz_text_close(&faults);
    if (!iz_coll_all_ok(r->coll, s == 0))
        tell_faults(r, text);
    free(text);
    s = iz_run_agree(r, s, "the config");
    if (s)
        return s;
    if (r->o.replay)
        iz_replay_settings(&r->c.run);
    text = iz_identity_text(r);
    s = iz_identity_agree(r, text);
    free(text);
    return s;
}

/* All ranks have the same run, and it is the one that is resumed.  Nothing is
 * written before that. */
static int identify(struct run *r)
{
    r->facts = iz_identity_facts(r);
    int s = iz_run_agree(r, r->facts ? 0 : -EIO, NULL);
    if (s)
        return s;
    r->identity = iz_identity_text(r);
    s = iz_identity_agree(r, r->identity);
    if (!s && r->from.identity)
        s = iz_identity_compare(r, r->identity, &r->changes);
    else if (!s && iz_run_loads(r) && iz_run_first(r))
        printf("resume: the checkpoint of step %lld does not tell of what run "
               "it is: only its model is compared, and what the config leaves "
               "open is chosen anew; %s/config.json has the choices\n",
               (long long)r->from.step, r->c.run.output);
    return iz_run_agree(r, s, "the run's identity");
}

/* A run that would write over another one's checkpoints is refused.  newest:
 * the step of that there, or -1. */
static int check_newest(const struct run *r, int64_t *newest)
{
    const char *output = r->c.run.output;
    int64_t step = *newest = iz_ckpt_dir_newest(output, INT64_MAX);
    if (!r->o.resume && step >= 0)
        return iz_text_refuse(stderr,
                              "run.output: %s holds a checkpoint of step %lld: "
                              "continue it with --resume, or choose another "
                              "directory",
                              output, (long long)step);
    if (r->o.resume && step != r->from.step)
        return iz_text_refuse(stderr,
                              "--resume: another run has just saved step %lld "
                              "in %s: start again",
                              (long long)step, output);
    return 0;
}

static int claim_output(struct run *r)
{
    const char *output = r->c.run.output;
    int64_t step;
    int s = check_newest(r, &step);
    /* After the last step the export may be there already. */
    if (!s && (step < r->c.run.steps || !iz_hf_export_there(r->c.run.export)))
        s = iz_hf_export_check(&r->c, &r->p->section, r->model);
    if (!s)
        s = iz_durable_make_directories("run.output", output);
    if (s)
        return s;
    r->claim = iz_metrics_claim(output);
    if (r->claim < 0)
        return r->claim;
    return check_newest(r, &step); /* it may have waited for another's end */
}

/* Whether each rank sees, in the output, a file that the first one has made.
 */
static int check_shared(struct run *r)
{
    char path[IZ_PATH_MAX + 64];
    bool seen = false;
    snprintf(path, sizeof(path), "%s/shared-%s", r->c.run.output, r->id);
    if (iz_run_first(r)) /* it may be left of a start that was killed */
        unlink(path);
    int s = iz_run_first(r) ? iz_durable_create("run.output", path, "") : 0;
    s = iz_run_agree(r, s, NULL);
    if (s)
        return s;
    for (int i = 0; i < 20 && !seen; i++) { /* a network's file may be late */
        seen = access(path, F_OK) == 0;
        if (!seen)
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    int q = iz_coll_refuser(r->coll, !seen);
    if (iz_run_first(r))
        unlink(path);
    return q < 0 ? 0
                 : iz_text_refuse(iz_run_err(r),
                                  "run.output: rank %d does not see in %s what "
                                  "rank 0 has written there: all ranks need "
                                  "the same folder",
                                  q, r->c.run.output);
}

static int open_output(struct run *r)
{
    if (r->o.replay)
        return 0;
    int s =
        iz_run_agree(r, iz_run_first(r) ? claim_output(r) : 0, "the output");
    uint64_t id = (uint64_t)iz_clock_ns() ^ (uint64_t)getpid() << 40;
    if (s)
        return s;
    snprintf(r->id, sizeof(r->id), "%016" PRIx64,
             iz_mix((uint64_t)time(NULL) + iz_mix(id)));
    if (*r->from.id)
        memcpy(r->id, r->from.id, sizeof(r->id));
    iz_coll_broadcast(r->coll, r->id, sizeof(r->id), 0, "the run's id");
    return r->coll->size > 1 ? check_shared(r) : 0;
}

/* What stays beside the output of a run that begins: its effective config, and
 * what it has imported. */
static int write_config(const struct run *r)
{
    char path[IZ_PATH_MAX + 32];
    int s = iz_imported_keep(r->c.run.output, r->c.import, r->o.resume);
    snprintf(path, sizeof(path), "%s/config.json", r->c.run.output);
    return s ? s : iz_config_write(&r->c, &r->p->section, path);
}

static bool has_references(const struct iz_model *m)
{
    bool any = false;
    for (int u = 0; u < m->n_units; u++)
        any |= m->unit[u].n_references > 0;
    return any;
}

/* Each matrix b with another alpha is told by its name; its rank is its shape.
 */
static void put_adapters(FILE *f, const struct run *r)
{
    const struct iz_lora_config *l = &r->c.lora;
    const char *before = ", \"lora_alphas\": {";
    if (!l->rank)
        return;
    fprintf(f, ", \"lora_rank\": %d, \"lora_alpha\": %.17g", l->rank, l->alpha);
    if (l->use_rslora)
        fputs(", \"lora_rslora\": true", f);
    if (l->use_dora)
        fputs(", \"lora_dora\": true", f);
    for (int u = 0; u < r->model->n_units; u++)
        for (int i = 0; i < r->model->unit[u].n_params; i++) {
            const struct iz_param *b = &r->model->unit[u].param[i];
            if (b->alpha == 0 || b->alpha == l->alpha)
                continue;
            fprintf(f, "%s\"%s\": %.17g", before, b->name, b->alpha);
            before = ", ";
        }
    if (before[2] == '\0')
        fputc('}', f);
}

/* The model section as text: what a checkpoint must agree with. */
static char *model_text(const struct run *r)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    fprintf(f, "{\"name\": \"%s\"", r->model->name);
    for (const struct iz_key *k = r->p->section.keys; k->name; k++) {
        fprintf(f, ", \"%s\": ", k->name);
        iz_key_print(f, k, r->p->section.target);
    }
    put_adapters(f, r);
    if (has_references(r->model))
        fputs(", \"reference\": true", f);
    if (r->c.base_dtype)
        fprintf(f, ", \"base_dtype\": \"%s\"", iz_quant_name(r->c.base_dtype));
    fputc('}', f);
    return iz_text_close(&text);
}

/* What its keys are in a checkpoint of before they were there. */
static char *model_before(const struct run *r)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    for (const struct iz_key *k = r->p->section.keys; k->name; k++)
        fprintf(f, "%s\"%s\": %s", k == r->p->section.keys ? "{" : ", ",
                k->name, k->fallback ? k->fallback : "null");
    fputc('}', f);
    return iz_text_close(&text);
}

static int open_data(struct run *r, FILE *err)
{
    const struct iz_model *m = r->model;
    const struct iz_data_config *c = &r->c.data;
    bool val = r->c.run.eval_batches > 0;
    return m->record.bytes
               ? iz_data_open_records(&r->data, c, m, r->c.run.seed, val, err)
               : iz_data_open(&r->data, c, m->tokens, m->vocab, r->c.run.seed,
                              val, err);
}

/* What the engine's tasks will want of one of the GPU's libraries, and why it
 * cannot be had. */
struct library_wish {
    struct run *r;
    bool forward, backward; /* attention by cuDNN */
    struct iz_refusal refusal;
};

/* A generated text's last token comes from one sample, and the last task of a
 * validation has what is left. */
static void ask_library(void *arg, int i, struct iz_exec *x)
{
    struct library_wish *w = arg;
    const struct iz_engine *e = w->r->e;
    const struct iz_run_config *run = &e->config->run;
    int samples[] = {e->plan.samples, run->sample_tokens > 0, 0};
    struct iz_exec like = *x;
    if (run->eval_batches)
        samples[2] = (int)(iz_train_eval_samples(e) % samples[0]);
    like.numerics.cudnn = w->forward;
    like.numerics.cudnn_bwd = w->backward;
    for (int u = 0; u < e->model->n_units; u++)
        for (int k = 0; k < (w->forward ? 3 : 1); k++)
            if (samples[k])
                iz_unit_ask(e->model, u, samples[k], e->plan.param_type, &like,
                            &w->refusal);
}

static void take_attention(void *arg, int i, struct iz_exec *x)
{
    const struct iz_target *t = arg;
    x->numerics = t->numerics;
}

/* Has cuDNN make its plans for the forward or the backward, if it is to.  Where
 * it cannot on some rank, and the config left the choice open, all take ours:
 * the plan has room for either. */
static int prepare_attention(struct run *r, bool back)
{
    struct iz_target *t = &r->e->plan.target;
    struct library_wish w = {.r = r, .forward = !back, .backward = back};
    bool *cudnn = back ? &t->numerics.cudnn_bwd : &t->numerics.cudnn;
    if (!*cudnn)
        return 0;
    iz_graph_on_device(r->e->graph, ask_library, &w);
    int s = iz_arithmetic_no_cudnn(&r->arithmetic, &r->c, r->coll, back,
                                   w.refusal.why[0] ? w.refusal.why : NULL);
    t->why_own[back] = r->arithmetic.attention_why[back].why;
    if (s || !*t->why_own[back])
        return s;
    *cudnn = false;
    iz_graph_on_device(r->e->graph, take_attention, t);
    return 0;
}

static int open_engine(struct run *r)
{
    struct iz_train_config t = {.config = &r->c,
                                .model = r->model,
                                .coll = r->coll,
                                .data = r->data,
                                .stop = r->stop,
                                .cores = r->cores,
                                .device = r->gpu.device};
    int64_t begin = iz_clock_ns();
    iz_cores_prepare(r->cores);
    int s =
        iz_run_agree(r, iz_train_open(&r->e, &t, &r->plan), "what was planned");
    if (!s)
        s = iz_run_agree(r, iz_coll_gpu_connect(r->coll), "the connections");
    if (!s)
        s = prepare_attention(r, false);
    if (!s)
        s = prepare_attention(r, true);
    if (s)
        return s;
    int64_t opened = iz_clock_ns();
    r->open_s = (double)(opened - begin) * 1e-9;
    bool load = iz_run_loads(r);
    if (load)
        s = iz_arrays_load(r->e, &r->of, r->from.step);
    else if (r->c.import[0])
        s = iz_hf_import(r->e, &r->p->section);
    else
        s = iz_train_init(r->e);
    if (!s && !load && r->model->adapter_dora)
        s = iz_adapter_init_magnitudes(r->e);
    if (!s && !load && r->c.lora.import[0])
        s = iz_adapter_import(r->e, r->p->section.hf);
    if (!s && !load)
        s = iz_train_init_references(r->e);
    r->init_s = (double)(iz_clock_ns() - opened) * 1e-9;
    return s;
}

static int check_sample(const struct run *r)
{
    const struct iz_run_config *c = &r->c.run;
    if (c->sample_tokens <= 0)
        return 0;
    if (!c->sample_prompt[0])
        return iz_text_refuse(iz_run_err(r),
                              "run.sample_tokens: %d, but there is "
                              "no run.sample_prompt to continue",
                              c->sample_tokens);
    if (!r->model->unit[r->model->n_units - 1].generate)
        return iz_text_refuse(
            iz_run_err(r),
            "run.sample_tokens: %s generates nothing: set it to 0",
            r->model->name);
    for (const char *p = c->sample_prompt; *p; p++)
        if ((unsigned char)*p >= r->model->vocab)
            return iz_text_refuse(iz_run_err(r),
                                  "run.sample_prompt: '%c' is not below the "
                                  "vocabulary of %d",
                                  *p, r->model->vocab);
    return 0;
}

static int choose_host_comm(struct run *r)
{
    enum iz_host_comm wish = r->c.run.host_comm;
    const char *why = iz_coll_read_local(r->coll, wish != IZ_HOST_MESSAGES);
    if (wish == IZ_HOST_AUTO)
        r->why_messages = why;
    if (wish != IZ_HOST_MEMORY || !why)
        return 0;
    iz_text_refuse(iz_run_err(r),
                   "run.host_comm: memory: %s: set auto or messages", why);
    return -ENOTSUP;
}

int iz_run_prepare_model(struct run *r)
{
    int s = read_config(r);
    if (!s && r->o.resume && !r->o.machine)
        s = iz_run_find_checkpoint(r);
    if (!s)
        s = iz_run_agree(r, iz_data_look(&r->c.data, iz_run_err(r)), NULL);
    if (!s)
        s = iz_run_agree(r, choose_host_comm(r), NULL);
    if (!s)
        s = iz_run_agree(r, r->p->open(&r->model, r->p->section.target),
                         "the model");
    if (!s)
        s = iz_run_agree(
            r,
            iz_model_prepare(r->model, &r->c, r->p->section.hf, iz_run_err(r)),
            "the parameters");
    if (!s && r->c.lora.import[0] && !iz_run_loads(r))
        s = iz_run_agree(
            r,
            iz_adapter_check(&r->c, r->p->section.hf, r->model, iz_run_err(r)),
            "the adapters");
    return s ? s : iz_run_agree(r, check_sample(r), NULL);
}

/* Two choices were made since it was compared; the first rank writes it. */
static int settle(struct run *r)
{
    free(r->identity);
    r->of.identity = r->identity = iz_identity_text(r);
    int s = iz_run_first(r) && !r->o.replay ? write_config(r) : 0;
    return iz_run_agree(r, s, "the config");
}

static int open_metrics(struct run *r)
{
    int s = iz_metrics_open(&r->metrics, r->e, r->gemm.rate,
                            !iz_run_first(r) || r->o.replay);
    s = iz_run_agree(r, s, NULL);
    if (s)
        return s;
    if (!r->o.replay)
        iz_chain_open(r);
    iz_metrics_line(r->metrics,
                    "{\"start\": {\"program\": \"%s\", \"open_s\": %.3f, "
                    "\"weights_s\": %.3f}}",
                    r->p->name, r->open_s, r->init_s);
    if (r->changes)
        iz_metrics_line(r->metrics,
                        "{\"resumed\": {\"from\": %lld, \"changed\": {%s}}}",
                        (long long)r->from.step, r->changes);
    if (r->o.replay)
        return iz_replay_open(r);
    iz_box_open(r->e);
    return 0;
}

int iz_run_start(struct run *r)
{
    int s = open_data(r, iz_run_err(r));
    int q = iz_coll_refuser(r->coll, s != 0);
    if (q > 0 && q == r->coll->rank) /* of several one tells it */
        s = open_data(r, stderr);
    s = iz_run_agree(r, s, "the data");
    if (!s)
        s = identify(r);
    if (!s)
        s = open_output(r);
    if (s)
        return s;
    r->model_text = model_text(r);
    r->model_before = model_before(r);
    r->of =
        (struct iz_ckpt_of){r->model_text, r->identity, r->id, r->model_before};
    s = open_engine(r);
    if (!s)
        s = settle(r);
    if (s)
        return s;
    if (!r->o.replay) {
        iz_run_measure(r);
        iz_run_print_header(r);
    }
    if (r->e->plan.staging[IZ_STAGING_CKPT].n)
        s = iz_ckpt_save_open(&r->saver, r->e, &r->of);
    return s ? s : open_metrics(r);
}
