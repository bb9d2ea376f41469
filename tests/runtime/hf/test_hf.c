/* SPDX-License-Identifier: Apache-2.0 */
/* Published checkpoints of a toy model whose table uses all there is: tensors
 * that lie the other way round, parameters cut into several by columns and by
 * rows, a second name.  Written by some ranks, read in any ranges. */
#include "tests/runtime/fixture.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/mix.h"
#include "runtime/base/durable.h"
#include "runtime/config/published.h"
#include "runtime/hf/folder.h"
#include "runtime/hf/map.h"
#include "runtime/hf/read.h"
#include "runtime/hf/write.h"
#include "tests/runtime/disk.h"

enum { C = 6, KV = 2, V = 7, LAYERS = 2, UNITS = LAYERS + 2 };
enum { BIG = 150, WIDE = 40, ROOM = 8192 };

/* ---- the toy ---- */

static struct toy {
    int layers;
    double base;
    bool gated, two;
    int window;
} toy = {LAYERS, 1e4, true, false, 0};

static bool never(const void *self)
{
    return false;
}

/* Queries have C columns, keys and values KV each. */
static int64_t cut_qkv(const void *self, int i)
{
    return i == 0 ? C : KV;
}

static const struct iz_hf_name names[] = {
    {.tensor = "model.embed.weight", .param = "wte"},
    {.tensor = "model.layers.{}.q.weight|model.layers.{}.k.weight|"
               "model.layers.{}.v.weight",
     .param = "h.{}.qkv.w",
     .layout = IZ_HF_TRANSPOSED,
     .cut = cut_qkv},
    {.tensor =
         "model.layers.{}.q.bias|model.layers.{}.k.bias|model.layers.{}.v.bias",
     .param = "h.{}.qkv.b",
     .layout = IZ_HF_TRANSPOSED,
     .cut = cut_qkv},
    {.tensor = "model.layers.{}.gate|model.layers.{}.up",
     .param = "h.{}.gate_up",
     .layout = IZ_HF_SAME},
    {.tensor = "model.layers.{}.a|model.layers.{}.b|model.layers.{}.c",
     .param = "h.{}.rows",
     .layout = IZ_HF_ROWS},
    {.tensor = "model.layers.{}.down.weight",
     .param = "h.{}.down",
     .layout = IZ_HF_TRANSPOSED},
    {.tensor = "model.norm.weight", .param = "norm"},
    {.tensor = "model.big", .param = "big", .layout = IZ_HF_TRANSPOSED},
    {.tensor = "lm_head.weight", .param = "wte", .tied = true},
    {.tensor = "model.layers.{}.inv_freq"},
    {0},
};

static const struct iz_hf_key hf_keys[] = {
    {.name = "num_layers", .key = "layers"},
    {.name = "n_layer", .key = "layers", .write = never},
    {.name = "rope_theta", .key = "base", .values = "10000.0"},
    {.name = "window",
     .key = "window",
     .values = "7",
     .types = "toy2|toy",
     .null_is_zero = true},
    {.name = "kind", .values = "2", .types = "toy2"},
    {.name = "mlp.gated", .key = "gated", .values = "true"},
    {.name = "mlp.kind", .values = "\"dense\""},
    {.name = "act", .values = "\"silu\"|\"swish\""},
    {0},
};

static const struct iz_hf_type hf_types[] = {
    {"toy", "ToyForCausalLM", NULL},
    {"toy2", "Toy2ForCausalLM", "\"two\": true"},
    {"toy3", "Toy3ForCausalLM", NULL},
    {0},
};

static const char *hf_type(const void *self)
{
    const struct toy *t = self;

    return t->layers > 9 ? NULL : t->two ? "toy2" : "toy";
}

static const struct iz_hf hf = {.types = hf_types,
                                .type = hf_type,
                                .prefix = "model.",
                                .names = names,
                                .keys = hf_keys};

static const struct iz_key keys[] = {
    {.name = "layers",
     .type = IZ_KEY_INT,
     .offset = offsetof(struct toy, layers)},
    {.name = "base",
     .type = IZ_KEY_DOUBLE,
     .offset = offsetof(struct toy, base)},
    {.name = "gated",
     .type = IZ_KEY_BOOL,
     .offset = offsetof(struct toy, gated)},
    {.name = "window",
     .type = IZ_KEY_INT,
     .offset = offsetof(struct toy, window)},
    {.name = NULL},
};

static const struct iz_section section = {
    .keys = keys, .target = &toy, .hf = &hf};

