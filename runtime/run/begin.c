/* SPDX-License-Identifier: Apache-2.0 */
/* What a run does before its first step, but for its plan: config, model,
 * output, engine. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/ops/gpu_ops.h"
#include "runtime/base/durable.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/engine_parts.h"
#include "runtime/formats/imported.h"
#include "runtime/hf/adapter.h"
#include "runtime/hf/hf.h"
#include "runtime/model/prepare.h"
#include "runtime/run/state.h"
#include "runtime/step/train.h"

/* Only one rank speaks about what is the same for all. */
static int read_config(struct run *r)
{
    bool tells = iz_run_first(r) && !r->o.replay;
    int s =
        iz_config_read(&r->c, &r->p->section, r->o.path, r->o.set, r->o.n_set,
                       iz_run_ranks(r), tells ? stdout : NULL, iz_run_err(r));
    if (!s && r->o.replay)
        iz_replay_settings(&r->c.run);
    return s;
}

/* The first rank reads what a resumed run began with, for all.  It is lost
 * where there are checkpoints and nothing tells. */
static int keep_choices(struct run *r)
{
    char path[IZ_PATH_MAX + 32];
    int64_t bytes = 0;
    snprintf(path, sizeof(path), "%s/config.json", r->c.run.output);
    char *text = iz_run_first(r) ? iz_durable_read(path, &bytes) : NULL;
    bytes = text ? bytes : 0;
    iz_coll_broadcast(r->coll, &bytes, sizeof(bytes), 0, "the choices");
    if (!text)
        text = malloc((size_t)bytes + 1);
    int s = iz_run_agree(r, text ? 0 : -ENOMEM, "the choices");
    if (!s) {
        iz_coll_broadcast(r->coll, text, bytes, 0, "the choices");
        if (iz_config_lists_algorithms(text, bytes))
            s = iz_text_refuse(iz_run_err(r),
                               "%s: run.gpu_products: timed was removed; "
                               "without the key the run has other bits",
                               path);
        bool aux = iz_config_keep(&r->c, text, bytes, iz_run_ranks(r));
        snprintf(path, sizeof(path), "%s/checkpoints", r->c.run.output);
        r->lost = !aux && access(path, F_OK) == 0;
        iz_coll_broadcast(r->coll, &r->lost, sizeof(r->lost), 0, "the choices");
    }
    free(text);
    return s;
}

static int write_config(const struct run *r)
{
    char path[IZ_PATH_MAX + 32];
    if (r->o.replay)
        return 0;
    snprintf(path, sizeof(path), "%s/config.json", r->c.run.output);
    return iz_config_write(&r->c, &r->p->section, path);
}

/* The effective config beside the output; a run that would write over another
 * one's checkpoints is refused. */
static int open_output(struct run *r)
{
    /* A folder that some ranks do not see is told of when it is read. */
    if (r->o.resume &&
        iz_coll_all_ok(r->coll, access(r->c.run.output, F_OK) != 0))
        return iz_text_refuse(iz_run_err(r),
                              "--resume: no checkpoint in %s: there is no such "
                              "folder",
                              r->c.run.output);
    if (!iz_run_first(r) || r->o.replay)
        return 0;
    int s = iz_durable_make_directories("run.output", r->c.run.output);
    if (s)
        return s;
    r->claim = iz_metrics_claim(r->c.run.output);
    if (r->claim < 0)
        return r->claim;
    int64_t step = iz_ckpt_dir_newest(r->c.run.output, INT64_MAX);
    if (!r->o.resume && step >= 0) {
        fprintf(stderr,
                "izar: run.output: %s holds a checkpoint of step %lld: "
                "continue it with --resume, or choose another directory\n",
                r->c.run.output, (long long)step);
        return -EEXIST;
    }
    /* After the last step the export may be there already. */
    if (step < r->c.run.steps)
        s = iz_hf_export_check(&r->c, &r->p->section, r->model);
    if (!s)
        s = iz_imported_keep(r->c.run.output, r->c.import, r->o.resume);
    if (s)
        return s;
    return write_config(r);
}

