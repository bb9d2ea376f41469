/* SPDX-License-Identifier: Apache-2.0 */
/* Translating config.json by the table of the model; see published.h. */
#include "runtime/formats/published.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/unit/layer.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"

struct reader {
    const char *path;
    const json_t *root;
    const struct iz_hf_type *type;
    FILE *notes, *err, *out;
    int faults, members;
};

/* ---- the file ---- */

/* Members that do not change what a model computes here: of what it is called,
 * of a tokenizer, of training and of generating; dropout, which there is none
 * of; shapes that the tensors tell as well; and what is looked at elsewhere. */
static const char harmless[] =
    "architectures|model_type|torch_dtype|dtype|transformers_version|"
    "_name_or_path|name_or_path|_attn_implementation|attn_implementation|"
    "_attn_implementation_autoset|cache_implementation|_commit_hash|auto_map|"
    "custom_pipelines|"
    "use_cache|output_attentions|output_hidden_states|return_dict|is_decoder|"
    "is_encoder_decoder|chunk_size_feed_forward|id2label|label2id|"
    "problem_type|num_labels|finetuning_task|task_specific_params|"
    "gradient_checkpointing|initializer_range|tokenizer_class|bos_token_id|"
    "eos_token_id|pad_token_id|sep_token_id|unk_token_id|mask_token_id|"
    "decoder_start_token_id|bos_token|eos_token|pad_token|unk_token|prefix|"
    "torchscript|use_bfloat16|tf_legacy_loss|pruned_heads|"
    "tie_encoder_decoder|cross_attention_hidden_size|max_length|min_length|"
    "do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|"
    "temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|"
    "no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|"
    "num_return_sequences|output_scores|return_dict_in_generate|"
    "forced_bos_token_id|forced_eos_token_id|remove_invalid_values|"
    "exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens|"
    "attention_dropout|hidden_dropout|attn_pdrop|embd_pdrop|resid_pdrop|"
    "dropout|classifier_dropout|summary_activation|summary_first_dropout|"
    "summary_proj_to_labels|"
    "summary_type|summary_use_proj|reorder_and_upcast_attn|n_inner|"
    "pretraining_tp|max_window_layers|quantization_config|use_flash_attn|"
    "unsloth_version|unsloth_fixed|max_sequence_length|is_llama_config|"
    "transformers.js_config";

/* Of a model of text and images the model of text; NULL: it is none such. */
static json_t *text_part(json_t *root)
{
    json_t *text = json_object_get(root, "text_config");
    const char *type = iz_json_text_of(root, "model_type");
    return json_is_object(text) && iz_text_among(type, "gemma3|mistral3")
               ? text
               : NULL;
}

json_t *iz_published_open(const char *folder, bool *multimodal, FILE *err)
{
    char path[IZ_PATH_MAX + 64];
    const char *key = NULL;
    snprintf(path, sizeof(path), "%s/" IZ_PUBLISHED_CONFIG, folder);
    json_t *root = iz_json_read(path, err), *text = text_part(root);
    if (multimodal)
        *multimodal = text != NULL;
    if (!text)
        return root;
    while ((key = iz_json_key(root, key)))
        if (strcmp(key, "tie_word_embeddings") == 0 ||
            (strcmp(key, "model_type") != 0 && iz_text_among(key, harmless)))
            json_object_set(text, key, json_object_get(root, key));
    json_incref(text);
    json_decref(root);
    return text;
}

/* ---- reading ---- */

static void published_fault(struct reader *r, const char *name,
                            const char *what, const json_t *found,
                            const char *want)
{
    char *text = found ? iz_json_dump(found) : NULL;
    r->faults++;
    iz_text_refuse(r->err, "model.import: %s: %s%s%.60s%s%s", r->path, name,
                   text ? " is " : "", text ? text : "", what, want);
    free(text);
}

static void put_member(struct reader *r, const char *key, const char *text)
{
    fprintf(r->out, "%s\"%s\": %s", r->members++ ? ", " : "", key, text);
}

const char *iz_published_name(const struct iz_hf *hf, const char *key)
{
    for (const struct iz_hf_key *k = hf->keys; k->name; k++)
        if (k->key && strcmp(k->key, key) == 0)
            return k->name;
    return "model_type";
}

