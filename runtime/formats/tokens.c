/* SPDX-License-Identifier: Apache-2.0 */
/* Where files of a tokenizer have tokens and their ids; see tokens.h. */
#include "runtime/formats/tokens.h"

#include <string.h>
#include <unistd.h>

#include "runtime/base/json.h"
#include "runtime/base/key.h"
#include "runtime/base/text.h"

struct file {
    const char *name;
    int vocab;
    int64_t id; /* the first beyond it; -1: none so far */
    char token[64];
};

static void take_id(struct file *f, const char *token, int64_t id)
{
    /* Of images: tokenizers of Gemma 3 for text alone have it too. */
    bool unused = token && strcmp(token, "<image_soft_token>") == 0;
    if (f->id >= 0 || id < f->vocab || unused)
        return;
    f->id = id;
    snprintf(f->token, sizeof(f->token), "%s", token ? token : "");
    iz_text_make_printable(f->token);
}

/* {"token": id} */
static void take_map(struct file *f, const json_t *map)
{
    const char *token = NULL;
    while (json_is_object(map) && (token = iz_json_key(map, token)))
        take_id(f, token, iz_json_count_of(map, token));
}

/* [["token", score]], whose places are the ids */
static void take_pieces(struct file *f, const json_t *list)
{
    size_t n = json_array_size(list), last = n ? n - 1 : 0;
    if (n)
        take_id(
            f, json_string_value(json_array_get(json_array_get(list, last), 0)),
            (int64_t)last);
}

/* [{"id": id, "content": "token"}] */
static void take_added(struct file *f, const json_t *list)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        take_id(f, iz_json_text_of(v, "content"), iz_json_count_of(v, "id"));
    }
}

/* {"id": {"content": "token"}} */
static void take_decoder(struct file *f, const json_t *map)
{
    const char *id = NULL;
    while (json_is_object(map) && (id = iz_json_key(map, id))) {
        const char *digits = id;
        take_id(f, iz_json_text_of(json_object_get(map, id), "content"),
                iz_text_decimal(&digits));
    }
}

int iz_tokens_check(const char *folder, int vocab, FILE *err)
{
    static const char *const names[] = {"tokenizer.json", "vocab.json",
                                        "added_tokens.json",
                                        "tokenizer_config.json"};
    char path[IZ_PATH_MAX + 64];
    int s = 0;
    for (int i = 0; i < 4; i++) {
        struct file f = {.name = names[i], .vocab = vocab, .id = -1};
        snprintf(path, sizeof(path), "%s/%s", folder, f.name);
        if (access(path, F_OK) != 0)
            continue;
        json_t *root = iz_json_read(path, NULL);
        const json_t *model = json_object_get(root, "model");
        const json_t *pieces = json_object_get(model, "vocab");
        if (!root && err)
            fprintf(err,
                    "izar: model.import: %s: tokens cannot be read here, "
                    "and are not checked\n",
                    path);
        take_map(&f, pieces);
        take_pieces(&f, pieces);
        take_added(&f, json_object_get(root, "added_tokens"));
        take_decoder(&f, json_object_get(root, "added_tokens_decoder"));
        if (i == 1 || i == 2)
            take_map(&f, root);
        json_decref(root);
        if (f.id >= 0)
            s = iz_text_refuse(err,
                               "model.import: %s: token \"%s\" is %lld, and "
                               "the model has a vocabulary of %d",
                               path, f.token, (long long)f.id, vocab);
    }
    return s;
}
