/* SPDX-License-Identifier: Apache-2.0 */
/* Generation of text, token by token, through the same units and rings as
 * training.  Every rank computes the same text: nothing has to be sent. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "runtime/step/submit.h"
#include "runtime/step/train.h"
#include "runtime/step/units.h"

struct pick_arg {
    int32_t *text; /* whole text; this call writes text[at] */
    int at, seq;   /* tokens so far; length of the window */
    int vocab;
    double temperature;
    uint64_t seed;
};

/* In [0, 1), a function of seed and position alone. */
static double uniform(uint64_t seed, uint64_t i)
{
    return (double)(iz_mix(seed + (i + 1) * IZ_GOLDEN) >> 11) * 0x1p-53;
}

static int32_t generate_choose(const struct pick_arg *a, const float *logits)
{
    float max = logits[0];
    int best = 0;
    for (int i = 1; i < a->vocab; i++)
        if (logits[i] > max) {
            max = logits[i];
            best = i;
        }
    if (a->temperature <= 0)
        return best;
    double sum = 0;
    for (int i = 0; i < a->vocab; i++)
        sum += exp((logits[i] - max) / a->temperature);
    double left = uniform(a->seed, (uint64_t)a->at) * sum;
    for (int i = 0; i < a->vocab; i++) {
        left -= exp((logits[i] - max) / a->temperature);
        if (left < 0)
            return i;
    }
    return best;
}

/* Puts the last `seq` tokens of the text into the window. */
static void fill_window(int32_t *window, const int32_t *text, int n, int seq)
{
    int from = n > seq ? n - seq : 0;
    memset(window, 0, (size_t)seq * 4);
    memcpy(window, text + from, (size_t)(n - from) * 4);
}

static void run_pick(struct iz_exec *x, void **buf, const void *arg)
{
    const struct pick_arg *a = arg;
    a->text[a->at] = generate_choose(a, buf[0]);
    fill_window(buf[1], a->text, a->at + 1, a->seq);
}

static void submit_token(struct iz_engine *e, const struct pick_arg *a)
{
    struct iz_call c = {.kind = IZ_SAMPLE,
                        .call = IZ_CALL_GENERATE,
                        .samples = 1,
                        .row = (a->at < a->seq ? a->at : a->seq) - 1};
    iz_units_pass(e, c, 1);
    struct iz_task t = iz_task_of(e, IZ_SAMPLE, IZ_ON_HOST, run_pick, -1);
    iz_task_add(&t, e->scalar.logits_handle, STARPU_R);
    iz_task_add(&t, e->track[0].batch_handle, STARPU_RW);
    iz_step_submit(e, &t, a, sizeof(*a));
}

int iz_train_sample(struct iz_engine *e, const int32_t *prompt, int n_prompt,
                    int32_t *out, int n, double temperature)
{
    if (!e->model->unit[e->model->n_units - 1].generate || n_prompt < 1)
        return -EINVAL;
    iz_graph_wait(e->graph);
    memcpy(out, prompt, (size_t)n_prompt * 4);
    struct pick_arg a = {.text = out,
                         .seq = e->model->tokens,
                         .vocab = e->model->vocab,
                         .temperature = temperature,
                         .seed = e->config->run.seed};
    /* A text is one document. */
    memset(e->track[0].batch, 0, (size_t)iz_model_sample_bytes(e->model));
    fill_window(e->track[0].batch, out, n_prompt, a.seq);
    for (a.at = n_prompt; a.at < n_prompt + n; a.at++) {
        if ((a.at - n_prompt) % 64 == 0 && !iz_units_go_on(e))
            break;
        submit_token(e, &a);
    }
    iz_graph_wait(e->graph);
    return a.at - n_prompt;
}