const char *iz_published_resized(const struct iz_hf *hf, bool more)
{
    for (const struct iz_hf_key *k = hf->keys; k->name; k++)
        if (more ? k->grows : k->shorter)
            return k->key;
    return "";
}

bool iz_published_free(const struct iz_hf *hf, const char *key)
{
    for (const struct iz_hf_key *k = hf->keys; k->name; k++)
        if (k->free && k->key && strcmp(k->key, key) == 0)
            return true;
    return false;
}

static bool applies(const struct iz_hf_key *k, const struct iz_hf_type *t)
{
    return iz_key_applies(t->name, k->types);
}

/* The value of a row of our keys; NULL: absent. */
static const json_t *row_value(const struct reader *r,
                               const struct iz_hf_key *k)
{
    return k->key && applies(k, r->type) ? iz_json_at(r->root, k->name) : NULL;
}

static bool same_key(const struct iz_hf_key *a, const struct iz_hf_key *b)
{
    return a->key && b->key && strcmp(a->key, b->key) == 0;
}

/* Two names of one key must say the same: only the first is put. */
static bool seen(struct reader *r, const struct iz_hf *hf,
                 const struct iz_hf_key *k, const json_t *v)
{
    for (const struct iz_hf_key *p = hf->keys; p < k; p++) {
        const json_t *w = same_key(p, k) ? row_value(r, p) : NULL;
        if (!w)
            continue;
        if (!p->wins && !iz_json_same(v, w))
            published_fault(r, k->name, ", which is not ", v, p->name);
        return true;
    }
    return false;
}

/* Whether another row of the same key speaks for a row without value. */
static bool spoken_for(const struct reader *r, const struct iz_hf *hf,
                       const struct iz_hf_key *k)
{
    for (const struct iz_hf_key *p = hf->keys; p->name; p++)
        if (same_key(p, k) &&
            (row_value(r, p) || (p < k && applies(p, r->type))))
            return true;
    return false;
}

/* Whether one of the members that give a row its meaning does. */
static bool is_meant(const struct reader *r, const struct iz_hf_key *k)
{
    char name[64];
    for (int i = 0; iz_text_word(name, sizeof(name), k->with, i); i++) {
        const json_t *w = iz_json_at(r->root, name);
        if (w && iz_key_among(w, k->with_value))
            return true;
    }
    return false;
}

/* Refuses a member that stands without what gives it its meaning, and one that
 * is missing beside it. */
static void check_with(struct reader *r, const struct iz_hf_key *k,
                       const json_t *v)
{
    bool meant = is_meant(r, k);
    char want[160];
    snprintf(want, sizeof(want), "%s in %s", k->with_value, k->with);
    if (v && !meant)
        published_fault(r, k->name, "; this model only has it with ", v, want);
    if (!v && meant)
        published_fault(r, k->name, " is missing beside ", NULL, want);
}

static void read_shape(struct reader *r, const struct iz_hf *hf,
                       const struct iz_hf_key *k)
{
    const json_t *v = iz_json_at(r->root, k->name);
    char *text = v ? iz_json_dump(v) : NULL;
    if (k->with)
        check_with(r, k, v);
    if (!v && spoken_for(r, hf, k))
        return;
    if (k->null_is_zero && json_is_number(v) && json_number_value(v) == 0)
        published_fault(r, k->name, "; without it stands ", v, "null");
    if (!v && !k->values)
        published_fault(r, k->name, " is missing", NULL, "");
    else if (!v && *k->values)
        put_member(r, k->key, k->values);
    else if (text && !seen(r, hf, k, v))
        put_member(r, k->key,
                   !k->null_is_zero || strcmp(text, "null") != 0 ? text
                   : k->values && k->values[0] == '['            ? "[]"
                                                                 : "0");
    free(text);
}

/* Nothing, as null and {} are. */
static bool is_void(const json_t *v)
{
    return !v || json_is_null(v) || (json_is_object(v) && !iz_json_count(v));
}

static bool all_among(const json_t *v, const char *values)
{
    size_t n = json_array_size(v), i = 0;
    if (!json_is_array(v))
        return iz_key_among(v, values);
    while (i < n && iz_key_among(json_array_get(v, i), values))
        i++;
    return i == n;
}