static int block_open(struct iz_unit *u, int i)
{
    const struct iz_param list[] = {
        {.name = "qkv.w", .rows = C, .cols = C + 2 * KV},
        {.name = "qkv.b", .rows = 1, .cols = C + 2 * KV},
        {.name = "gate_up", .rows = C, .cols = 8},
        {.name = "rows", .rows = 9, .cols = 5},
        {.name = "down", .rows = 4, .cols = C},
    };
    char prefix[16];

    snprintf(prefix, sizeof(prefix), "h.%d.", i);
    return iz_unit_params(u, list, N_OF(list), prefix);
}

static struct iz_model *model_open(void)
{
    const struct iz_param wte = {.name = "wte", .rows = V, .cols = C};
    /* One that is turned in several tiles. */
    const struct iz_param head[] = {
        {.name = "norm", .rows = 1, .cols = C},
        {.name = "big", .rows = BIG, .cols = WIDE},
    };
    struct iz_model *m;

    assert_int_equal(iz_model_open(&m, "toy", UNITS, sizeof(toy)), 0);
    *(struct toy *)m->self = toy;
    assert_int_equal(iz_unit_params(&m->unit[0], &wte, 1, ""), 0);
    for (int i = 0; i < LAYERS; i++)
        assert_int_equal(block_open(&m->unit[1 + i], i), 0);
    assert_int_equal(iz_unit_params(&m->unit[UNITS - 1], head, 2, ""), 0);
    return m;
}

static int64_t elements(const struct iz_model *m, int u)
{
    int64_t n = 0;

    for (int i = 0; i < m->unit[u].n_params; i++)
        n += m->unit[u].param[i].rows * m->unit[u].param[i].cols;
    return n;
}

/* Element i of unit u: exact in every type. */
static float value(int u, int64_t i)
{
    return (float)(iz_mix((uint64_t)(u * 1000 + i)) % 255) / 128 - 1;
}

/* ---- writing ---- */

struct job {
    enum iz_dtype type;
    int64_t file_bytes;
    int64_t piece;
    const char *name;
};

/* Each rank writes its shard of every unit, padding of the last one too. */
static int write_shards(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct iz_model *m = model_open();
    struct iz_hf_map map;
    struct iz_hf_order o = {.folder = in_folder(j->name),
                            .map = &map,
                            .type = j->type,
                            .file_bytes = j->file_bytes,
                            .file = IZ_HF_SINGLE,
                            .config_file = IZ_HF_CONFIG};
    struct iz_hf_writer *w;
    float in[ROOM];
    char *text = iz_hf_config_text(&section, m->self, j->type, NULL);
    int err;

    o.config = text;
    assert_int_equal(iz_hf_map_open(&map, &hf, m), 0);
    err = iz_hf_write_open(&w, &o, c) ? 1 : 0;
    for (int u = 0; u < UNITS && !err; u++) {
        int64_t n = elements(m, u), shard = (n + c->size - 1) / c->size + 1;

        for (int64_t i = shard * c->rank; i < shard * (c->rank + 1);
             i += j->piece) {
            int64_t k = shard * (c->rank + 1) - i;

            k = k < j->piece ? k : j->piece;
            for (int64_t e = 0; e < k; e++)
                in[e] = i + e < n ? value(u, i + e) : 99;
            iz_hf_write(w, u, i, in, k);
        }
    }
    if (!err)
        err = iz_hf_write_close(&w, 0) ? 2 : 0;
    iz_hf_map_close(&map);
    iz_model_close(&m);
    free(text);
    return err;
}

static const struct iz_st_tensor *find(const struct iz_hf_folder *f,
                                       const char *name)
{
    for (int i = 0; i < f->n_files; i++)
        if (iz_st_find(&f->file[i], name))
            return iz_st_find(&f->file[i], name);
    fail_msg("no tensor %s", name);
    return NULL;
}

static float element(const struct iz_st_tensor *e, int64_t i)
{
    enum iz_dtype t = IZ_F32;
    float raw, out;

    assert_true(iz_st_dtype_read(e->dtype, &t));
    memcpy(&raw, e->data + i * iz_dtype_bytes(t), (size_t)iz_dtype_bytes(t));
    iz_cast(&out, IZ_F32, &raw, t, 1);
    return out;
}

/* Tensor `name` is [rows, cols] (cols 0: a vector), and its element (r, c) is
 * the unit's element at + r down + c across. */
