/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's arithmetic for a GPT of 2.6B parameters: shards, refusals, and
 * what memory has to leave free. */
#include "tests/runtime/plan/plans.h"

#include "models/gpt2.h"
#include "runtime/plan/fit.h"
#include "runtime/plan/unit_sizes.h"

static int fit_host(struct iz_plan *plan, const struct iz_config *c,
                    int64_t bytes)
{
    return fit(plan, c, (struct iz_limits){.host = bytes});
}

static void assert_recomputes(int none, int widened, int full)
{
    assert_int_equal(iz_plan_recomputing(&p, model, IZ_RECOMPUTE_NONE), none);
    assert_int_equal(iz_plan_recomputing(&p, model, IZ_RECOMPUTE_WIDENED),
                     widened);
    assert_int_equal(iz_plan_recomputing(&p, model, IZ_RECOMPUTE_FULL), full);
}

static void shards_cover_every_unit(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    /* Among so many are some whose shares, rounded down, are whole lines. */
    for (int ranks = 1; ranks <= 99; ranks++) {
        iz_plan_clear(&p);
        assert_int_equal(
            iz_plan_make(&p, &c, model, ranks, ranks - 1, &target2), 0);
        for (int u = 0; u < p.n_units; u++) {
            const struct iz_plan_unit *g = &p.unit[u];
            assert_true(g->padded >= g->n && g->padded < g->n + 64 * ranks);
            assert_true(g->padded == g->shard * ranks);
            assert_true(g->chunk * g->chunks >= g->owned);
            assert_true(g->chunk * (g->chunks - 1) < g->owned);
            /* No chunk is mostly empty: on disk it has a whole one's bytes. */
            assert_true(g->chunk * g->chunks - g->owned < 2048 * g->chunks);
            assert_true(g->chunks <= 64);
        }
    }
}

/* Of blocks that are nearly of one size. */
static void a_slot_has_room_for_every_unit_of_its_ring(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 2, &target2);
    memset(p.ring, 0, (size_t)p.n_rings * sizeof(*p.ring));
    p.unit[p.n_units - 2].padded -= 64;
    iz_plan_rings(&p, &c);
    for (int u = 0; u < p.n_units; u++)
        assert_true(p.ring[p.unit[u].ring].elems >=
                    iz_plan_gathered(&p.unit[u]));
}

static long locked_kib(void)
{
    char line[128];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f))
        sscanf(line, "VmLck: %ld", &kib);
    fclose(f);
    return kib;
}

/* When all is placed: all workers lock it at once.  The address sanitizer makes
 * mlock do nothing. */
static void all_that_was_taken_is_locked_together(void **state)
{
#ifdef __SANITIZE_ADDRESS__
    skip();
#endif
    struct iz_place one = {
        .what = IZ_DATUM_STATE, .tier = IZ_TIER_CPU, .bytes = 24 << 10};
    struct iz_places places = {.list = &one, .n = 1};
    struct iz_memory *m;
    long before = locked_kib();
    assert_int_equal(iz_memory_open(&m, NULL, &places, true, NULL), 0);
    assert_int_equal(locked_kib(), before);
    assert_int_equal(iz_memory_lock(m), 0);
    assert_int_equal(locked_kib(), before + 24);
    assert_int_equal(iz_memory_lock(m), 0);
    iz_memory_close(&m);
    assert_int_equal(locked_kib(), before);
}

static void no_more_buffers_are_taken_away_than_must(void **state)
{
    struct iz_config c = plain(3, IZ_BF16), four;
    c.zero.optimizer.home = IZ_HOME_NVME;
    c.zero.optimizer.buffer_count = 12;
    four = c;
    four.zero.optimizer.buffer_count = 4;
    make(&q, &four, 1, &target1);
    for (int less = 0; less < 2; less++) {
        make(&p, &c, 1, &target1);
        assert_int_equal(fit_host(&p, &c, iz_plan_host_bytes(&q) - less),
                         -ENOMEM);
        assert_said(less ? WAY "buffer_count=2 (" : WAY "buffer_count=4 (");
    }
}

