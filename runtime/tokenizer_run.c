/* SPDX-License-Identifier: Apache-2.0 */
/* Threads take batches of documents in turn, encode them, and write them when
 * all batches before are written; see tokenizer_run.h. */
#include "runtime/tokenizer_run.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/data_write.h"

#define BATCH_BYTES (1 << 20)
#define BATCH_DOCUMENTS 4096
#define PROGRESS_NS 200000000

struct run {
    const struct iz_tokenize_job *job;
    struct iz_recipe recipe;
    struct iz_corpus *corpus;
    struct iz_shards *shards[2]; /* training, validation */
    pthread_mutex_t lock;        /* of all that follows, and of corpus */
    pthread_cond_t turn, ended;
    int64_t taken, written; /* batches */
    int running;
    int err; /* the first; everybody stops */
    struct iz_tokenize_counts counts;
};

/* Documents of one turn, and their tokens: those of document i end at end[i].
 */
struct batch {
    struct iz_document document[BATCH_DOCUMENTS];
    int64_t end[BATCH_DOCUMENTS];
    int documents, skipped;
    int64_t number, input_end;
    struct iz_lesson out;
};

/* ---- one thread ---- */

/* With the lock.  False: nothing is left. */
static bool batch_take(struct run *r, struct batch *b)
{
    int64_t bytes = 0;

    b->documents = b->skipped = 0;
    b->out.ids.count = b->out.marked = 0;
    while (b->documents < BATCH_DOCUMENTS && bytes < BATCH_BYTES &&
           iz_corpus_next(r->corpus, &b->document[b->documents]))
        bytes += b->document[b->documents++].bytes;
    b->input_end = iz_corpus_done(r->corpus);
    if (b->documents == 0)
        return false;
    b->number = r->taken++;
    return true;
}

static int batch_encode(const struct run *r, struct batch *b,
                        struct iz_encoder *e)
{
    for (int i = 0; i < b->documents; i++) {
        int err = iz_record_encode(&r->recipe, e, &b->document[i], &b->out);

        if (err == -EBADMSG && r->job->skip_bad)
            b->skipped++;
        else if (err)
            return err;
        b->end[i] = b->out.ids.count;
    }
    return 0;
}

static int batch_write(struct run *r, const struct batch *b)
{
    for (int i = 0; i < b->documents; i++) {
        int64_t at = i > 0 ? b->end[i - 1] : 0;
        const uint8_t *learn = r->recipe.masked ? b->out.learn + at : NULL;
        int err = iz_shards_put(r->shards[b->document[i].val],
                                b->out.ids.id + at, learn, b->end[i] - at);

        if (err)
            return err;
    }
    return 0;
}

static void batch_count(struct run *r, const struct batch *b)
{
    struct iz_tokenize_counts *c = &r->counts;

    for (int i = 0; i < b->documents; i++)
        c->tokens[b->document[i].val] +=
            b->end[i] - (i > 0 ? b->end[i - 1] : 0);
    for (int64_t i = 0; i < b->out.ids.count; i++)
        c->learnt += b->out.learn[i];
    c->documents += b->documents - b->skipped;
    c->skipped += b->skipped;
    c->bytes = b->input_end;
}

/* Waits for the turn of a batch; only its thread writes then. */
static int batch_finish(struct run *r, const struct batch *b, int err)
{
    pthread_mutex_lock(&r->lock);
    while (!r->err && r->written != b->number)
        pthread_cond_wait(&r->turn, &r->lock);
    if (r->err)
        err = r->err;
    pthread_mutex_unlock(&r->lock);
    if (!err)
        err = batch_write(r, b);
    pthread_mutex_lock(&r->lock);
    if (!err)
        batch_count(r, b);
    if (err && !r->err)
        r->err = err;
    r->written++;
    pthread_cond_broadcast(&r->turn);
    pthread_mutex_unlock(&r->lock);
    return err;
}

static int work(struct run *r, struct batch *b, struct iz_encoder *e)
{
    for (;;) {
        bool more;
        int err;

        pthread_mutex_lock(&r->lock);
        more = !r->err && batch_take(r, b);
        pthread_mutex_unlock(&r->lock);
        if (!more)
            return 0;
        err = batch_finish(r, b, batch_encode(r, b, e));
        if (err)
            return err;
    }
}

