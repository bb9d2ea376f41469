/* SPDX-License-Identifier: Apache-2.0 */
/* Translating config.json by the table of the model; see hf_config.h. */
#include "runtime/hf_config.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/layer.h"
#include "runtime/hf_file.h"

struct reader {
    const char *path;
    const struct iz_json *root;
    FILE *err, *out;
    int faults, members;
};

/* ---- reading ---- */

static void fault(struct reader *r, const char *name, const char *what,
                  const struct iz_json *found, const char *want)
{
    char *text = found ? iz_json_dump(found) : NULL;

    r->faults++;
    if (r->err)
        fprintf(r->err, "izar: model.import: %s: %s%s%.60s%s%s\n", r->path,
                name, text ? " is " : "", text ? text : "", what, want);
    free(text);
}

/* The member "a.b" of nested objects; NULL: there is none. */
static const struct iz_json *lookup(const struct iz_json *v, const char *name)
{
    char key[64];

    while (v && *name) {
        size_t n = strcspn(name, ".");

        snprintf(key, sizeof key, "%.*s", (int)n, name);
        v = iz_json_member(v, key);
        name += n + (name[n] == '.');
    }
    return v;
}

/* Whether v is one of the JSON values of "a|b". */
static bool is_one_of(const struct iz_json *v, const char *values)
{
    bool same = false;

    while (*values && !same) {
        size_t n = strcspn(values, "|");
        struct iz_json *w = iz_json_open(values, (int64_t)n);

        same = w && iz_json_equal(v, w);
        iz_json_close(&w);
        values += n + (values[n] == '|');
    }
    return same;
}

static void put_member(struct reader *r, const char *key, const char *text)
{
    fprintf(r->out, "%s\"%s\": %s", r->members++ ? ", " : "", key, text);
}

/* Two names of one key must say the same: only the first is put. */
static bool seen(struct reader *r, const struct iz_hf *hf,
                 const struct iz_hf_key *k, const struct iz_json *v)
{
    for (const struct iz_hf_key *p = hf->keys; p < k; p++) {
        const struct iz_json *w = lookup(r->root, p->name);

        if (!p->key || strcmp(p->key, k->key) != 0 || !w)
            continue;
        if (!iz_json_equal(v, w))
            fault(r, k->name, ", which is not ", v, p->name);
        return true;
    }
    return false;
}

static void read_shape(struct reader *r, const struct iz_hf *hf,
                       const struct iz_hf_key *k)
{
    const struct iz_json *v = lookup(r->root, k->name);
    char *text = v ? iz_json_dump(v) : NULL;

    if (!v && !k->values)
        fault(r, k->name, " is missing", NULL, "");
    else if (!v && *k->values)
        put_member(r, k->key, k->values);
    else if (text && !seen(r, hf, k, v))
        put_member(r, k->key, text);
    free(text);
}

static void read_constant(struct reader *r, const struct iz_hf_key *k)
{
    const struct iz_json *v = lookup(r->root, k->name);

    if (v && !is_one_of(v, k->values))
        fault(r, k->name, "; this model only has ", v, k->values);
}

static char *read_keys(struct reader *r, const struct iz_hf *hf)
{
    char *text = NULL;
    size_t bytes = 0;

    r->out = open_memstream(&text, &bytes);
    if (!r->out)
        return NULL;
    fputc('{', r->out);
    for (const struct iz_hf_key *k = hf->keys; k->name; k++)
        if (k->key)
            read_shape(r, hf, k);
        else
            read_constant(r, k);
    fputc('}', r->out);
    if ((fclose(r->out) != 0) | (r->faults != 0)) {
        free(text);
        return NULL;
    }
    return text;
}

char *iz_hf_config_read(const struct iz_hf *hf, const char *folder, FILE *err)
{
    char path[IZ_PATH_MAX + 32], *text = NULL;
    struct reader r = {.path = path, .err = err};
    struct iz_json *root;

    snprintf(path, sizeof path, "%s/" IZ_HF_CONFIG, folder);
    root = iz_hf_json_read(path, err);
    r.root = root;
    if (root)
        text = read_keys(&r, hf);
    iz_json_close(&root);
    return text;
}

/* ---- writing ---- */

/* With a point even if it is whole: others tell the types apart. */
static void put_double(FILE *out, double x)
{
    char text[32];

    snprintf(text, sizeof text, "%.17g", x);
    fprintf(out, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
}

static void put_value(FILE *out, const struct iz_key *k, const void *target)
{
    const void *at = (const char *)target + k->offset;

    if (k->type == IZ_KEY_INT)
        fprintf(out, "%d", *(const int *)at);
    else if (k->type == IZ_KEY_DOUBLE)
        put_double(out, *(const double *)at);
    else if (k->type == IZ_KEY_BOOL)
        fputs(*(const bool *)at ? "true" : "false", out);
    else
        assert(!"a shape is a number or a boolean");
}

/* Bytes of the section in "section.key"; 0: none. */
static size_t section_of(const char *name)
{
    const char *dot = strchr(name, '.');

    return dot ? (size_t)(dot - name) : 0;
}

/* Rows of one section follow each other and become one object. */
static void put_name(FILE *out, const struct iz_hf_key *k, const char *before)
{
    size_t n = section_of(k->name), b = section_of(before);
    bool same = n == b && strncmp(k->name, before, n) == 0;

    if (b && !same)
        fputs("\n  }", out);
    if (n && !same)
        fprintf(out, ",\n  \"%.*s\": {\n    ", (int)n, k->name);
    else
        fputs(n ? ",\n    " : ",\n  ", out);
    fprintf(out, "\"%s\": ", k->name + n + (n > 0));
}

static void put_key(FILE *out, const struct iz_hf_key *k,
                    const struct iz_section *model)
{
    const struct iz_key *ours = model->keys;

    if (!k->key) {
        fprintf(out, "%.*s", (int)strcspn(k->values, "|"), k->values);
        return;
    }
    while (ours->name && strcmp(ours->name, k->key) != 0)
        ours++;
    assert(ours->name);
    put_value(out, ours, model->target);
}

char *iz_hf_config_text(const struct iz_section *model, enum iz_dtype t)
{
    static const char *const types[] = {
        [IZ_F32] = "float32", [IZ_BF16] = "bfloat16", [IZ_F16] = "float16"};
    const char *before = "";
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);

    if (!out)
        return NULL;
    fprintf(out, "{\n  \"architectures\": [\"%s\"]", model->hf->architecture);
    for (const struct iz_hf_key *k = model->hf->keys; k->name; k++) {
        put_name(out, k, before);
        put_key(out, k, model);
        before = k->name;
    }
    fprintf(out, "%s,\n  \"torch_dtype\": \"%s\"\n}\n",
            section_of(before) ? "\n  }" : "", types[t]);
    if (ferror(out) | (fclose(out) != 0)) {
        free(text);
        return NULL;
    }
    return text;
}