/* Every step of memory is used, by what saves most flops with it.  A block
 * keeps 9 C numbers of a token and three statistics, of which what is widened
 * is 4 C. */
static void units_keep_what_memory_allows(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target1);
    int64_t lean = iz_plan_host_bytes(&p), all, widened;
    iz_plan_recompute(&p, model, IZ_RECOMPUTE_NONE);
    all = (iz_plan_host_bytes(&p) - lean) / 32;
    iz_plan_recompute(&p, model, IZ_RECOMPUTE_WIDENED);
    widened = (iz_plan_host_bytes(&p) - lean) / 32;
    assert_true(all == INT64_C(1024) * (9 * 2560 * 4 + 4 * (4 + 32)));
    assert_true(all - widened == INT64_C(4) * 4 * 1024 * 2560);
    assert_int_equal(fit_host(&p, &c, lean), 0);
    assert_true(iz_plan_recomputed(&p) > 0.6 && iz_plan_recomputed(&p) < 0.8);
    assert_int_equal(fit_host(&p, &c, INT64_MAX), 0);
    assert_recomputes(32, 0, 0);
    double most = 1;
    for (int64_t more = 0; more <= 32 * all; more += all / 7) {
        assert_int_equal(fit_host(&p, &c, lean + more), 0);
        int n[IZ_RECOMPUTES];
        for (int r = 0; r < IZ_RECOMPUTES; r++)
            n[r] = iz_plan_recomputing(&p, model, (enum iz_recompute)r);
        int64_t kept =
            n[IZ_RECOMPUTE_NONE] * all + n[IZ_RECOMPUTE_WIDENED] * widened;
        assert_int_equal(n[0] + n[1] + n[2], 32);
        assert_true(iz_plan_host_bytes(&p) == lean + kept && kept <= more);
        assert_true(!n[IZ_RECOMPUTE_FULL] || more - kept < widened);
        assert_true(!n[IZ_RECOMPUTE_WIDENED] || more - kept < all - widened);
        assert_true(iz_plan_recomputed(&p) <= most);
        most = iz_plan_recomputed(&p);
    }
    assert_int_equal(fit_host(&p, &c, lean + 32 * all), 0);
    assert_recomputes(32, 0, 0);
    /* A byte less than all: one unit repeats a product. */
    assert_int_equal(fit_host(&p, &c, lean + 32 * all - 1), 0);
    assert_recomputes(31, 1, 0);
}

static void what_is_asked_for_is_recomputed(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    c.run.recompute = IZ_RECOMPUTE_WIDENED;
    make(&p, &c, 1, &target1);
    int64_t need = iz_plan_host_bytes(&p);
    assert_int_equal(fit_host(&p, &c, INT64_MAX), 0);
    assert_recomputes(0, 32, 0);
    assert_true(iz_plan_host_bytes(&p) == need);
    assert_int_equal(fit_host(&p, &c, need - 1), -ENOMEM);
    assert_said("it fits with run.recompute=auto (");
}

/* Local sums if they fit; if nothing fits, what is said is about them. */
static void an_automatic_order_of_sums_is_one_that_fits(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    int64_t need[2] = {0};
    c.grad_accum = 4;
    c.run.schedule = IZ_BREADTH_FIRST;
    for (int k = 0; k < 2; k++) {
        c.run.sum_order = k ? IZ_SUM_RANKS_FIRST : IZ_SUM_LOCAL_FIRST;
        make(&p, &c, 2, &target2);
        need[k] = iz_plan_host_need(&p, &(struct iz_limits){.host = INT64_MAX});
    }
    assert_true(need[0] > need[1]);
    const struct {
        int64_t host;
        enum iz_sum_first order;
    } cases[] = {{need[0], IZ_SUM_LOCAL_FIRST},
                 {need[0] - 1, IZ_SUM_RANKS_FIRST},
                 {need[1], IZ_SUM_RANKS_FIRST},
                 {need[1] - 1, IZ_SUM_LOCAL_FIRST}};
    for (int i = 0; i < 4; i++) {
        struct iz_limits l = {.host = cases[i].host};
        c.run.sum_order = IZ_SUM_AUTO;
        struct iz_target t = target2;
        choose(&c, 2, &t, l, 1e11);
        assert_int_equal(c.run.sum_order, cases[i].order);
    }
}