static void *thread(void *arg)
{
    struct run *r = arg;
    struct batch *b = calloc(1, sizeof *b);
    struct iz_encoder *e = NULL;
    int err = -ENOMEM;

    if (b && iz_encoder_open(&e, r->recipe.tokenizer) == 0)
        err = work(r, b, e);
    iz_encoder_close(&e);
    if (b)
        iz_lesson_free(&b->out);
    free(b);
    pthread_mutex_lock(&r->lock);
    if (err && !r->err)
        r->err = err;
    r->running--;
    pthread_cond_broadcast(&r->turn);
    pthread_cond_signal(&r->ended);
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- all threads ---- */

/* Until no thread runs. */
static void watch(struct run *r, iz_tokenize_progress *progress, void *arg)
{
    struct iz_tokenize_counts c;
    struct timespec until;
    bool runs;

    do {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += PROGRESS_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_mutex_lock(&r->lock);
        if (r->running > 0)
            pthread_cond_timedwait(&r->ended, &r->lock, &until);
        c = r->counts;
        runs = r->running > 0;
        pthread_mutex_unlock(&r->lock);
        progress(arg, &c);
    } while (runs);
}

static int run_threads(struct run *r, iz_tokenize_progress *progress, void *arg)
{
    int n = r->job->threads, started = 0, err = 0;
    pthread_t *t = calloc((size_t)n, sizeof *t);

    if (!t)
        return -ENOMEM;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->turn, NULL);
    pthread_cond_init(&r->ended, NULL);
    pthread_mutex_lock(&r->lock);
    while (started < n && !err) {
        err = pthread_create(&t[started], NULL, thread, r);
        started += !err;
    }
    r->running = started;
    r->err = -err;
    pthread_mutex_unlock(&r->lock);
    watch(r, progress, arg);
    for (int i = 0; i < started; i++)
        pthread_join(t[i], NULL);
    pthread_cond_destroy(&r->ended);
    pthread_cond_destroy(&r->turn);
    pthread_mutex_destroy(&r->lock);
    free(t);
    return r->err;
}

/* ---- the job ---- */

/* What the first document is, all are. */
static int find_kind(struct run *r)
{
    struct iz_document d;
    int kind = -EBADMSG;

    while (kind == -EBADMSG && iz_corpus_next(r->corpus, &d)) {
        kind = iz_record_is_masked(&d);
        if (kind == -EBADMSG && !r->job->skip_bad)
            return kind;
    }
    iz_corpus_rewind(r->corpus);
    if (kind < 0) {
        fprintf(stderr, "izar: tokenizer: the input has no document\n");
        return -EINVAL;
    }
    r->recipe.masked = kind;
    r->recipe.quiet = r->job->skip_bad;
    r->counts.masked = kind;
    return kind ? iz_recipe_chat(&r->recipe) : 0;
}

static int open_shards(struct run *r)
{
    static const char *const splits[] = {"train", "val"};
    char prefix[2048];

    for (int i = 0; i < (r->job->val_fraction > 0 ? 2 : 1); i++) {
        int n =
            snprintf(prefix, sizeof prefix, "%s_%s", r->job->out, splits[i]);
        int err = n >= (int)sizeof prefix ? -ENAMETOOLONG : 0;

        if (!err)
            err = iz_shards_open(&r->shards[i], prefix,
                                 iz_tokenizer_vocab(r->recipe.tokenizer),
                                 r->job->shard_tokens, r->recipe.masked);
        if (err)
            return err;
    }
    return 0;
}

static int close_shards(struct run *r, int err)
{
    for (int i = 0; i < 2; i++) {
        if (!err && r->shards[i]) {
            err = iz_shards_finish(r->shards[i]);
            r->counts.shards[i] = iz_shards_count(r->shards[i]);
        }
        iz_shards_close(&r->shards[i]);
    }
    return err;
}

static int check_counts(const struct run *r)
{
    const struct iz_tokenize_counts *c = &r->counts;

    if (r->job->val_fraction > 0 && c->tokens[1] == 0)
        fprintf(stderr,
                "izar: tokenizer: warning: none of %lld documents fell to "
                "validation\n",
                (long long)c->documents);
    if (c->tokens[0] > 0)
        return 0;
    fprintf(stderr, "izar: tokenizer: no token for training\n");
    return -EINVAL;
}

int iz_tokenize(const struct iz_tokenize_job *job,
                struct iz_tokenize_counts *counts,
                iz_tokenize_progress *progress, void *arg)
{
    struct run r = {.job = job, .recipe = job->recipe};
    int err = iz_corpus_open(&r.corpus, job->input, job->inputs, job->split_on,
                             job->val_fraction);

    assert(job->threads > 0 && job->val_fraction >= 0);
    if (err)
        return err;
    r.counts.bytes_total = iz_corpus_bytes(r.corpus);
    err = find_kind(&r);
    if (!err)
        err = open_shards(&r);
    if (!err)
        err = run_threads(&r, progress, arg);
    err = close_shards(&r, err);
    iz_corpus_close(&r.corpus);
    if (!err)
        err = check_counts(&r);
    *counts = r.counts;
    return err;
}