static void read_constant(struct reader *r, const struct iz_hf_key *k)
{
    const json_t *v = iz_json_at(r->root, k->name);
    const json_t *w = k->same ? iz_json_at(r->root, k->same) : NULL;
    if (!is_void(v) && !is_void(w) && !iz_json_same(v, w))
        published_fault(r, k->name, ", which is not ", v, k->same);
    if (!k->values || (!v && !k->told))
        return;
    if (k->told && r->notes && (!v || !iz_key_among(v, k->values)))
        fprintf(r->notes, "model.import: %s is not %s: %s\n", k->name,
                k->values, k->told);
    else if (!k->told && !all_among(v, k->values))
        published_fault(r, k->name, "; this model only has ", v, k->values);
}

/* "a, b" of what a type has that no program has; "" if that is not known. */
static void list_lacks(char *out, size_t size, const struct iz_hf *hf,
                       const char *type)
{
    const struct iz_hf_lack *l = hf->lacks;
    size_t n = 0;
    *out = '\0';
    for (; type && l && l->what && n < size; l++)
        if (iz_text_among(type, l->types))
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "",
                                  l->what);
}

/* The type that the file is of; NULL after a fault. */
static const struct iz_hf_type *read_type(struct reader *r,
                                          const struct iz_hf *hf)
{
    const json_t *v = iz_json_at(r->root, "model_type");
    const char *name = json_string_value(v);
    const struct iz_hf_type *t = hf->types;
    char known[1024], lacks[256];
    size_t n = 0;
    for (; t->name && (!name || strcmp(t->name, name) != 0); t++)
        if (n < sizeof(known))
            n += (size_t)snprintf(known + n, sizeof(known) - n, "%s\"%s\"",
                                  n ? "|" : "", t->name);
    if (t->name)
        return t;
    list_lacks(lacks, sizeof(lacks), hf, name);
    if (*lacks)
        published_fault(r, "model_type", "; no program here has ", v, lacks);
    if (*lacks)
        return NULL;
    published_fault(r, "model_type",
                    v ? "; this model only has " : " is missing: one of ", v,
                    known);
    return NULL;
}

/* ---- what is not read ---- */

/* Whether a row names it ("a"), or a member of it ("a.b"). */
static bool is_read(const struct reader *r, const struct iz_hf *hf,
                    const char *member, bool inside)
{
    size_t n = strlen(member);
    for (const struct iz_hf_key *k = hf->keys; k->name; k++)
        if (applies(k, r->type) && strncmp(k->name, member, n) == 0 &&
            (inside ? k->name[n] == '.' : !k->name[n] || k->name[n] == '.'))
            return true;
    return false;
}

static void check_inside(struct reader *r, const struct iz_hf *hf,
                         const char *member, const json_t *object)
{
    char name[160];
    const char *key = NULL;
    while ((key = iz_json_key(object, key))) {
        snprintf(name, sizeof(name), "%s.%.80s", member, key);
        if (!is_read(r, hf, name, false))
            published_fault(r, name, "; here such is not known",
                            json_object_get(object, key), "");
    }
}

static void tell_unread(struct reader *r, const struct iz_hf *hf)
{
    const char *key = NULL;
    int n = 0;
    while ((key = iz_json_key(r->root, key))) {
        const json_t *v = json_object_get(r->root, key);
        if (is_read(r, hf, key, true))
            check_inside(r, hf, key, v);
        if (is_read(r, hf, key, false) || iz_text_among(key, harmless) ||
            is_void(v) || json_is_false(v) || !r->notes)
            continue;
        fprintf(r->notes, "%s%s",
                n ? ", " : "model.import: ", n ? "" : r->path);
        fprintf(r->notes, "%s%.60s",
                n++ ? "" : ": keys that are not read: ", key);
    }
    if (n)
        fputc('\n', r->notes);
}

static void read_rows(struct reader *r, const struct iz_hf *hf)
{
    if (r->type->implies)
        fprintf(r->out, "%s%s", r->members++ ? ", " : "", r->type->implies);
    for (const struct iz_hf_key *k = hf->keys; k->name; k++) {
        if (!applies(k, r->type))
            continue;
        if (k->key)
            read_shape(r, hf, k);
        else
            read_constant(r, k);
    }
}

