/* SPDX-License-Identifier: Apache-2.0 */
/* Published checkpoints of a toy model whose names use all there is: tensors
 * that lie the other way round, parameters cut into several by columns and by
 * rows, a second name.  Written by some ranks, read in any ranges; that others
 * read them the same is in tests/e2e/hf. */
#include "tests/runtime/fixture.h"

#include "codelets/base/mix.h"
#include "runtime/base/durable.h"
#include "runtime/formats/imported.h"
#include "runtime/hf/tensors.h"
#include "tests/runtime/disk.h"

enum { C = 6, KV = 2, QKV = C + 2 * KV, V = 7, LAYERS = 2, UNITS = LAYERS + 2 };
enum { BIG = 150, WIDE = 40, ROOM = 8192 };

/* ---- the toy ---- */

/* Queries have C columns, keys and values KV each. */
static int64_t cut_qkv(const void *self, int i)
{
    return i == 0 ? C : KV;
}

#define LAYER "model.layers.{}."
static const struct iz_hf_name names[] = {
    {.tensor = "model.embed.weight", .param = "wte"},
    {.tensor = LAYER "q.weight|" LAYER "k.weight|" LAYER "v.weight",
     .param = "h.{}.qkv.w",
     .layout = IZ_HF_TRANSPOSED,
     .cut = cut_qkv},
    {.tensor = LAYER "q.bias|" LAYER "k.bias|" LAYER "v.bias",
     .param = "h.{}.qkv.b",
     .layout = IZ_HF_TRANSPOSED,
     .cut = cut_qkv},
    {LAYER "gate|" LAYER "up", "h.{}.gate_up", .layout = IZ_HF_SAME},
    {LAYER "a|" LAYER "b|" LAYER "c", "h.{}.rows", .layout = IZ_HF_ROWS},
    {LAYER "down.weight", "h.{}.down", .layout = IZ_HF_TRANSPOSED},
    {.tensor = "model.norm.weight", .param = "norm"},
    {.tensor = "model.big", .param = "big", .layout = IZ_HF_TRANSPOSED},
    {.tensor = "lm_head.weight", .param = "wte", .tied = true},
    {.tensor = LAYER "inv_freq"},
    {0},
};

static const struct iz_hf_key keys[] = {{0}};
static const struct iz_hf_type types[] = {{.name = "toy"}, {0}};
static const struct iz_hf hf = {
    .types = types, .prefix = "model.", .names = names, .keys = keys};

static struct iz_model *model_open(void)
{
    /* The last one is turned in several tiles. */
    const struct iz_param wte[] = {{.name = "wte", .rows = V, .cols = C}},
                          block[] =
                              {
                                  {.name = "qkv.w", .rows = C, .cols = QKV},
                                  {.name = "qkv.b", .rows = 1, .cols = QKV},
                                  {.name = "gate_up", .rows = C, .cols = 8},
                                  {.name = "rows", .rows = 9, .cols = 5},
                                  {.name = "down", .rows = 4, .cols = C},
                              },
                          head[] = {
                              {.name = "norm", .rows = 1, .cols = C},
                              {.name = "big", .rows = BIG, .cols = WIDE},
                          };
    struct iz_model *m = iz_model_open("toy", UNITS, &(int){0}, sizeof(int));
    iz_unit_params(&m->unit[0], wte, 1, "");
    iz_unit_params(&m->unit[1], block, 5, "h.0.");
    iz_unit_params(&m->unit[2], block, 5, "h.1.");
    iz_unit_params(&m->unit[UNITS - 1], head, 2, "");
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
    struct iz_hf_order o = {.folder = in_folder("%s", j->name),
                            .map = &map,
                            .type = j->type,
                            .file_bytes = j->file_bytes,
                            .file = IZ_HF_SINGLE,
                            .config_file = "config.json",
                            .config = "{}"};
    struct iz_hf_writer *w;
    float in[ROOM];
    assert_int_equal(iz_hf_map_open(&map, &hf, m), 0);
    int err = iz_hf_write_open(&w, &o, c) ? 1 : 0;
    for (int u = 0; u < UNITS && !err; u++) {
        int64_t n = elements(m, u), shard = (n + c->size - 1) / c->size + 1;
        int64_t end = shard * (c->rank + 1);
        for (int64_t i = end - shard; i < end; i += j->piece) {
            int64_t k = end - i < j->piece ? end - i : j->piece;
            for (int64_t e = 0; e < k; e++)
                in[e] = i + e < n ? value(u, i + e) : 99;
            iz_hf_write(w, u, i, in, k);
        }
    }
    if (!err)
        err = iz_hf_write_close(&w, 0) ? 2 : 0;
    iz_hf_map_close(&map);
    iz_model_close(&m);
    return err;
}