static void holds(const struct iz_hf_folder *f, const char *name, int unit,
                  int64_t rows, int64_t cols, int64_t at, int64_t down,
                  int64_t across)
{
    const struct iz_st_tensor *e = find(f, name);
    int64_t n = cols ? cols : 1;

    assert_int_equal(e->dims, cols ? 2 : 1);
    assert_int_equal(e->shape[0], rows);
    if (cols)
        assert_int_equal(e->shape[1], cols);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < n; c++)
            if (element(e, r * n + c) !=
                value(unit, at + r * down + c * across))
                fail_msg("%s [%d, %d]", name, (int)r, (int)c);
}

/* By hand, from the shapes above: what a reader of the other side expects. */
static void folder_is_right(const char *path)
{
    const int64_t q = C + 2 * KV, b = C * q, g = b + q, r = g + C * 8,
                  d = r + 45;
    struct iz_hf_folder f;

    assert_int_equal(iz_hf_folder_open(&f, path, stderr), 0);
    holds(&f, "model.embed.weight", 0, V, C, 0, C, 1);
    holds(&f, "model.norm.weight", 3, C, 0, 0, 1, 0);
    holds(&f, "model.big", 3, WIDE, BIG, C, 1, WIDE);
    for (int i = 0; i < LAYERS; i++) {
        char n[64];

#define IN(name) (snprintf(n, sizeof(n), "model.layers.%d." name, i), n)
        holds(&f, IN("q.weight"), 1 + i, C, C, 0, 1, q);
        holds(&f, IN("k.weight"), 1 + i, KV, C, C, 1, q);
        holds(&f, IN("v.weight"), 1 + i, KV, C, C + KV, 1, q);
        holds(&f, IN("q.bias"), 1 + i, C, 0, b, 1, 0);
        holds(&f, IN("k.bias"), 1 + i, KV, 0, b + C, 1, 0);
        holds(&f, IN("v.bias"), 1 + i, KV, 0, b + C + KV, 1, 0);
        holds(&f, IN("gate"), 1 + i, C, 4, g, 8, 1);
        holds(&f, IN("up"), 1 + i, C, 4, g + 4, 8, 1);
        holds(&f, IN("a"), 1 + i, 3, 5, r, 5, 1);
        holds(&f, IN("b"), 1 + i, 3, 5, r + 15, 5, 1);
        holds(&f, IN("c"), 1 + i, 3, 5, r + 30, 5, 1);
        holds(&f, IN("down.weight"), 1 + i, C, 4, d, 1, C);
#undef IN
    }
    iz_hf_folder_close(&f);
}

static void any_ranks_write_the_same_files(void **state)
{
    static const struct job jobs[] = {
        {IZ_F32, 1 << 20, 7000, "a"}, {IZ_BF16, 1 << 20, 7, "b"},
        {IZ_F16, 200, 33, "c"},       {IZ_F32, 1, 111, "d"},
        {IZ_BF16, 300, 13, "e"},
    };

    for (int i = 0; i < N_OF(jobs); i++) {
        struct job j = jobs[i];
        int result[8];

        on_ranks(1 + i % 4, write_shards, &j, result);
        for (int k = 0; k < 1 + i % 4; k++)
            if (result[k])
                fail_msg("rank %d of %d: %d: %s", k, 1 + i % 4, result[k],
                         said);
        folder_is_right(in_folder(j.name));
    }
    assert_int_equal(access(in_folder("d/model.safetensors"), F_OK), -1);
    assert_int_equal(access(in_folder("a.tmp"), F_OK), -1);
}

/* ---- reading ---- */

static struct iz_hf_reader *reader_open(const struct iz_model *m,
                                        const char *name)
{
    struct iz_hf_reader *r;

    assert_int_equal(iz_hf_read_open(&r, &hf, m, in_folder(name), stderr), 0);
    return r;
}

static void any_range_reads_back(void **state)
{
    struct job j = {IZ_BF16, 400, 500, "x"};
    struct iz_model *m = model_open();
    struct iz_hf_reader *r;
    float out[ROOM];

    assert_int_equal(write_shards(&alone, &j), 0);
    r = reader_open(m, "x");
    for (int k = 0; k < 3000; k++) {
        int u = (int)(random_next() % UNITS);
        int64_t all = elements(m, u);
        int64_t from = (int64_t)(random_next() % (uint64_t)all);
        int64_t n = 1 + (int64_t)(random_next() % (uint64_t)(all - from));

        for (int64_t i = 0; i < n; i++)
            out[i] = 99;
        out[n] = 98;
        assert_int_equal(iz_hf_read(r, u, from, n, out), 0);
        for (int64_t i = 0; i < n; i++)
            if (out[i] != value(u, from + i))
                fail_msg("unit %d, %d + %d: %g", u, (int)from, (int)i, out[i]);
        assert_true(out[n] == 98);
    }
    iz_hf_read_close(&r);
    iz_model_close(&m);
}

