/* SPDX-License-Identifier: Apache-2.0 */
/* What a folder in the layout of Hugging Face would be here, without a run:
 * which program reads it, which tensor is what, what is not read, and what
 * contradicts; and, by that program, its loss of given data. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/formats/published.h"
#include "runtime/formats/tokens.h"
#include "runtime/hf/tensors.h"
#include "runtime/run/run.h"
#include "tools/ckpt.h"

#define KEY "check"

/* The program that reads this model_type; NULL, told: none does. */
static const struct iz_program *find_reader(const char *folder)
{
    json_t *root = iz_published_open(folder, NULL, stderr);
    const char *type = iz_json_text_of(root, "model_type");
    const struct iz_program *found = NULL, *p;
    for (int i = 0; root && !found && (p = ckpt_program(i)); i++)
        for (const struct iz_hf_type *t = p->section.hf ? p->section.hf->types
                                                        : NULL;
             t && t->name; t++)
            if (strcmp(t->name, type) == 0)
                found = p;
    if (found)
        printf("model_type %s, read by %s\n", type, found->name);
    else if (root)
        iz_text_refuse(stderr,
                       KEY ": %s/" IZ_PUBLISHED_CONFIG
                           ": model_type \"%s\" is read by none",
                       folder, type);
    json_decref(root);
    return found;
}

/* The section "model" as the folder says it.  Where samples may have any length
 * they are short. */
static int read_section(const struct iz_program *p, const char *folder)
{
    char import[IZ_PATH_MAX + 32], batch[] = "train_batch_size=1",
                                   seq[] = "model.seq=2";
    char *set[] = {batch, import, seq};
    struct iz_config c;
    bool any = !*iz_published_resized(p->section.hf, false);
    snprintf(import, sizeof(import), "model.import=%s", folder);
    free(iz_published_read(p->section.hf, folder, stdout, NULL));
    return iz_config_read(&c, &p->section, NULL, set, any ? 3 : 2, 1, NULL,
                          stderr);
}

static void print_shape(const struct iz_st_tensor *e)
{
    for (int i = 0; i < e->dims; i++)
        printf("%s%" PRId64, i ? ", " : "[", e->shape[i]);
    printf("%s %s  ", e->dims ? "]" : "[]", e->dtype);
}

/* What a tensor is. */
static void print_entry(const struct iz_hf_map *map, const struct iz_model *m,
                        const struct iz_st_tensor *e)
{
    struct iz_coded_name name;
    const struct iz_hf_tensor *t = iz_hf_map_find(map, e->name);
    const struct iz_hf_tensor *whole = !t && iz_coded_name(e->name, &name)
                                           ? iz_hf_map_find(map, name.of)
                                           : NULL;
    printf("%s ", e->name);
    print_shape(e);
    if (whole) {
        printf("belongs to %s, %s\n", name.of, iz_coded_what(name.kind));
    } else if (t) {
        const struct iz_param *q = &m->unit[t->unit].param[t->param];
        printf("is %s", q->name);
        if (t->rows < q->rows && !t->times)
            printf(", rows %" PRId64 " to %" PRId64, t->row,
                   t->row + t->rows - 1);
        if (t->cols < q->cols && !t->times)
            printf(", columns %" PRId64 " to %" PRId64, t->col,
                   t->col + t->cols - 1);
        printf("%s%s\n", t->transposed ? ", transposed" : "",
               t->tied ? ", a second time" : "");
    } else {
        printf("%s\n", iz_hf_map_ignores(map, e->name) ? "means nothing here"
                                                       : "is unknown");
    }
}

static int print_entries(const struct iz_hf *hf, const struct iz_model *m,
                         const char *path)
{
    struct iz_hf_folder f = {0};
    struct iz_hf_map map;
    int err = iz_hf_map_open(&map, hf, m);
    if (!err)
        err = iz_hf_folder_open(&f, path, NULL, stderr);
    for (int i = 0; i < f.n_files && !err; i++)
        for (int k = 0; k < f.file[i].n; k++)
            print_entry(&map, m, &f.file[i].tensor[k]);
    iz_hf_folder_close(&f);
    iz_hf_map_close(&map);
    return err;
}

/* All values, once: whether they are finite, and second names equal. */
static int read_values(struct iz_hf_reader *r, const struct iz_model *m)
{
    float *buf = iz_take(IZ_HF_BUFFER, sizeof(*buf), "values");
    int64_t read = 0;
    int err = 0;
    for (int u = 0; u < m->n_units && !err; u++) {
        int64_t all = 0;
        for (int part = 0; part < IZ_PARTS; part++)
            all += iz_unit_elems(&m->unit[u], (enum iz_unit_part)part);
        for (int64_t i = 0, n; i < all && !err; i += n) {
            n = min64(all - i, IZ_HF_BUFFER);
            err = iz_hf_read(r, u, i, n, buf);
        }
        read += all;
    }
    free(buf);
    if (!err)
        printf("%" PRId64 " parameters in %d units, all finite\n", read,
               m->n_units);
    return err;
}

/* The loss that the program computes of the data, all of it; false: it does
 * not, and has told why. */
static bool print_loss(const struct ckpt_options *o, const struct iz_program *p,
                       const struct iz_model *m, struct iz_coll *coll)
{
    char data[IZ_PATH_MAX + 32], val[IZ_PATH_MAX + 32],
        import[IZ_PATH_MAX + 32], frozen[IZ_KEY_NAME_MAX + 128];
    const char *set[CKPT_SETTINGS + 1] = {"train_batch_size=1",
                                          "zero_optimization.stage=3",
                                          "run.eval_batches=1000000000",
                                          data,
                                          val,
                                          import,
                                          frozen};
    snprintf(data, sizeof(data), "data.path=%s", o->data);
    snprintf(val, sizeof(val), "data.val_path=%s", o->data);
    snprintf(import, sizeof(import), "model.import=%s", o->dir);
    ckpt_freeze(frozen, sizeof(frozen), m);
    memcpy(set + 7, o->set, sizeof(o->set));
    double loss = ckpt_loss(coll, p, NULL, set);
    if (!isnan(loss) && coll->rank == 0)
        printf("loss %.9g nats per token of %s\n", loss, o->data);
    return !isnan(loss);
}

int ckpt_check(const struct ckpt_options *o, struct iz_coll *coll)
{
    const struct iz_program *p = find_reader(o->dir);
    struct iz_hf_reader *r = NULL;
    struct iz_model *m = NULL;
    int err = p ? read_section(p, o->dir) : -EINVAL;
    if (!err)
        err = p->open(&m, p->section.target);
    if (!err)
        err = print_entries(p->section.hf, m, o->dir);
    if (!err)
        err = iz_hf_read_open(&r, p->section.hf, m, KEY, o->dir, stderr);
    if (!err)
        err = read_values(r, m);
    if (m && iz_tokens_check(o->dir, m->vocab, stderr))
        err = -EINVAL;
    printf("%s %s be imported\n", o->dir, err ? "cannot" : "can");
    if (!err && o->data && !print_loss(o, p, m, coll))
        err = -EINVAL;
    iz_hf_read_close(&r);
    iz_model_close(&m);
    return err;
}
