/* SPDX-License-Identifier: Apache-2.0 */
/* The run of one op with its tensors, on whichever backend the program is for.
 * The cases (ops_*.c) are linked into three programs: on the CPU (test_ops),
 * with the GPU's kernels emulated (test_kernels_cuda), and on a GPU or its
 * stand-in (test_ops_gpu). */
#pragma once

#include "tests/codelets/ops/fixture.h"

/* Where the ops compute; each program has one, before its first case. */
struct backend {
    struct iz_exec x; /* backend, capability, stream, handles of every call */
    enum iz_dtype (*act)(enum iz_dtype param); /* type of activations */
    bool device; /* tensors lie in device memory, tokens in pinned memory */
    bool large; /* a GPU: also shapes of models, which take minutes elsewhere */
    bool exact; /* every op is the CPU's: some sizes show that it is called */
    bool refuses;  /* what ends the job can be seen, in a child process */
    int64_t piece; /* positions of a token whose gradients are added alone */
    /* The GPU gets another compute capability; NULL: it cannot. */
    void (*become)(int capability);
    /* Of a grid of kernels the first and the last blocks alone run, so many
     * along an axis; 0: all.  NULL: it cannot. */
    void (*ends)(unsigned blocks);
};
extern struct backend backend;

/* Whether products are made of this type, and whether activations have it. */
bool backend_computes(enum iz_dtype t);
bool backend_acts(enum iz_dtype t);
/* Whether there are any. */
bool backend_multiplies(void);
/* Handles of libraries that remember no product; a setup of cmocka. */
int backend_renew(void **state);

enum { SCENE_MOST = 24 };

/* The tensors of an op. */
struct scene {
    struct tensor t[SCENE_MOST];
    int act; /* the number of an activation */
    int n;
    unsigned pinned;   /* bit i: tensor i is read or written by the host too */
    unsigned unwanted; /* bit i: v[i].p is NULL in the real run too */
    unsigned late;     /* bit i: tensor i begins `late_by` elements behind an
                        * address that all loads can use */
    int late_by;
    bool exact;   /* the bits of the CPU's op */
    double flops; /* of the last run, and the scratch that it took */
    int64_t scratch;
    int64_t spare; /* bytes of the arena beside those that the dry run counts */
    const int (*into)[2]; /* see scene_in_place */
    int n_into;
};

#define BIT(i) (1u << (i))
#define COUNT(list) ((int)(sizeof(list) / sizeof((list)[0])))

/* v[i] is t[i] where the backend can reach it; in a dry run v[i].p is NULL. */
typedef void scene_op(struct iz_exec *x, const struct iz_view *v,
                      const void *arg);

/* One call of an op.  Bit i is tensor i; what the op is not given may be among
 * them. */
struct pass {
    scene_op *op;
    unsigned reads, writes;
};

/* Runs the op dry and then twice with a work arena of exactly the size found,
 * and `spare`, which is full of NaN the first time and of something else the
 * second, and checks: the same bits both times, tensors that it only reads
 * unchanged, nothing written beside tensors and arena, the counters those of
 * the dry run.  What the op only writes is NaN before.  Where it must have the
 * CPU's bits, they are compared.  Results are in t[i].v, t[i].d is as it was.
 */
void scene_run(struct scene *s, const struct pass *p, const void *arg);

/* After scene_run: the same pass with tensor i in the memory of tensor j, for
 * each of n pairs {i, j}, gives the same bits everywhere. */
void scene_in_place(struct scene *s, const struct pass *p, const void *arg,
                    int n, const int (*pair)[2]);

/* Of n cases those that are to be tried: every such one. */
int scene_step(void);
/* The type of case k of a list: fp32, then by turns one of 16 bits, whose code
 * is one but for the conversions. */
enum iz_dtype scene_type(int k);
/* Calls check with every size, in fp32 and in one of the others, of those types
 * that `of` takes (NULL: all); with the last `large` of n sizes only where
 * there is time for them. */
void scene_each(bool (*of)(enum iz_dtype t), const int64_t (*size)[4], int n,
                int large, void (*check)(enum iz_dtype t, const int64_t *size));

void scene_free(struct scene *s);

/* Bytes that are no numbers, d NULL: of numbers of tokens, or of sums. */
struct tensor bytes_new(int64_t bytes);

/* A number that is expected, and the sum of the magnitudes that it is made of.
 */
struct want {
    double is, size;
};

static inline void want_add(struct want *w, double x)
{
    w->is += x;
    w->size += x < 0 ? -x : x;
}

/* Checks elements of t against want(arg, i, j): all, or of a large tensor some
 * thousand from the first to the last.  The bound is
 * 2^-21 size + (rounding of t's type) |is|: eight roundings to fp32 of
 * the largest sum there can be on the way. */
void scene_check(const char *what, struct tensor *t,
                 struct want (*want)(const void *arg, int64_t i, int64_t j),
                 const void *arg);

/* Fails unless f(arg) ends the job with this in its message; skips where that
 * cannot be seen. */
void scene_dies(void (*f)(const void *arg), const void *arg,
                const char *message);

/* The groups of cases; each returns how many tests failed. */
int ops_matmul(void);
int ops_matmul_called(const char *name); /* the same */
int ops_rows(void);
int ops_llama(void);
int ops_attention(void);
int ops_experts(void);
int ops_routers(void);
int ops_embedding(void);
int ops_classifier(void);
int ops_pairs(void);
int ops_orthogonal(void);
int ops_preference(void);
int ops_flat(void);
int ops_quant(void);
int ops_far(void);
int ops_cpu(void); /* of the CPU alone */

/* Runs the groups whose names are given, or all. */
int ops_groups(int argc, char **argv);