/* Of a plan whose units keep everything. */
static int64_t keeps_all(struct iz_config c, int64_t logits)
{
    c.run.gpu_logits_bytes = logits;
    make(&p, &c, 1, &gpu_bf16);
    iz_plan_recompute(&p, model, IZ_RECOMPUTE_NONE);
    return iz_plan_device_bytes(&p);
}

static int64_t logits_chosen(struct iz_config c, int64_t device,
                             struct iz_target t)
{
    struct iz_limits l = {.host = INT64_MAX, .device = device};
    choose(&c, 1, &t, l, 1e11);
    return c.run.gpu_logits_bytes;
}

/* A large GPU has more of them at a time if it recomputes nothing for it. */
static void logits_take_what_activations_leave(void **state)
{
    struct iz_config c = plain(0, IZ_BF16);
    c.micro_batch = 24;
    int64_t few = keeps_all(c, 0), many = keeps_all(c, IZ_LOGITS_LARGE_BYTES);
    assert_true(few > INT64_C(64) << 30);
    /* logits in fp32, and their gradients in bf16 */
    assert_true(many > few + (INT64_C(1) << 30));
    assert_true(keeps_all(c, IZ_LOGITS_BYTES) == few);
    assert_true(logits_chosen(c, many, gpu_bf16) == IZ_LOGITS_LARGE_BYTES);
    assert_true(logits_chosen(c, many - 1, gpu_bf16) == IZ_LOGITS_BYTES);
    assert_true(logits_chosen(c, few / 16, gpu_bf16) == IZ_LOGITS_BYTES);
    assert_true(logits_chosen(c, many, target2) == 0);
    c.run.recompute = IZ_RECOMPUTE_FULL;
    assert_true(logits_chosen(c, many, gpu_bf16) == IZ_LOGITS_LARGE_BYTES);
    assert_true(logits_chosen(c, INT64_C(64) << 30, gpu_bf16) ==
                IZ_LOGITS_BYTES);
    c.run.gpu_logits_bytes = 12345;
    assert_true(logits_chosen(c, many, gpu_bf16) == 12345);
    /* What is asked for and too much is the way out. */
    c.run.gpu_logits_bytes = IZ_LOGITS_LARGE_BYTES;
    c.cpu_checkpointing = true;
    make(&p, &c, 1, &gpu_bf16);
    assert_int_equal(
        fit(&p, &c,
            (struct iz_limits){.host = INT64_MAX,
                               .device = iz_plan_device_bytes(&p) - 1}),
        -ENOMEM);
    assert_said("it fits with run.gpu_logits_bytes=268435456 (");
}

static void a_host_has_room_for_what_ranks_have_beside_plans(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target1);
    struct iz_limits l = {.device = INT64_MAX, .beside = true};
    l.host = iz_plan_host_bytes(&p) + iz_plan_beside(&p);
    assert_true(iz_plan_within(&p, &l));
    l.host--;
    assert_false(iz_plan_within(&p, &l));
}

/* All of the host's but the states is pinned: 8 bytes on the GPU for a page. */
static void a_gpu_has_room_for_the_tables_of_pinned_memory(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 1);
    int64_t *cpu = p.bytes.b[IZ_TIER_CPU];
    int64_t pinned = iz_bytes_tier(&p.bytes, IZ_TIER_CPU) - cpu[IZ_MEM_STATE];
    assert_true(cpu[IZ_MEM_STATE] > 0 && pinned > cpu[IZ_MEM_PARAM]);
    assert_int_equal(fit(&p, &c, l), 0);
    l.tables = true;
    assert_int_equal(fit(&p, &c, l), -ENOMEM);
    l.device += (pinned + 511) / 512 - 1;
    assert_int_equal(fit(&p, &c, l), -ENOMEM);
    l.device++;
    assert_int_equal(fit(&p, &c, l), 0);
}