/* Every element of a range lies in one rectangle of one tensor. */
static void rectangles_tile_any_range(void **state)
{
    struct iz_model *m = model_open();
    struct iz_hf_map map;
    char seen[ROOM];

    assert_int_equal(iz_hf_map_open(&map, &hf, m), 0);
    for (int k = 0; k < 3000; k++) {
        int u = (int)(random_next() % UNITS);
        int64_t all = elements(m, u), from, to;

        from = (int64_t)(random_next() % (uint64_t)all);
        to = from + 1 + (int64_t)(random_next() % (uint64_t)(all - from));
        memset(seen, 0, sizeof(seen));
        for (int i = 0; i < map.n; i++) {
            const struct iz_hf_tensor *t = &map.tensor[i];
            struct iz_hf_rect q[3];
            int n = t->unit == u && !t->tied ? iz_hf_rects(t, from, to, q) : 0;

            while (n-- > 0)
                for (int64_t r = 0; r < q[n].rows; r++)
                    for (int64_t c = 0; c < q[n].cols; c++)
                        seen[iz_hf_flat(t, &q[n]) + r * t->width + c]++;
        }
        for (int64_t i = 0; i < all; i++)
            assert_int_equal(seen[i], i >= from && i < to);
    }
    iz_hf_map_close(&map);
    iz_model_close(&m);
}

/* ---- refusals ---- */

static void a_table_that_does_not_fit_is_refused(void **state)
{
    struct iz_model *m = model_open();
    struct iz_hf_map map;

    m->unit[1].param[2].cols = 7; /* two tensors do not share 7 columns */
    listen_begin();
    assert_int_equal(iz_hf_map_open(&map, &hf, m), -EINVAL);
    listen_end();
    assert_said("h.0.gate_up: its tensors do not cover it");
    m->unit[1].param[2].cols = 8;
    strcpy(m->unit[2].param[4].name, "h.one.down");
    listen_begin();
    assert_int_equal(iz_hf_map_open(&map, &hf, m), -EINVAL);
    listen_end();
    assert_said("h.one.down: its name in published checkpoints is not known");
    iz_model_close(&m);
}

static int write_too_much(struct iz_coll *c, void *arg)
{
    return write_shards(c, &(struct job){IZ_F32, 1 << 20, 64, "small/out"});
}

static void a_full_disk_leaves_nothing(void **state)
{
    int result[2];

    mount_small("small", 4, 0);
    on_ranks(2, write_too_much, NULL, result);
    assert_int_equal(result[0], 1);
    assert_int_equal(result[1], 1);
    assert_said("No space left on device");
    assert_int_equal(access(in_folder("small/out"), F_OK), -1);
    assert_int_equal(access(in_folder("small/out.tmp"), F_OK), -1);
}

static const char *name_of_folder(int i)
{
    static char name[16];

    snprintf(name, sizeof(name), "f/%d", i);
    return in_folder(name);
}

static int export_folder(int i)
{
    char name[16];
    int err;

    snprintf(name, sizeof(name), "f/%d", i);
    listen_begin();
    err = write_shards(&alone, &(struct job){IZ_BF16, 300, 7000, name});
    listen_end();
    return err;
}

static void an_export_has_its_name_when_all_of_it_is_on_the_disk(void **state)
{
    assert_durable_or_refused(export_folder, name_of_folder);
}

static const char *name_of_kept(int i)
{
    static char name[32];

    snprintf(name, sizeof(name), "kept%d/imported.json", i);
    return in_folder(name);
}

static int keep(int i)
{
    char name[16];
    int err;

    snprintf(name, sizeof(name), "kept%d", i);
    listen_begin();
    err = iz_durable_make_directories("test", in_folder(name));
    if (!err)
        err = iz_hf_config_keep(in_folder(name), in_folder("from"), false);
    listen_end();
    return err;
}

static void what_a_run_keeps_of_an_import_is_on_the_disk(void **state)
{
    assert_int_equal(iz_durable_make_directories("test", in_folder("from")), 0);
    assert_int_equal(
        iz_durable_create("test", in_folder("from/config.json"), "{}"), 0);
    assert_durable_or_refused(keep, name_of_kept);
}

/* ---- config.json ---- */