static char *read_keys(struct reader *r, const struct iz_hf *hf)
{
    const struct iz_hf_type *type = read_type(r, hf);
    struct iz_text text;
    r->type = type ? type : hf->types;
    r->out = iz_text_open(&text);
    fputc('{', r->out);
    read_rows(r, hf);
    tell_unread(r, hf);
    fputc('}', r->out);
    char *keys = iz_text_close(&text);
    if (!r->faults)
        return keys;
    free(keys);
    return NULL;
}

char *iz_published_read(const struct iz_hf *hf, const char *folder, FILE *notes,
                        FILE *err)
{
    char path[IZ_PATH_MAX + 32], *text = NULL;
    struct reader r = {.path = path, .notes = notes, .err = err};
    snprintf(path, sizeof(path), "%s/" IZ_PUBLISHED_CONFIG, folder);
    bool multimodal;
    json_t *root = iz_published_open(folder, &multimodal, err);
    r.root = root;
    if (multimodal && notes)
        fprintf(notes,
                "model.import: %s: text_config alone is read; an export is a "
                "model of text\n",
                path);
    if (root)
        text = read_keys(&r, hf);
    json_decref(root);
    return text;
}

/* ---- writing ---- */

const struct iz_hf_type *iz_published_type(const struct iz_hf *hf,
                                           const void *self)
{
    const char *name = hf->type ? hf->type(self) : hf->types->name;
    for (const struct iz_hf_type *t = hf->types; name && t->name; t++)
        if (strcmp(t->name, name) == 0)
            return t;
    return NULL;
}

/* As the files have it: several words are an array. */
static void print_value(FILE *out, const struct iz_key *k, const void *self)
{
    const char *list = (const char *)self + k->offset;
    if (k->type != IZ_KEY_LIST) {
        iz_key_print(out, k, self);
        return;
    }
    fputc('[', out);
    while (*list) {
        int n = (int)strcspn(list, ",");
        bool more = list[n];
        fprintf(out, "\"%.*s\"%s", n, list, more ? ", " : "");
        list += n + more;
    }
    fputc(']', out);
}

static void put_key(FILE *out, const struct iz_hf_key *k,
                    const struct iz_key *keys, const void *self)
{
    if (!k->key) {
        fprintf(out, "%.*s", (int)strcspn(k->values, "|"), k->values);
        return;
    }
    const struct iz_key *ours = iz_key_find(keys, k->key);
    assert(ours);
    const void *at = (const char *)self + ours->offset;
    bool zero = ours->type == IZ_KEY_LIST || ours->type == IZ_KEY_INTS
                    ? !*(const char *)at
                : ours->type == IZ_KEY_DOUBLE ? *(const double *)at == 0
                : ours->type == IZ_KEY_INT    ? *(const int *)at == 0
                                              : false;
    if (k->null_is_zero && zero)
        fputs("null", out);
    else
        print_value(out, ours, self);
}

/* Whether a row without key is: it has a value that means something. */
static bool is_written(const struct iz_hf_key *k)
{
    return k->values && !k->told;
}

/* Whether a member of a config.json is said by this program. */
static bool is_ours(const struct iz_hf *hf, const struct iz_hf_type *t,
                    const char *member)
{
    /* What is written is in no fewer bits. */
    static const char others[] = "architectures|model_type|torch_dtype|dtype|"
                                 "transformers_version|quantization_config";
    size_t n = strlen(member);
    for (const struct iz_hf_key *k = hf->keys; k->name; k++)
        if (applies(k, t) && (k->key || is_written(k)) &&
            strncmp(k->name, member, n) == 0 &&
            (k->name[n] == '.' || !k->name[n]))
            return true;
    return iz_text_among(member, others);
}

/* What means nothing here, such as the ids of the tokenizer, is kept. */
static int put_rest(FILE *out, const struct iz_hf *hf,
                    const struct iz_hf_type *t, const char *like)
{
    const char *key = NULL;
    json_t *root = iz_published_open(like, NULL, stderr);
    if (!root)
        return -EINVAL;
    while ((key = iz_json_key(root, key))) {
        char *text = iz_json_dump(json_object_get(root, key));
        if (text && !strpbrk(key, "\"\\") && !is_ours(hf, t, key)) {
            fprintf(out, ",\n  \"%s\": ", key);
            iz_json_put(out, text);
        }
        free(text);
    }
    json_decref(root);
    return 0;
}

