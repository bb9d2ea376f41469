/* SPDX-License-Identifier: Apache-2.0 */
/* What a run does after its last step. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/state_hash.h"
#include "runtime/formats/imported.h"
#include "runtime/hf/hf.h"
#include "runtime/plan/forecast.h"
#include "runtime/run/state.h"
#include "runtime/step/train.h"

static void print_text(const int32_t *t, int n)
{
    for (int i = 0; i < n; i++) {
        bool plain = t[i] == '\n' || (t[i] >= 32 && t[i] < 127);
        putchar(plain ? (int)t[i] : '?');
    }
}

static int print_sample(struct run *r)
{
    const struct iz_run_config *c = &r->c.run;
    int prompt_n = (int)strlen(c->sample_prompt), n = c->sample_tokens;
    if (!n)
        return 0;
    int32_t *text = iz_take((prompt_n + n) * 2, sizeof(*text), "the sample");
    int32_t *prompt = text + prompt_n + n;
    for (int i = 0; i < prompt_n; i++)
        prompt[i] = (unsigned char)c->sample_prompt[i];
    int made =
        iz_train_sample(r->e, prompt, prompt_n, text, n, c->sample_temperature);
    if (made >= 0 && iz_run_first(r)) {
        printf("\nsample (temperature %g):\n", c->sample_temperature);
        print_text(text, prompt_n + made);
        printf("\n");
    }
    free(text);
    return made < 0 ? made : 0;
}

static void print_hash(struct run *r)
{
    unsigned long long sum = iz_state_hash_weights(r->e, &r->of);
    if (!iz_run_first(r))
        return;
    printf("weights hash %016llx\n", sum);
    iz_metrics_line(r->metrics, "{\"weights_hash\": \"%016llx\"}", sum);
}

static void report_failure(struct run *r)
{
    int64_t step = iz_ckpt_dir_newest(r->c.run.output, INT64_MAX);
    if (!iz_run_first(r))
        return;
    if (r->progress.failure == IZ_SCALE_AT_MINIMUM)
        fprintf(stderr,
                "izar: gradients overflow at the smallest loss scale "
                "(fp16.min_loss_scale %g): training diverges\n",
                r->c.fp16.min_loss_scale);
    else
        fprintf(stderr,
                "izar: the loss or its gradient is not finite after "
                "step %lld: nothing was saved since\n",
                (long long)r->progress.taken);
    if (step >= 0)
        fprintf(stderr,
                "izar: the checkpoint of step %lld is intact: continue from "
                "it with --resume, with a smaller learning rate or clipping\n",
                (long long)step);
}

static const char *ending(const struct run *r, int status)
{
    if (status == -EPROTO || status == -EBADMSG)
        return "failed";
    if (status)
        return "not saved";
    return r->progress.stopped ? "interrupted" : "finished";
}

static int export_weights(struct run *r)
{
    if (!r->c.run.export[0])
        return 0;
    /* It was exported, but the run ended before it could say so. */
    bool there = iz_run_first(r) && r->progress.begun >= r->c.run.steps &&
                 iz_hf_export_there(r->c.run.export);
    if (there)
        printf("run.export: %s is there already, and stays as it is\n",
               r->c.run.export);
    if (!iz_coll_all_ok(r->coll, !there))
        return 0;
    iz_metrics_pause(r->metrics);
    int s = iz_hf_export(r->e, &r->p->section);
    if (s || !iz_run_first(r))
        return s;
    printf("exported step %lld to %s\n", (long long)r->e->step,
           r->c.run.export);
    if (r->c.lora.export == IZ_LORA_MERGED)
        iz_imported_tell(r->c.run.export);
    return 0;
}

/* Of what came after the last step's `clip` too. */
static int check_order(struct run *r)
{
    iz_graph_wait(r->e->graph);
    return iz_coll_check_order(r->coll);
}

int iz_run_finish(struct run *r, int s)
{
    r->coll->phase = "the end of the run";
    if (r->progress.failure) {
        report_failure(r);
        iz_metrics_summary(r->metrics, "failed");
        return -ERANGE;
    }
    if (!s)
        s = check_order(r);
    if (!s && r->c.run.save && r->e->step > r->progress.begun &&
        r->e->step > r->progress.saved)
        s = iz_run_save_now(r);
    if (!s && !r->progress.stopped)
        s = print_sample(r);
    if (r->c.run.hash)
        print_hash(r);
    /* Last: a proven export leaves its own weights in the engine. */
    if (!s && !r->progress.stopped)
        s = export_weights(r);
    if (!s)
        s = check_order(r);
    iz_metrics_summary(r->metrics, ending(r, s));
    if (iz_run_first(r))
        iz_forecast_print(&r->e->plan, r->rate, stdout);
    if (!r->progress.stopped || s)
        return s;
    if (iz_run_first(r) && r->c.run.save)
        printf("interrupted: continue with the same command and --resume\n");
    return r->c.run.save ? 0 : -EINTR;
}