static bool has_copies(const struct iz_model *m)
{
    bool any = false;
    for (int u = 0; u < m->n_units; u++)
        any |= m->unit[u].n_copies > 0;
    return any;
}

/* The model section as text: what a checkpoint must agree with. */
static char *model_text(const struct run *r)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    if (!f)
        return NULL;
    fprintf(f, "{\"name\": \"%s\"", r->model->name);
    for (const struct iz_key *k = r->p->section.keys; k->name; k++) {
        fprintf(f, ", \"%s\": ", k->name);
        iz_key_print(f, k, r->p->section.target);
    }
    if (r->c.lora.rank)
        fprintf(f, ", \"lora_rank\": %d, \"lora_alpha\": %.17g", r->c.lora.rank,
                r->c.lora.alpha);
    if (has_copies(r->model))
        fputs(", \"reference\": true", f);
    if (r->c.base_dtype)
        fprintf(f, ", \"base_dtype\": \"%s\"", iz_quant_name(r->c.base_dtype));
    fputc('}', f);
    return iz_text_close(&text);
}

static int open_data(struct run *r)
{
    const struct iz_model *m = r->model;
    const struct iz_data_config *c = &r->c.data;
    bool val = r->c.run.eval_batches > 0;
    return m->record.bytes
               ? iz_data_open_records(&r->data, c, m, r->c.run.seed, val)
               : iz_data_open(&r->data, c, m->tokens, m->vocab, r->c.run.seed,
                              val);
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
    return iz_run_agree(r, iz_run_first(r) ? write_config(r) : 0, "the config");
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
    /* A replay of a run's first steps may have no checkpoint before them. */
    int64_t limit = r->o.replay ? r->o.from + 1 : INT64_MAX;
    bool load = r->o.resume;
    if (r->o.replay)
        load = !iz_coll_all_ok(r->coll,
                               iz_ckpt_dir_newest(r->c.run.output, limit) < 0);
    if (load)
        s = iz_parts_load(r->e, r->model_text, limit);
    else if (r->c.import[0])
        s = iz_hf_import(r->e, &r->p->section);
    else
        s = iz_train_init(r->e);
    if (!s && !load && r->c.lora.import[0])
        s = iz_adapter_import(r->e, r->p->section.hf);
    if (!s && !load)
        s = iz_train_init_copies(r->e);
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
    const char *why = iz_coll_near(r->coll, wish != IZ_HOST_MESSAGES);
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
    int s = iz_run_agree(r, read_config(r), "the config");
    if (!s && r->o.resume && !r->o.machine)
        s = keep_choices(r);
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
    if (!s && r->c.lora.import[0] && !r->o.resume)
        s = iz_run_agree(
            r,
            iz_adapter_check(&r->c, r->p->section.hf, r->model, iz_run_err(r)),
            "the adapters");
    return s ? s : iz_run_agree(r, check_sample(r), NULL);
}

int iz_run_start(struct run *r)
{
    int s = iz_run_agree(r, open_data(r), "the data");
    if (!s)
        s = iz_run_agree(r, open_output(r), "the output");
    if (s)
        return s;
    r->model_text = model_text(r);
    s = iz_run_agree(r, r->model_text ? 0 : -ENOMEM, "the model's text");
    if (s)
        return s;
    s = open_engine(r);
    if (s)
        return s;
    if (!r->o.replay) {
        iz_run_measure(r);
        iz_run_print_header(r);
    }
    if (r->e->plan.staging[IZ_STAGING_SAVE].n)
        s = iz_save_open(&r->saver, r->e, r->model_text);
    if (s)
        return s;
    s = iz_metrics_open(&r->metrics, r->e, r->gemm.rate,
                        !iz_run_first(r) || r->o.replay);
    if (!s)
        s = iz_chain_open(r);
    if (!s)
        iz_metrics_line(r->metrics,
                        "{\"start\": {\"program\": \"%s\", \"open_s\": %.3f, "
                        "\"weights_s\": "
                        "%.3f}}",
                        r->p->name, r->open_s, r->init_s);
    s = iz_run_agree(r, s, "the metrics");
    return s || !r->o.replay ? s : iz_replay_open(r);
}