/* ---- reading ---- */

static void read_any_range(struct iz_hf_reader *r, const struct iz_model *m)
{
    int u = (int)random_below(UNITS);
    int64_t from = random_below(elements(m, u));
    int64_t n = 1 + random_below(elements(m, u) - from);
    float out[ROOM];
    out[n] = 98;
    assert_int_equal(iz_hf_read(r, u, from, n, out), 0);
    for (int64_t i = 0; i < n; i++)
        if (out[i] != value(u, from + i))
            fail_msg("unit %d, %d + %d: %g", u, (int)from, (int)i, out[i]);
    assert_true(out[n] == 98);
}

static void any_range_reads_what_any_ranks_wrote(void **state)
{
    static struct job jobs[] = {
        {IZ_F32, 1 << 20, 7000, "a"}, {IZ_BF16, 1 << 20, 7, "b"},
        {IZ_F16, 200, 33, "c"},       {IZ_F32, 1, 111, "d"},
        {IZ_BF16, 300, 13, "e"},
    };
    struct iz_model *m = model_open();
    for (int i = 0; i < N_OF(jobs); i++) {
        struct iz_hf_reader *r;
        const char *path = in_folder("%s", jobs[i].name);
        all_return(1 + i % 4, write_shards, &jobs[i], 0);
        assert_int_equal(iz_hf_read_open(&r, &hf, m, "x", path, stderr), 0);
        for (int k = 0; k < 600; k++)
            read_any_range(r, m);
        iz_hf_read_close(&r);
    }
    iz_model_close(&m);
    assert_int_equal(size_of(in_folder("d/model.safetensors")), -1);
    assert_int_equal(size_of(in_folder("a.tmp")), -1);
}

/* ---- refusals ---- */

static void a_table_that_does_not_fit_is_refused(void **state)
{
    struct iz_model *m = model_open();
    struct iz_hf_map map;
    m->unit[1].param[2].cols = 7; /* two tensors do not share 7 columns */
    assert_fails(iz_hf_map_open(&map, &hf, m), -EINVAL,
                 "h.0.gate_up: its tensors do not cover it");
    m->unit[1].param[2].cols = 8;
    strcpy(m->unit[2].param[4].name, "h.one.down");
    assert_fails(iz_hf_map_open(&map, &hf, m), -EINVAL,
                 "h.one.down: its name in published checkpoints is not known");
    iz_model_close(&m);
}

static void a_full_disk_leaves_nothing(void **state)
{
    struct job j = {IZ_F32, 1 << 20, 64, "small/out"};
    mount_small("small", 4, 0);
    all_return(2, write_shards, &j, 1);
    assert_said("No space left on device");
    assert_int_equal(size_of(in_folder("small/out")), -1);
    assert_int_equal(size_of(in_folder("small/out.tmp")), -1);
}

static int export_folder(int i)
{
    char name[16];
    snprintf(name, sizeof(name), "f/%d", i);
    return write_shards(&alone, &(struct job){IZ_BF16, 300, 7000, name});
}

static void an_export_has_its_name_when_all_of_it_is_on_the_disk(void **state)
{
    assert_durable_or_refused(export_folder, "f/%d");
}

static int keep(int i)
{
    const char *to = in_folder("kept%d", i);
    int err = iz_durable_make_directories("test", to);
    return err ? err : iz_imported_keep(to, in_folder("from"), false);
}

static void what_a_run_keeps_of_an_import_is_on_the_disk(void **state)
{
    assert_int_equal(iz_durable_make_directories("test", in_folder("from")), 0);
    assert_int_equal(
        iz_durable_create("test", in_folder("from/config.json"), "{}"), 0);
    assert_int_equal(
        iz_durable_create("test", in_folder("from/tokenizer.model"), "t"), 0);
    assert_durable_or_refused(keep, "kept%d/imported");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(any_range_reads_what_any_ranks_wrote),
        CASE(a_table_that_does_not_fit_is_refused),
        CASE(a_full_disk_leaves_nothing),
        CASE(an_export_has_its_name_when_all_of_it_is_on_the_disk),
        CASE(what_a_run_keeps_of_an_import_is_on_the_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