/* Clipping needs the norm of all gradients, fp16 to know that all are finite.
 */
static void updates_are_early_that_wait_for_no_norm(void **state)
{
    for (int clipped = 0; clipped < 2; clipped++)
        for (int t = IZ_F32; t <= IZ_F16; t++) {
            struct iz_config c = plain(2, (enum iz_dtype)t);
            c.gradient_clipping = clipped;
            make(&p, &c, 2, &target2);
            assert_int_equal(p.zero.early, !clipped && t != IZ_F16);
        }
}

/* A CPU has one memory: the same bytes, on its other tier. */
static void boundaries_of_a_cpu_take_no_slots(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target2);
    c.cpu_checkpointing = true;
    make(&q, &c, 1, &target2);
    assert_int_equal(q.act.boundary_slots, 0);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_BOUNDARY] > 0);
    assert_true(iz_plan_host_bytes(&p) == iz_plan_host_bytes(&q));
}

/* The GPU's bytes with these kernels, where units repeat all. */
static int64_t attended(struct iz_config c, enum iz_attention_by by)
{
    c.run.gpu_attention = c.run.gpu_attention_backward = by;
    make(&p, &c, 1, &gpu_bf16);
    return iz_plan_device_bytes(&p);
}

/* Without the scratch of cuDNN's backward its forward is taken alone. */
static void attention_is_cudnns_where_the_plan_has_room(void **state)
{
    struct iz_gpt2_config small = {2, 8, 256, 2048, 512};
    struct iz_config c = plain(3, IZ_BF16);
    struct iz_model *was = model;
    assert_int_equal(iz_gpt2_open(&model, &small), 0);
    c.run.recompute = IZ_RECOMPUTE_FULL;
    c.run.sequence_chunk = IZ_CHUNK_OFF;
    int64_t own = attended(c, IZ_ATTENTION_OWN);
    int64_t all = attended(c, IZ_ATTENTION_CUDNN);
    const int64_t device[] = {own - 1, all - 1, all}; /* 0 to 2 are cuDNN's */
    for (int i = 0; i < 3; i++) {
        struct iz_limits l = {.host = INT64_MAX, .device = device[i]};
        struct iz_target t = gpu_bf16;
        struct iz_config d = c;
        t.numerics.capability = 90;
        choose(&d, 1, &t, l, 1e11);
        assert_int_equal(d.run.gpu_attention == IZ_ATTENTION_CUDNN, i > 0);
        assert_int_equal(d.run.gpu_attention_backward == IZ_ATTENTION_CUDNN,
                         i > 1);
    }
    iz_model_close(&model);
    model = was;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_are_early_that_wait_for_no_norm),
        cmocka_unit_test(boundaries_of_a_cpu_take_no_slots),
        cmocka_unit_test(attention_is_cudnns_where_the_plan_has_room),
        cmocka_unit_test(shards_cover_every_unit),
        cmocka_unit_test(a_slot_has_room_for_every_unit_of_its_ring),
        cmocka_unit_test(all_that_was_taken_is_locked_together),
        cmocka_unit_test(no_more_buffers_are_taken_away_than_must),
        cmocka_unit_test(units_keep_what_memory_allows),
        cmocka_unit_test(what_is_asked_for_is_recomputed),
        cmocka_unit_test(an_automatic_order_of_sums_is_one_that_fits),
        cmocka_unit_test(logits_take_what_activations_leave),
        cmocka_unit_test(a_host_has_room_for_what_ranks_have_beside_plans),
        cmocka_unit_test(a_gpu_has_room_for_the_tables_of_pinned_memory),
    };
    return cmocka_run_group_tests(tests, plans_open, plans_close);
}