static void put_rows(FILE *out, const struct iz_section *model,
                     const struct iz_hf_type *t, const void *self)
{
    struct iz_nest n = {.out = out, .indent = 2};
    for (const struct iz_hf_key *k = model->hf->keys; k->name; k++) {
        if (!applies(k, t) || (k->write && !k->write(self)) ||
            !(k->key || is_written(k)))
            continue;
        iz_nest_name(&n, k->name);
        put_key(out, k, model->keys, self);
    }
    while (n.depth)
        iz_nest_end(&n);
}

char *iz_published_text(const struct iz_section *model, const void *self,
                        enum iz_dtype t, const char *like)
{
    static const char *const types[] = {
        [IZ_F32] = "float32", [IZ_BF16] = "bfloat16", [IZ_F16] = "float16"};
    const struct iz_hf_type *type = iz_published_type(model->hf, self);
    struct iz_text text;
    if (!type) {
        iz_text_refuse(stderr,
                       "export: no published type of model has this shape");
        return NULL;
    }
    FILE *out = iz_text_open(&text);
    fprintf(out, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\"",
            type->architecture, type->name);
    put_rows(out, model, type, self);
    int err = 0;
    if (like && *like)
        err = put_rest(out, model->hf, type, like);
    else /* a type's own may lie beyond the vocabulary */
        fputs(",\n  \"pad_token_id\": null", out);
    fprintf(out, ",\n  \"torch_dtype\": \"%s\"\n}\n", types[t]);
    char *config = iz_text_close(&text);
    if (!err)
        return config;
    free(config);
    return NULL;
}

/* Keys of the section "model" as JSON. */
static json_t *own_keys(const struct iz_section *model, const void *self)
{
    struct iz_text text;
    FILE *out = iz_text_open(&text);
    for (const struct iz_key *k = model->keys; k->name; k++) {
        fprintf(out, "%s\"%s\": ", k == model->keys ? "{" : ", ", k->name);
        print_value(out, k, self);
    }
    fputc('}', out);
    char *all = iz_text_close(&text);
    json_t *keys = iz_json_open(all, (int64_t)strlen(all));
    free(all);
    return keys;
}

/* Whether 0 stands for a value that is only written where it matters. */
static bool left_open(const struct iz_hf *hf, const char *key, const json_t *v,
                      const void *self)
{
    const struct iz_hf_key *k = hf->keys;
    while (k->name && !(k->key && strcmp(k->key, key) == 0))
        k++;
    return k->write && !k->write(self) && iz_json_number(v, 0) == 0;
}

/* What a reader would make of the text that is written. */
static char *read_back(const struct iz_section *model, const void *self,
                       FILE *err)
{
    char *config = iz_published_text(model, self, IZ_F32, NULL), *keys = NULL;
    json_t *root =
        config ? iz_json_open(config, (int64_t)strlen(config)) : NULL;
    if (root)
        keys = read_keys(&(struct reader){.root = root,
                                          .path = IZ_PUBLISHED_CONFIG,
                                          .err = err},
                         model->hf);
    json_decref(root);
    free(config);
    return keys;
}

int iz_published_same(const struct iz_section *model, const void *self,
                      const char *folder, FILE *err)
{
    char *text = folder ? iz_published_read(model->hf, folder, NULL, err)
                        : read_back(model, self, err);
    json_t *read = text ? iz_json_open(text, (int64_t)strlen(text)) : NULL;
    json_t *own = own_keys(model, self);
    const char *key = NULL;
    int s = read && own ? 0 : -EBADMSG;
    while (!s && (key = iz_json_key(read, key))) {
        const json_t *v = json_object_get(read, key);
        const json_t *w = json_object_get(own, key);
        char *a = iz_json_dump(v), *b = w ? iz_json_dump(w) : NULL;
        if (w && !iz_json_same(v, w) && !left_open(model->hf, key, v, self))
            s = iz_text_refuse(err,
                               "export: %s%s" IZ_PUBLISHED_CONFIG
                               ": model.%s is %s, and the run's is %s",
                               folder ? folder : "", folder ? "/" : "a ", key,
                               a, b);
        free(a);
        free(b);
    }
    json_decref(own);
    json_decref(read);
    free(text);
    return s ? -EBADMSG : 0;
}
