/* SPDX-License-Identifier: Apache-2.0 */
/* Records of JSONL and plain documents as tokens with their mask; see
 * tokenizer_record.h. */
#include "runtime/tokenizer_record.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"

/* The tokens and texts around a message. */
static const struct style {
    const char *name;
    const char *token[3];      /* that the tokenizer must have */
    const char *after_role;    /* text between role and content */
    const char *after_content; /* text behind the end of a message */
    bool trim;                 /* blanks around the content are dropped */
} styles[] = {
    [IZ_CHAT_PLAIN] = {"plain", {NULL}, ":\n", "\n", false},
    [IZ_CHAT_CHATML] =
        {"chatml", {"<|im_start|>", NULL, "<|im_end|>"}, "\n", "\n", false},
    [IZ_CHAT_LLAMA3] = {"llama3",
                        {"<|start_header_id|>", "<|end_header_id|>",
                         "<|eot_id|>"},
                        "\n\n",
                        "",
                        true},
};

void iz_lesson_free(struct iz_lesson *l)
{
    free(l->ids.id);
    free(l->learn);
    *l = (struct iz_lesson){0};
}

/* The missing token of a style, or NULL. */
static const char *missing(const struct style *s, const struct iz_tokenizer *t)
{
    for (int i = 0; i < 3; i++)
        if (s->token[i] && iz_tokenizer_find(t, s->token[i]) < 0)
            return s->token[i];
    return NULL;
}

int iz_recipe_chat(struct iz_recipe *r)
{
    const char *token;

    for (int i = IZ_CHAT_LLAMA3; r->chat == IZ_CHAT_AUTO; i--)
        if (!missing(&styles[i], r->tokenizer))
            r->chat = (enum iz_chat)i;
    token = missing(&styles[r->chat], r->tokenizer);
    if (!token)
        return 0;
    fprintf(stderr, "izar: tokenizer: --chat %s needs the token %s\n",
            styles[r->chat].name, token);
    return -EINVAL;
}

/* ---- appending ---- */

struct writer {
    const struct iz_recipe *r;
    const struct iz_document *d;
    struct iz_encoder *e;
    struct iz_lesson *out;
};

/* Everything since the last mark is to be learnt or not. */
static int mark(struct iz_lesson *l, bool learn)
{
    if (l->room < l->ids.count) {
        uint8_t *grown = realloc(l->learn, (size_t)l->ids.room);

        if (!grown)
            return -ENOMEM;
        l->learn = grown;
        l->room = l->ids.room;
    }
    if (l->ids.count > l->marked)
        memset(l->learn + l->marked, learn, (size_t)(l->ids.count - l->marked));
    l->marked = l->ids.count;
    return 0;
}

static int add_text(struct writer *w, const char *text, int64_t n, bool learn)
{
    int err = iz_encode(w->e, text, n, w->r->special, &w->out->ids);

    return err ? err : mark(w->out, learn);
}

static int add_token(struct writer *w, int32_t id, bool learn)
{
    if (id < 0)
        return 0;
    if (iz_ids_room(&w->out->ids, 1))
        return -ENOMEM;
    w->out->ids.id[w->out->ids.count++] = id;
    return mark(w->out, learn);
}

static int bad(const struct writer *w, const char *what)
{
    if (!w->r || !w->r->quiet)
        fprintf(stderr, "izar: tokenizer: %s, line %lld: %s\n", w->d->path,
                (long long)w->d->line, what);
    return -EBADMSG;
}

/* ---- records ---- */

static const char *text_of(const struct iz_json *object, const char *key)
{
    return iz_json_text(iz_json_member(object, key));
}

static int encode_pair(struct writer *w, const struct iz_json *v)
{
    const char *prompt = text_of(v, "prompt");
    const char *completion = text_of(v, "completion");
    int err;

    if (!prompt || !completion)
        return bad(w, "prompt or completion is missing or no string");
    err = add_token(w, w->r->begin, false);
    if (!err)
        err = add_text(w, prompt, (int64_t)strlen(prompt), false);
    if (!err)
        err = add_text(w, completion, (int64_t)strlen(completion), true);
    return err ? err : add_token(w, w->r->end, true);
}

