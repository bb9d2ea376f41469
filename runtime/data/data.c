/* SPDX-License-Identifier: Apache-2.0 */
/* Shards as one stream, and the order of samples.  A split is cut into
 * windows of seq tokens; epoch e visits them in a permutation that is computed,
 * not stored: a Feistel network over the window numbers, keyed by seed and e.
 */
#include "runtime/data/data.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "runtime/base/text.h"
#include "runtime/data/paths.h"
#include "runtime/data/shard.h"

/* Shards one after the other: token i of the stream is in shard k where
 * first[k] <= i < first[k + 1]. */
struct stream {
    struct iz_shard *shard;
    int64_t *first; /* shards + 1; the last is the length */
    int shards;     /* as many are open or half-open */
    FILE *err;      /* where faults are told, or NULL, while it opens */
};

/* Tokens [first, first + count) of a stream. */
struct split {
    const struct stream *stream;
    int64_t first, count, windows;
};

struct iz_data {
    struct stream train, val;
    struct split split[2];
    int seq;
    int group;        /* windows that stay together: 2 of pairs, else 1 */
    int ahead;        /* tokens behind the last window that are targets */
    int targets;      /* of a window: one less where nothing behind it is one */
    int document_end; /* -1: none */
    bool packed;      /* masks say where documents begin */
    const struct iz_model *model; /* whose records they are; NULL: tokens */
    uint64_t seed;
};

int iz_data_look(struct iz_data_config *c, FILE *err)
{
    char path[IZ_PATH_MAX];
    if (c->bytes || !iz_paths_first(path, sizeof(path), c->path))
        return 0;
    c->packed = iz_shard_sample(path) > 0;
    c->apart |= c->packed;
    if (!c->packed || c->document_end < 0)
        return 0;
    return iz_text_refuse(err,
                          "data.document_end: %d, but the samples of %s are "
                          "packed and say where documents begin: leave it out",
                          c->document_end, path);
}

/* ---- streams ---- */

/* A mask that was left behind would train on prompts in silence. */
static int masks_check(const struct stream *t)
{
    for (int i = 1; i < t->shards; i++)
        if (!t->shard[i].mask.at != !t->shard[0].mask.at)
            return iz_text_refuse(
                t->err,
                "data: %s has a loss mask beside it and %s has none: all "
                "shards of a split have one or none",
                t->shard[t->shard[i].mask.at ? i : 0].path,
                t->shard[t->shard[i].mask.at ? 0 : i].path);
    return 0;
}

/* Packed samples have the windows' length. */
static int packed_check(const struct stream *t, int seq)
{
    for (int i = 0; i < t->shards; i++) {
        const struct iz_shard *s = &t->shard[i];
        if (s->sample != seq)
            return iz_text_refuse(
                t->err,
                !seq ? "data: %s is packed, and the first file of data.path is "
                       "not"
                : s->sample
                    ? "data: %s has packed samples of %d tokens, and a sample "
                      "here has %d: set model.seq, or write it anew"
                    : "data: %s is not packed, and the first file of data.path "
                      "is",
                s->path, s->sample, seq);
        if (seq && (s->count % seq || !s->mask.at))
            return iz_text_refuse(
                t->err, "data: %s: %s", s->path,
                s->mask.at ? "its last packed sample is not whole"
                           : "its packed samples have no mask beside them");
    }
    return 0;
}

static int stream_fill(struct stream *t, const struct iz_paths *p, bool bytes,
                       int vocab, const struct iz_model *m)
{
    t->shard = iz_take(p->count, sizeof(*t->shard), "the data");
    t->first = iz_take(p->count + 1, sizeof(*t->first), "the data");
    for (int i = 0; i < p->count; i++) {
        int err =
            m ? iz_shard_open_records(&t->shard[i], p->path[i], m, t->err)
              : iz_shard_open(&t->shard[i], p->path[i], bytes, vocab, t->err);
        t->shards = i + 1;
        if (err)
            return err;
        t->first[i + 1] = t->first[i] + t->shard[i].count;
    }
    return masks_check(t);
}

static int stream_open(struct stream *t, const char *list, bool bytes,
                       int vocab, const struct iz_model *m)
{
    struct iz_paths p;
    int err = iz_paths_open(&p, list, t->err);
    if (!err)
        err = stream_fill(t, &p, bytes, vocab, m);
    iz_paths_close(&p);
    return err;
}

static void stream_close(struct stream *t)
{
    for (int i = 0; i < t->shards; i++)
        iz_shard_close(&t->shard[i]);
    free(t->shard);
    free(t->first);
    *t = (struct stream){0};
}

static int64_t stream_count(const struct stream *t)
{
    return t->first[t->shards];
}

