/* One step of decoding: a single query for each head of a row, which stands on the last key.
 *
 *     logits_j = (query.content_k_j + sum_c trilinear_j,c content_q_c content_k_j,c) factor_j
 *                * (q.product_query_j) (k_j.product_key_j) + added_j + q.near_query_j + k_j.near_key_j
 *     out      = sum_j probs_j (v_j + near_value_j) + value_tail
 *
 * where near tables have rows for the last keys, and nothing for those before them.
 */
#ifndef RELPOS_STEP_H
#define RELPOS_STEP_H

#include "scalars.h"

/* `native/step.py` fills it in, word by word.  Tables have stride 0 between rows of the batch. */
typedef struct {
    int64_t batch, heads, src, dim, content_dim, value_dim, threads;
    int64_t near_queries, near_keys, near_trilinear, near_values, near_products; /* rows of each table */
    Tensor query, content_k, v; /* `query` is scaled */
    Tensor q, k, content_q;     /* q and k as near tables meet them; absent where there are none */
    Tensor factor, added, tails; /* (B, H, 1, S); tails are k.product_key of distant keys */
    Tensor near_query, near_key, trilinear, near_value, value_tail, product_query, product_key;
    Tensor out;
    const uint8_t *excluded; /* (B|1, S) */
    int64_t excluded_row;
} Step;

#define TOGETHER 4 /* rows whose sums are formed at a time */

/* out_j = or += x_j.y_j, or (x_j w).y_j, for `count` pairs of rows; all x_j are one where x_row is 0. */
INLINE void dots(real *out, const real *x, int64_t x_row, const real *w, const real *y, int64_t y_row,
                 int64_t count, int64_t dim, int add)
{
    int64_t whole = dim / VL * VL;
    for (int64_t j = 0; j < count; j += TOGETHER) {
        int64_t members = least(TOGETHER, count - j), at[TOGETHER];
        vec sums[TOGETHER] = {{0}};
        for (int i = 0; i < TOGETHER; i++)
            at[i] = j + least(i, members - 1);
        for (int64_t d = 0; d < whole; d += VL)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++) {
                vec of_x = *(const vec *)(x + at[i] * x_row + d);
                if (w)
                    of_x *= *(const vec *)(w + d);
                sums[i] += of_x * *(const vec *)(y + at[i] * y_row + d);
            }
        real found[TOGETHER];
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; i++)
            found[i] = sum_of_lanes(sums[i]);
        for (int i = 0; i < members; i++) {
            for (int64_t d = whole; d < dim; d++)
                found[i] += x[at[i] * x_row + d] * y[at[i] * y_row + d] * (w ? w[d] : 1);
            out[j + i] = add ? out[j + i] + found[i] : found[i];
        }
    }
}

/* out += sum_j weights_j rows_j. */
static void add_weighed(real *out, const real *weights, const real *rows, int64_t row,
                        int64_t count, int64_t dim)
{
    int64_t d = 0;
    for (; d + TOGETHER * VL <= dim; d += TOGETHER * VL) {
        vec sums[TOGETHER] = {{0}};
        for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++)
                sums[i] += weights[j] * *(const vec *)(rows + j * row + d + i * VL);
        for (int i = 0; i < TOGETHER; i++)
            *(vec *)(out + d + i * VL) += sums[i];
    }
    for (; d + VL <= dim; d += VL) {
        vec sums = {0};
        for (int64_t j = 0; j < count; j++)
            sums += weights[j] * *(const vec *)(rows + j * row + d);
        *(vec *)(out + d) += sums;
    }
    for (; d < dim; d++)
        for (int64_t j = 0; j < count; j++)
            out[d] += weights[j] * rows[j * row + d];
}

INLINE real *at(const Tensor *x, int64_t b, int64_t h) { return x->data + b * x->b + h * x->h; }

/* The rows of a near table that meet the last n keys. */
INLINE const real *last(const Tensor *table, int64_t b, int64_t h, int64_t rows, int64_t n)
{
    return at(table, b, h) + (rows - n) * table->t;
}

/* s_j *= (q.product_query_j) (k_j.product_key_j); the first rows are those of all keys further off. */
static void multiply(const Step *c, int64_t b, int64_t h, real *s, real *near)
{
    int64_t rows = c->near_products, n = least(rows, c->src), far = c->src - n;
    real *of_q = near, *of_k = near + rows;
    const real *tails = at(&c->tails, b, h), *k = at(&c->k, b, h) + far * c->k.t;
    dots(of_q, at(&c->q, b, h), 0, NULL, at(&c->product_query, b, h), c->product_query.t, rows,
         c->dim, 0);
    dots(of_k, last(&c->product_key, b, h, rows, n), c->product_key.t, NULL, k, c->k.t, n, c->dim, 0);
    for (int64_t j = 0; j < far; j++)
        s[j] *= of_q[0] * tails[j];
    for (int64_t j = 0; j < n; j++)
        s[far + j] *= of_q[rows - n + j] * of_k[j];
}

/* One head of one row; `s` has room for its logits and two vectors, `near` for the rows of products. */
static void step(const Step *c, int64_t b, int64_t h, real *s, real *near)
{
    int64_t src = c->src, n;
    const real *content_k = at(&c->content_k, b, h), *k = at(&c->k, b, h);
    dots(s, at(&c->query, b, h), 0, NULL, content_k, c->content_k.t, src, c->content_dim, 0);
    if (c->trilinear.data) {
        n = least(c->near_trilinear, src);
        dots(s + src - n, last(&c->trilinear, b, h, c->near_trilinear, n), c->trilinear.t,
             at(&c->content_q, b, h), content_k + (src - n) * c->content_k.t, c->content_k.t, n,
             c->content_dim, 1);
    }
    if (c->factor.data)
        for (int64_t j = 0; j < src; j++)
            s[j] *= at(&c->factor, b, h)[j];
    if (c->product_query.data)
        multiply(c, b, h, s, near);
    if (c->added.data)
        for (int64_t j = 0; j < src; j++)
            s[j] += at(&c->added, b, h)[j];
    if (c->near_query.data) {
        n = least(c->near_queries, src);
        dots(s + src - n, at(&c->q, b, h), 0, NULL, last(&c->near_query, b, h, c->near_queries, n),
             c->near_query.t, n, c->dim, 1);
    }
    if (c->near_key.data) {
        n = least(c->near_keys, src);
        dots(s + src - n, last(&c->near_key, b, h, c->near_keys, n), c->near_key.t, NULL,
             k + (src - n) * c->k.t, c->k.t, n, c->dim, 1);
    }
    if (c->excluded)
        for (int64_t j = 0; j < src; j++)
            s[j] = c->excluded[b * c->excluded_row + j] ? -(real)INFINITY : s[j];
    real *out = at(&c->out, b, h), top = largest(s, src, -(real)INFINITY);
    fill(out, c->value_dim, 0);
    if (top == -(real)INFINITY) /* no key at all */
        return;
    real mass = exponentials(s, 0, src, src, top);
    add_weighed(out, s, at(&c->v, b, h), c->v.t, src, c->value_dim);
    if (c->near_value.data) {
        n = least(c->near_values, src);
        add_weighed(out, s + src - n, last(&c->near_value, b, h, c->near_values, n),
                    c->near_value.t, n, c->value_dim);
    }
    for (int64_t d = 0; d < c->value_dim; d++)
        out[d] = out[d] / mass + (c->value_tail.data ? at(&c->value_tail, b, h)[d] : 0);
}

#endif