static char *config_of(const char *text)
{
    FILE *f = fopen(in_folder("config.json"), "w");
    char *out;

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    listen_begin();
    out = iz_hf_config_read(&hf, folder, stderr);
    listen_end();
    return out;
}

static void shapes_are_read(const char *text, const char *want)
{
    char *got = config_of(text);

    if (!got)
        fail_msg("%s", said);
    assert_string_equal(got, want);
    free(got);
}

static char *text_of(struct toy t, const char *like)
{
    char *text = iz_hf_config_text(&section, &t, IZ_BF16, like);

    assert_non_null(text);
    return text;
}

static void keys_of_the_model_come_from_the_config(void **state)
{
    char *text = text_of(toy, NULL);

    shapes_are_read(text, "{\"layers\": 2, \"base\": 10000.0, \"window\": 0, "
                          "\"gated\": true}");
    assert_non_null(strstr(text, "\"window\": null"));
    assert_null(strstr(text, "n_layer\""));
    assert_non_null(strstr(text, "\"mlp\": {\n    \"gated\": true,\n    "
                                 "\"kind\": \"dense\"\n  },"));
    free(text);
    shapes_are_read("{\"num_layers\": 3, \"rope_theta\": 5e5, \"act\": "
                    "\"swish\", \"mlp\": {\"gated\": false}, \"n_layer\": 3, "
                    "\"x\": [], \"window\": 9}",
                    "{\"layers\": 3, \"base\": 500000.0, \"window\": 9, "
                    "\"gated\": false}");
    shapes_are_read("{\"n_layer\": 3, \"mlp\": null}",
                    "{\"layers\": 3, \"base\": 10000.0, \"window\": 7, "
                    "\"gated\": true}");
}

static void types_have_rows_of_their_own(void **state)
{
    struct toy two = toy;
    char *text;

    two.two = true;
    text = text_of(two, NULL);
    assert_non_null(strstr(text, "[\"Toy2ForCausalLM\"],\n  \"model_type\": "
                                 "\"toy2\""));
    assert_non_null(strstr(text, "\"kind\": 2,"));
    shapes_are_read(text, "{\"two\": true, \"layers\": 2, \"base\": 10000.0, "
                          "\"window\": 0, \"gated\": true}");
    free(text);
    shapes_are_read("{\"model_type\": \"toy3\", \"num_layers\": 3, "
                    "\"window\": \"x\", \"kind\": 1}",
                    "{\"layers\": 3, \"base\": 10000.0, \"gated\": true}");
    two.layers = 10;
    assert_null(iz_hf_type(&hf, &two));
}

/* A tokenizer's ids go with the weights; what the table says wins. */
static void keys_that_mean_nothing_are_kept(void **state)
{
    char *text = config_of("{\"num_layers\": 9, \"eos_token_id\": [5, 6], "
                           "\"kind\": 3, \"torch_dtype\": \"float64\", "
                           "\"mlp\": 4}");

    free(text);
    text = text_of(toy, in_folder("config.json"));
    assert_non_null(strstr(text, "\"eos_token_id\": [5,6]"));
    assert_non_null(strstr(text, "\"kind\": 3,"));
    assert_non_null(strstr(text, "\"num_layers\": 2"));
    assert_null(strstr(text, "float64"));
    assert_null(strstr(text, "\"mlp\": 4"));
    free(text);
}

static void every_fault_of_a_config_is_told(void **state)
{
    assert_null(config_of("{\"act\": \"relu\", \"model_type\": \"llama\"}"));
    assert_said("num_layers is missing");
    assert_said("act is \"relu\"; this model only has \"silu\"|\"swish\"");
    assert_said("model_type is \"llama\"; this model only has "
                "\"toy\"|\"toy2\"|\"toy3\"");
    assert_null(config_of("{\"num_layers\": 3, \"n_layer\": 4}"));
    assert_said("n_layer is 4, which is not num_layers");
    assert_null(config_of("[]"));
    assert_said("not a JSON object");
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(any_ranks_write_the_same_files),
        CASE(any_range_reads_back),
        CASE(rectangles_tile_any_range),
        CASE(a_table_that_does_not_fit_is_refused),
        CASE(a_full_disk_leaves_nothing),
        CASE(an_export_has_its_name_when_all_of_it_is_on_the_disk),
        CASE(what_a_run_keeps_of_an_import_is_on_the_disk),
        CASE(keys_of_the_model_come_from_the_config),
        CASE(types_have_rows_of_their_own),
        CASE(keys_that_mean_nothing_are_kept),
        CASE(every_fault_of_a_config_is_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