/* The shard that holds a token. */
static int stream_find(const struct stream *t, int64_t at)
{
    int low = 0, high = t->shards;
    assert(at >= 0 && at < stream_count(t));
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        *(at < t->first[middle] ? &high : &low) = middle;
    }
    return low;
}

/* Tokens [at, at + n); as targets: -1 where a mask excludes them. */
static void stream_read(const struct stream *t, int64_t at, int32_t *out,
                        int64_t n, bool target)
{
    for (int k = stream_find(t, at); n > 0; k++) {
        int64_t here = min64(t->first[k + 1] - at, n), from = at - t->first[k];
        iz_shard_tokens(&t->shard[k], from, out, here);
        if (target)
            iz_shard_ignore(&t->shard[k], from, out, here);
        at += here;
        out += here;
        n -= here;
    }
}

static bool is_masked(const struct iz_data *d, const struct stream *t)
{
    return d->document_end >= 0 || t->shard[0].mask.at != NULL;
}

/* The first token of a document is no target of the last one of another. */
static void ignore_first(const struct iz_data *d, const int32_t *input,
                         int32_t *target, int64_t n)
{
    for (int64_t i = 0; d->document_end >= 0 && i < n; i++)
        if (input[i] == d->document_end)
            target[i] = -1;
}

/* The targets of a sample that begins at `at`.
 */
static void read_targets(const struct iz_data *d, const struct stream *t,
                         int64_t at, int32_t *target)
{
    stream_read(t, at + 1, target, d->targets, true);
    if (d->targets < d->seq)
        target[d->targets] = -1;
}

/* Of the targets of a sample that begins at `at`. */
static int64_t sample_loss_tokens(const struct iz_data *d,
                                  const struct stream *t, int64_t at)
{
    enum { AT_ONCE = 512 };
    int32_t input[AT_ONCE], target[AT_ONCE];
    int64_t loss_tokens = 0, here;
    if (!is_masked(d, t))
        return d->targets;
    for (int64_t i = 0; i < d->targets; i += here) {
        here = min64(d->targets - i, AT_ONCE);
        stream_read(t, at + i, input, here, false);
        stream_read(t, at + i + 1, target, here, true);
        ignore_first(d, input, target, here);
        for (int64_t k = 0; k < here; k++)
            loss_tokens += target[k] >= 0;
    }
    return loss_tokens;
}

/* Texts of pairs have the windows' length, and each has something to be learnt.
 */
static int pairs_check(const struct iz_data *d, const struct stream *t, int seq)
{
    for (int i = 0; i < t->shards; i++) {
        const struct iz_shard *s = &t->shard[i];
        if (s->text != seq)
            return iz_text_refuse(
                t->err,
                s->text && seq
                    ? "data: %s has texts of %d tokens, and a sample here has "
                      "%d: set model.seq, or write it anew"
                : s->text
                    ? "data: %s has pairs of texts: set loss.type to dpo or ipo"
                    : "data: %s has no pairs of texts, which loss.type asks "
                      "for: write some with tools/tokenize --preferences",
                s->path, s->text, seq);
        if (seq && (s->count % (2 * (int64_t)seq) || !s->mask.at))
            return iz_text_refuse(
                t->err, "data: %s: %s", s->path,
                s->mask.at ? "its last pair is not whole"
                           : "its pairs have no loss mask beside them");
        for (int64_t at = 0; seq && at < s->count; at += seq)
            if (!sample_loss_tokens(d, t, t->first[i] + at))
                return iz_text_refuse(t->err,
                                      "data: %s: text %" PRId64
                                      " has nothing to be learnt",
                                      s->path, at / seq);
    }
    return 0;
}

/* ---- splits ---- */

static void split_set(struct split *s, const struct stream *t, int64_t first,
                      int64_t count, const struct iz_data *d)
{
    s->stream = t;
    s->first = first;
    s->count = count;
    s->windows =
        count > 0 ? (count - d->ahead) / (d->seq * d->group) * d->group : 0;
}

/* The last windows of one stream are for validation.  Its first input is the
 * last target of training: no target belongs to both.  The cut does not ask
 * whether validation is wanted, or switching it on would change the training.
 */
static void split_one_stream(struct iz_data *d, double fraction)
{
    const struct stream *t = &d->train;
    int64_t count = stream_count(t), span = d->seq * (int64_t)d->group;
    int64_t windows = (count - d->ahead) / span; /* or pairs of them */
    int64_t held = (int64_t)(fraction * (double)windows + 0.5);
    if (fraction > 0)
        held = max64(held, 1);
    held = max64(min64(held, windows - 1), 0); /* training comes first */
    int64_t cut = count - d->ahead - held * span;
    split_set(&d->split[IZ_TRAIN], t, 0, cut + d->ahead, d);
    split_set(&d->split[IZ_VAL], t, cut, held > 0 ? count - cut : 0, d);
}

