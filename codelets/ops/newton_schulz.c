/* SPDX-License-Identifier: Apache-2.0 */
/* Newton-Schulz's iteration, whoever forms its products; see orthogonal.h. */
#include "codelets/ops/orthogonal.h"

/* X becomes a X + (b A + c A A) X with A = X X^T. */
static const float quintic_a = 3.4445f, quintic_b = -4.7750f,
                   quintic_c = 2.0315f;

/* With X X^T: before iterations 2, 5, 8 ... it is formed anew, or what rounding
 * makes of it would grow: eigenvalues that should be 0 may become negative. */
static bool restarts(int i)
{
    return i % 3 == 2;
}

static bool by_gram(const struct iz_orthogonal *m)
{
    return m->gram && m->rows != m->cols;
}

int iz_orthogonal_squares(const struct iz_orthogonal *m)
{
    return by_gram(m) ? IZ_ORTHOGONAL_SQUARES : 2;
}

struct iteration {
    struct iz_exec *x;
    iz_strided_product_fn *product;
    void *arg;
    bool tall;
};

/* d = scale op(a) op(b) + keep c */
static void form(const struct iteration *t, struct iz_strided d, float scale,
                 struct iz_strided a, bool ta, struct iz_strided b, bool tb,
                 float keep, struct iz_strided c)
{
    struct iz_strided_product p = {d, a, b, c, ta, tb, scale, keep};
    t->product(t->x, &p, t->arg);
}

/* d = z y + keep c, all of them squares. */
static void multiply(const struct iteration *t, struct iz_strided d,
                     struct iz_strided z, struct iz_strided y, float keep,
                     struct iz_strided c)
{
    form(t, d, 1, z, false, y, false, keep, c);
}

/* The square X X^T of the shorter side. */
static void form_gram(const struct iteration *t, struct iz_strided g,
                      struct iz_strided x)
{
    form(t, g, 1, x, t->tall, x, !t->tall, 0, g);
}

/* y = h x + keep x, with a square on the shorter side. */
static void apply_square(const struct iteration *t, struct iz_strided y,
                         struct iz_strided h, struct iz_strided x, float keep)
{
    if (t->tall)
        form(t, y, 1, x, false, h, false, keep, x);
    else
        form(t, y, 1, h, false, x, false, keep, x);
}

static void swap(struct iz_strided *a, struct iz_strided *b)
{
    struct iz_strided c = *a;
    *a = *b;
    *b = c;
}

static struct iz_strided iterate(const struct iteration *t, int steps,
                                 struct iz_strided x, struct iz_strided y,
                                 const struct iz_strided *square)
{
    struct iz_strided g = square[0], h = square[1];
    for (int i = 0; i < steps; i++) {
        form_gram(t, g, x);
        form(t, h, quintic_c, g, false, g, false, quintic_b, g);
        apply_square(t, y, h, x, quintic_a);
        swap(&x, &y);
    }
    return x;
}

/* The same in real numbers.  With z = b r + c r r, x becomes (a I + z) x and
 * its r = x x^T becomes (a I + z) r (a I + z): q, the product of all (a I + z),
 * is applied to x where r is formed anew, and at the end. */
static struct iz_strided iterate_gram(const struct iteration *t, int steps,
                                      struct iz_strided x, struct iz_strided y,
                                      const struct iz_strided *square)
{
    struct iz_strided r = square[0], z = square[1], q = square[2],
                      w = square[3], none = {0};
    bool fresh = true;
    form_gram(t, r, x);
    for (int i = 0; i < steps; i++) {
        if (restarts(i)) {
            apply_square(t, y, q, x, 0);
            swap(&x, &y);
            form_gram(t, r, x);
            fresh = true;
        }
        form(t, z, quintic_c, r, false, r, false, quintic_b, r);
        if (fresh) {
            form(t, q, quintic_a, none, false, none, false, 1, z);
        } else {
            multiply(t, w, z, q, quintic_a, q);
            swap(&w, &q);
        }
        fresh = false;
        if (i + 1 == steps || restarts(i + 1))
            continue;
        multiply(t, w, z, r, quintic_a, r);
        multiply(t, r, z, w, quintic_a, w);
    }
    if (steps) {
        apply_square(t, y, q, x, 0);
        swap(&x, &y);
    }
    return x;
}

struct iz_strided
iz_orthogonal_iterate(struct iz_exec *x, const struct iz_orthogonal *m,
                      struct iz_strided at, struct iz_strided other,
                      const struct iz_strided square[IZ_ORTHOGONAL_SQUARES],
                      iz_strided_product_fn *product, void *arg)
{
    struct iteration t = {x, product, arg, at.rows > at.cols};
    return (by_gram(m) ? iterate_gram : iterate)(&t, m->steps, at, other,
                                                 square);
}