static int add_content(struct writer *w, const struct style *s,
                       const char *text, bool learn)
{
    static const char blank[] = " \t\r\n\v\f";
    size_t n;

    if (s->trim)
        text += strspn(text, blank);
    n = strlen(text);
    while (s->trim && n > 0 && strchr(blank, text[n - 1]))
        n--;
    return add_text(w, text, (int64_t)n, learn);
}

static int32_t token_of(const struct writer *w, const char *name)
{
    return name ? iz_tokenizer_find(w->r->tokenizer, name) : -1;
}

static int encode_message(struct writer *w, const struct iz_json *v)
{
    const struct style *s = &styles[w->r->chat];
    const char *role = text_of(v, "role"), *content = text_of(v, "content");
    bool learn = role && strcmp(role, "assistant") == 0;
    int32_t end = token_of(w, s->token[2]);
    int err;

    if (!role || !content)
        return bad(w, "role or content of a message is missing or no string");
    if (w->r->chat == IZ_CHAT_PLAIN && learn)
        end = w->r->end;
    err = add_token(w, token_of(w, s->token[0]), false);
    if (!err)
        err = add_text(w, role, (int64_t)strlen(role), false);
    if (!err)
        err = add_token(w, token_of(w, s->token[1]), false);
    if (!err)
        err = add_text(w, s->after_role, (int64_t)strlen(s->after_role), false);
    if (!err)
        err = add_content(w, s, content, learn);
    if (!err)
        err = add_token(w, end, learn);
    return err ? err
               : add_text(w, s->after_content,
                          (int64_t)strlen(s->after_content), false);
}

static int encode_messages(struct writer *w, const struct iz_json *list)
{
    int64_t n = iz_json_count(list);
    int err;

    if (iz_json_is_object(list) || n == 0)
        return bad(w, "messages is not an array with something in it");
    err = add_token(w, w->r->begin, false);
    for (int64_t i = 0; !err && i < n; i++)
        err = encode_message(w, iz_json_item(list, i));
    return err ? err : add_token(w, w->r->end, false);
}

static int encode_plain(struct writer *w, const char *text, int64_t n)
{
    int err = add_token(w, w->r->begin, true);

    if (!err)
        err = add_text(w, text, n, true);
    return err ? err : add_token(w, w->r->end, true);
}

static bool is_conversation(const struct iz_json *v)
{
    return iz_json_member(v, "messages") || iz_json_member(v, "prompt");
}

static int encode_json(struct writer *w, const struct iz_json *v)
{
    const char *text = text_of(v, "text");

    if (is_conversation(v) != w->r->masked)
        return bad(w, w->r->masked
                          ? "neither messages nor prompt, as the first record "
                            "has: one output holds one kind"
                          : "messages or prompt, but the first document is "
                            "text: one output holds one kind");
    if (iz_json_member(v, "messages"))
        return encode_messages(w, iz_json_member(v, "messages"));
    if (w->r->masked)
        return encode_pair(w, v);
    return text ? encode_plain(w, text, (int64_t)strlen(text))
                : bad(w, "text is missing or no string");
}

int iz_record_is_masked(const struct iz_document *d)
{
    struct writer w = {.d = d};
    struct iz_json *v;
    int masked;

    if (!d->json)
        return 0;
    v = iz_json_open(d->text, d->bytes);
    if (!v)
        return bad(&w, "is not JSON");
    masked = is_conversation(v);
    iz_json_close(&v);
    return masked;
}

static int encode_line(struct writer *w)
{
    struct iz_json *v = iz_json_open(w->d->text, w->d->bytes);
    int err;

    if (!v)
        return bad(w, "is not JSON");
    err = encode_json(w, v);
    iz_json_close(&v);
    return err;
}

int iz_record_encode(const struct iz_recipe *r, struct iz_encoder *e,
                     const struct iz_document *d, struct iz_lesson *out)
{
    struct writer w = {r, d, e, out};
    int64_t before = out->ids.count;
    int err;

    assert(out->marked == before);
    if (d->json)
        err = encode_line(&w);
    else if (r->masked)
        err = bad(&w, "is text, but the first document is a conversation: one "
                      "output holds one kind");
    else
        err = encode_plain(&w, d->text, d->bytes);
    if (err)
        out->ids.count = out->marked = before;
    return err;
}