/* A loss over no target would be 0 and look like a perfect one. */
static int split_check(const struct iz_data *d, enum iz_split s,
                       const char *path)
{
    const char *use = s == IZ_TRAIN ? "training" : "validation";
    int64_t windows = d->split[s].windows;
    if (windows <= 0)
        return iz_text_refuse(
            d->train.err,
            "data: %s: %" PRId64 " %s for %s, but one window needs %" PRId64
            " (sequence length %d * %d + %d)%s",
            path, d->split[s].count, d->model ? "records" : "tokens", use,
            (int64_t)d->seq * d->group + d->ahead, d->seq, d->group, d->ahead,
            s == IZ_VAL ? "; see data.val_path, data.val_fraction" : "");
    for (int64_t i = 0; i < windows; i += d->group)
        if (iz_data_loss_tokens(d, s, i, 1))
            return 0;
    return iz_text_refuse(
        d->train.err, "data: %s: %s nothing to be learnt for %s", path,
        d->document_end < 0 ? "the mask leaves"
                            : "the mask or data.document_end leaves",
        use);
}

/* A token that ends no document is a typing error, which would change nothing.
 */
static int documents_check(const struct iz_data *d, const char *path, int vocab)
{
    const struct stream *t = &d->train;
    int end = d->document_end;
    int32_t token[512];
    if (end >= vocab)
        return iz_text_refuse(
            d->train.err,
            "data.document_end: %d is outside the vocabulary of %d", end,
            vocab);
    for (int64_t at = 0, here; end >= 0; at += here) {
        here = min64(stream_count(t) - at, 512);
        if (here == 0)
            return iz_text_refuse(
                d->train.err,
                "data.document_end: %s has no token %d: no document ends", path,
                end);
        stream_read(t, at, token, here, false);
        for (int64_t i = 0; i < here; i++)
            if (token[i] == end)
                return 0;
    }
    return 0;
}

static int splits_open(struct iz_data *d, const struct iz_data_config *c,
                       int vocab, bool need_val)
{
    bool own_val = c->val_path[0] != '\0';
    int err = stream_open(&d->train, c->path, c->bytes, vocab, d->model);
    if (!err && own_val)
        err = stream_open(&d->val, c->val_path, c->bytes, vocab, d->model);
    if (err)
        return err;
    int text = c->group > 1 ? d->seq : 0;
    err = documents_check(d, c->path, vocab);
    const struct stream *both[] = {&d->train, own_val ? &d->val : NULL};
    for (int i = 0; i < 2 && both[i] && !err && !d->model; i++) {
        err = packed_check(both[i], d->packed ? d->seq : 0);
        if (!err)
            err = pairs_check(d, both[i], text);
    }
    if (err)
        return err;
    split_one_stream(d, own_val ? 0 : c->val_fraction);
    if (own_val)
        split_set(&d->split[IZ_VAL], &d->val, 0, stream_count(&d->val), d);
    err = split_check(d, IZ_TRAIN, c->path);
    if (!err && need_val)
        err = split_check(d, IZ_VAL, own_val ? c->val_path : c->path);
    return err;
}

static int data_open(struct iz_data **out, const struct iz_data_config *c,
                     struct iz_data kind, int vocab, bool need_val, FILE *err)
{
    struct iz_data *d = iz_take(1, sizeof(*d), "the data");
    *d = kind;
    d->train.err = d->val.err = err;
    int why = splits_open(d, c, vocab, need_val);
    if (why)
        iz_data_close(&d);
    *out = d;
    return why;
}

int iz_data_open(struct iz_data **out, const struct iz_data_config *c, int seq,
                 int vocab, uint64_t seed, bool need_val, FILE *err)
{
    bool whole = c->group > 1 || c->packed; /* nothing follows a sample */
    assert(seq > 0 && vocab > 0);
    return data_open(out, c,
                     (struct iz_data){.seq = seq,
                                      .group = c->group,
                                      .ahead = !whole,
                                      .targets = seq - whole,
                                      .document_end = c->document_end,
                                      .packed = c->packed,
                                      .seed = seed},
                     vocab, need_val, err);
}

int iz_data_open_records(struct iz_data **out, const struct iz_data_config *c,
                         const struct iz_model *m, uint64_t seed, bool need_val,
                         FILE *err)
{
    *out = NULL;
    if (c->bytes)
        return iz_text_refuse(
            err, "data.bytes: true: %s reads records, no tokens", m->name);
    return data_open(out, c,
                     (struct iz_data){.seq = 1,
                                      .group = 1,
                                      .targets = 1,
                                      .document_end = -1,
                                      .model = m,
                                      .seed = seed},
                     0, need_val, err);
}

void iz_data_close(struct iz_data **d)
{
    if (!*d)
        return;
    stream_close(&(*d)->train);
    stream_close(&(*d)->val);
    free(*d);
    *d = NULL;
}

int64_t iz_data_windows(const struct iz_data *d, enum iz_split s)
{
    return d->split[s].windows;
}

const struct iz_shard *iz_data_shard(const struct iz_data *d, enum iz_split s,
                                     int i)
{
    const struct stream *t = s == IZ_TRAIN ? &d->train : &d->val;
    return i < t->shards ? &t->shard[i] : NULL;
}

/* ---- order ---- */

/* A bijection of [0, 4^half): eight rounds of a balanced Feistel network. */
static uint64_t feistel(uint64_t x, int half, uint64_t key)
{
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < 8; round++) {
        uint64_t f = iz_mix(key + iz_mix((round << 56) ^ right));
        uint64_t next = left ^ (f & mask);
        left = right;
        right = next;
    }
    return left << half | right;
}

/* Image of i under a permutation of [0, n): a bijection of a power of four that
 * is below 4n is applied until the value falls below n again (cycle walking).
 */
static int64_t permute(int64_t i, int64_t n, uint64_t key)
{
    int half = 1;
    uint64_t x = (uint64_t)i;
    while ((uint64_t)1 << (2 * half) < (uint64_t)n)
        half++;
    do
        x = feistel(x, half, key);
    while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* First input token of a training sample.  Windows do not fill a split: the
 * rest (less than one window) falls on either side, by epoch, so that every
 * token is seen in time and windows are not cut at the same places for ever. */
static int64_t train_start(const struct iz_data *d, int64_t index)
{
    const struct split *s = &d->split[IZ_TRAIN];
    int64_t epoch = index / s->windows, i = index % s->windows;
    int64_t rest = s->count - d->ahead - s->windows * d->seq;
    uint64_t key = iz_mix(d->seed + iz_mix((uint64_t)epoch + 1));
    int64_t shift = (int64_t)(iz_mix(key ^ 1) % (uint64_t)(rest + 1));
    int64_t group = permute(i / d->group, s->windows / d->group, key);
    return shift + d->seq * (group * d->group + i % d->group);
}

/* Where in its stream a sample begins. */
static int64_t sample_start(const struct iz_data *d, enum iz_split which,
                            int64_t index)
{
    const struct split *s = &d->split[which];
    assert(index >= 0 && s->windows > 0);
    return s->first + (which == IZ_TRAIN ? train_start(d, index)
                                         : index % s->windows * d->seq);
}

int64_t iz_data_targets(const struct iz_data *d, int64_t n)
{
    return n / d->group * d->targets;
}

bool iz_data_masked(const struct iz_data *d, enum iz_split s)
{
    return is_masked(d, d->split[s].stream);
}

int64_t iz_data_loss_tokens(const struct iz_data *d, enum iz_split which,
                            int64_t first, int64_t n)
{
    int64_t loss_tokens = 0;
    for (int64_t i = first; i < first + n; i += d->group)
        loss_tokens += sample_loss_tokens(d, d->split[which].stream,
                                          sample_start(d, which, i));
    return loss_tokens;
}

void iz_data_sample(const struct iz_data *d, enum iz_split which, int64_t index,
                    int32_t *input, int32_t *target)
{
    const struct split *s = &d->split[which];
    int64_t at = sample_start(d, which, index);
    stream_read(s->stream, at, input, d->seq, false);
    read_targets(d, s->stream, at, target);
    ignore_first(d, input, target, d->seq);
}

void iz_data_documents(const struct iz_data *d, enum iz_split which,
                       int64_t first, int n, const int32_t *input,
                       int32_t *begins)
{
    const struct stream *t = d->split[which].stream;
    assert(d->document_end >= 0 || d->packed);
    for (int k = 0; k < n; k++, input += d->seq, begins += d->seq) {
        int64_t start = sample_start(d, which, first + k);
        int s = stream_find(t, start); /* holds all of a packed sample */
        begins[0] = 0;
        for (int32_t i = 1; i < d->seq; i++) {
            bool here = d->packed ? iz_shard_begins(&t->shard[s],
                                                    start + i - t->first[s])
                                  : input[i - 1] == d->document_end;
            begins[i] = here ? i : begins[i - 1];
        }
    }
}

static const void *record_at(const struct stream *t, int64_t at)
{
    int k = stream_find(t, at);
    return iz_shard_record(&t->shard[k], at - t->first[k]);
}

void iz_data_batch(const struct iz_data *d, enum iz_split which, int64_t first,
                   int n, void *input, void *target)
{
    const struct iz_model *m = d->model;
    for (int i = 0; i < n; i++)
        if (m)
            m->record.unpack(m->self,
                             record_at(d->split[which].stream,
                                       sample_start(d, which, first + i)),
                             i, n, input, target);
        else
            iz_data_sample(d, which, first + i,
                           (int32_t *)input + (int64_t)i * d->seq,
                           (int32_t *)target + (int64_t)i * d->seq);
}
