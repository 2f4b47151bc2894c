/* One step of decoding: a single query for each head of a row, which stands on the last key.
 *
 *     logits_j = (query.content_k_j + sum_c trilinear_j,c content_q_c content_k_j,c) gate_j factor_j
 *                * (q.product_query_j) (k_j.product_key_j)
 *                + key_offset.k_j + q.near_query_j + k_j.near_key_j
 *                + static_j + added_j + query_factors.key_factors_j
 *     query    = content_q query_factor + query_offset
 *     out      = sum_j probs_j (v_j + near_value_j) + value_tail
 *
 * where near tables have rows for the last keys, and nothing for those before them.
 */
#ifndef RELPOS_STEP_H
#define RELPOS_STEP_H

#include "rows.h"

/* What neither queries nor keys say: `native/step_plan.py` fills it in, word by word, for many steps. */
typedef struct {
    int64_t dim, content_dim, value_dim;
    int64_t near_queries, near_keys, near_trilinear, near_values, near_products; /* rows of tables */
    int64_t length; /* of the tables for all keys, whose last numbers are those of the last keys */
    Table query_factor, query_offset, key_offset, value_tail; /* (H|1, channels) */
    Table near_query, near_key, trilinear, near_value;        /* (H|1, rows, channels) */
    Table product_query, product_key; /* their first row is that of all keys further off */
    Table gate, static_;              /* (H|1, length) */
} StepTables;

/* `native/step.py` fills it in, word by word. */
typedef struct {
    const StepTables *tables;
    int64_t batch, heads, src, rank, threads;
    Tensor q, k, v, content_q, content_k; /* k: as near tables meet it, and so is q */
    Tensor tails, factor, added; /* (B, H, 1, S); tails are k.product_key of distant keys */
    Tensor query_factors, key_factors; /* (B, H, 1 | S, rank) */
    real *out;                         /* (B, H, 1, value_dim), contiguous */
    const uint8_t *excluded;           /* (B|1, S) */
    int64_t excluded_row;
} Step;

/* Of a thread, in one piece: logits, the query, products, and what the rows of each head share. */
typedef struct {
    real *logits, *query, *of_q, *of_k, *shared;
} Scratch;

INLINE int shares_factors(const Step *c)
{
    return c->query_factors.data && !c->query_factors.b && !c->key_factors.b;
}

/* Whether something is added to the logits of a head in all rows of the batch. */
INLINE int shares(const Step *c) { return c->tables->static_.data || shares_factors(c); }

INLINE int64_t room_of_logits(const Step *c) { return round_up(c->src, NR) + NR; }

INLINE int64_t scratch_size(const Step *c)
{
    const StepTables *t = c->tables;
    return room_of_logits(c) * (1 + (shares(c) ? c->heads : 0)) + t->content_dim + 2 * t->near_products;
}

INLINE Scratch scratch_of(const Step *c, real *memory)
{
    real *query = memory + room_of_logits(c), *of_q = query + c->tables->content_dim;
    real *of_k = of_q + c->tables->near_products;
    return (Scratch){memory, query, of_q, of_k, of_k + c->tables->near_products};
}

INLINE real *shared_of(const Step *c, const Scratch *r, int64_t h)
{
    return r->shared + h * room_of_logits(c);
}

INLINE real *at(const Tensor *x, int64_t b, int64_t h) { return x->data + b * x->b + h * x->h; }
INLINE const real *of_head(const Table *x, int64_t h) { return x->data + h * x->h; }

/* The rows of a near table that meet the keys from `key` on, if it has `rows` of them. */
INLINE const real *from(const Table *x, int64_t h, int64_t rows, int64_t dim, int64_t src, int64_t key)
{
    return of_head(x, h) + (rows - (src - key)) * dim;
}

static void add_factors(const Step *c, int64_t b, int64_t h, real *s)
{
    const real *column = at(&c->key_factors, b, h);
    dots_of_one(s, &(Rows){.one = at(&c->query_factors, b, h), .y = column, .y_row = c->key_factors.t},
                c->src, c->rank, 1);
}

/* What is added to the logits of a head in all rows of the batch. */
static void share(const Step *c, int64_t h, real *shared)
{
    const StepTables *t = c->tables;
    if (t->static_.data)
        memcpy(shared, from(&t->static_, h, t->length, 1, c->src, 0), c->src * sizeof(real));
    else
        fill(shared, c->src, 0);
    if (shares_factors(c))
        add_factors(c, 0, h, shared);
}

/* s_j *= (q.product_query_j) (k_j.product_key_j). */
static void multiply(const Step *c, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    int64_t rows = t->near_products, n = least(rows - 1, c->src), far = c->src - n, dim = t->dim;
    const real *restrict tails = at(&c->tails, b, h);
    real *restrict s = r->logits;
    dots_of_one(r->of_q, &(Rows){.one = at(&c->q, b, h), .y = of_head(&t->product_query, h), .y_row = dim},
                rows, dim, 0);
    dots_of_two(r->of_k,
                &(Rows){.x = from(&t->product_key, h, rows, dim, c->src, far), .x_row = dim,
                        .y = at(&c->k, b, h) + far * c->k.t, .y_row = c->k.t},
                n, dim, 0);
    real of_tail = r->of_q[0];
    for (int64_t j = 0; j < far; j++)
        s[j] *= of_tail * tails[j];
    for (int64_t j = 0; j < n; j++)
        s[far + j] *= r->of_q[rows - n + j] * r->of_k[j];
}

/* The content's part of the logits, with all that multiplies it. */
static void content_of_step(const Step *c, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    const real *k = at(&c->content_k, b, h);
    int64_t row = c->content_k.t, dim = t->content_dim, src = c->src;
    dots_of_one(r->logits, &(Rows){.one = r->query, .y = k, .y_row = row}, src, dim, 0);
    if (t->trilinear.data) {
        int64_t n = least(t->near_trilinear, src), far = src - n;
        dots_weighed(r->logits + far,
                     &(Rows){.one = at(&c->content_q, b, h), .y = k + far * row, .y_row = row,
                             .x = from(&t->trilinear, h, t->near_trilinear, dim, src, far), .x_row = dim},
                     n, dim, 1);
    }
    if (t->gate.data)
        multiply_rows(r->logits, from(&t->gate, h, t->length, 1, src, 0), src);
    if (c->factor.data)
        multiply_rows(r->logits, at(&c->factor, b, h), src);
    if (t->product_query.data)
        multiply(c, b, h, r);
}

/* Logits of keys `first` .. `stop`: content's, where it is there to be summed, and near tables'. */
static void near_logits(const Step *c, int64_t b, int64_t h, const Scratch *r, int64_t first,
                        int64_t stop, int with_content, int of_queries, int of_keys)
{
    const StepTables *t = c->tables;
    int64_t n = stop - first, src = c->src, dim = t->dim;
    real *s = r->logits + first;
    Rows k = {.one = r->query, .y = at(&c->k, b, h) + first * c->k.t, .y_row = c->k.t};
    Rows q = {.one = at(&c->q, b, h), .y_row = dim};
    if (n <= 0)
        return;
    if (of_queries)
        q.y = from(&t->near_query, h, t->near_queries, dim, src, first);
    if (of_keys)
        k.x = from(&t->near_key, h, t->near_keys, dim, src, first), k.x_row = dim;
    if (with_content && of_queries && of_keys)
        dots_of_all(s, (Rows[]){k, q}, n, dim, 0);
    else if (with_content && of_queries)
        dots_of_ones(s, (Rows[]){k, q}, n, dim, 0);
    else if (with_content && of_keys)
        dots_of_sum(s, &k, n, dim, 0);
    else if (with_content)
        dots_of_one(s, &k, n, dim, 0);
    else {
        if (of_queries)
            dots_of_one(s, &q, n, dim, 1);
        if (of_keys)
            dots_of_two(s, &k, n, dim, 1);
    }
}

static void logits_of_step(const Step *c, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    int64_t src = c->src, dim = t->dim;
    int apart = t->trilinear.data || t->gate.data || c->factor.data || t->product_query.data ||
                c->content_k.data != c->k.data;
    int64_t of_q = src - (t->near_query.data ? least(t->near_queries, src) : 0);
    int64_t of_k = src - (t->near_key.data ? least(t->near_keys, src) : 0);
    int64_t near = least(of_q, of_k), both = most(of_q, of_k);
    if (apart)
        content_of_step(c, b, h, r);
    else
        near_logits(c, b, h, r, 0, near, 1, 0, 0);
    near_logits(c, b, h, r, near, both, !apart, of_q == near, of_k == near);
    near_logits(c, b, h, r, both, src, !apart, 1, 1);
    if (t->key_offset.data)
        dots_of_one(r->logits, &(Rows){.one = of_head(&t->key_offset, h), .y = at(&c->k, b, h), .y_row = c->k.t},
                    src, dim, 1);
    if (shares(c))
        add_rows(r->logits, shared_of(c, r, h), src);
    if (c->added.data)
        add_rows(r->logits, at(&c->added, b, h), src);
    if (c->query_factors.data && !shares_factors(c))
        add_factors(c, b, h, r->logits);
    if (c->excluded)
        for (int64_t j = 0; j < src; j++)
            r->logits[j] = c->excluded[b * c->excluded_row + j] ? -(real)INFINITY : r->logits[j];
}

/* One head of one row. */
static void step(const Step *c, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    const real *q = at(&c->content_q, b, h), *factor = of_head(&t->query_factor, h);
    for (int64_t d = 0; d < t->content_dim; d++)
        r->query[d] = q[d] * factor[d];
    if (t->query_offset.data)
        add_rows(r->query, of_head(&t->query_offset, h), t->content_dim);
    logits_of_step(c, b, h, r);
    int64_t src = c->src, dim = t->value_dim, n = least(t->near_values, src);
    real *out = c->out + (b * c->heads + h) * dim, top = largest(r->logits, src, -(real)INFINITY);
    fill(out, dim, 0);
    if (top == -(real)INFINITY) /* no key at all */
        return;
    real mass = exponentials(r->logits, 0, src, src, top);
    add_weighed(out, r->logits, at(&c->v, b, h), c->v.t, src, dim);
    if (t->near_value.data)
        add_weighed(out, r->logits + src - n, from(&t->near_value, h, t->near_values, dim, src, src - n),
                    dim, n, dim);
    for (int64_t d = 0; d < dim; d++)
        out[d] /= mass;
    if (t->value_tail.data)
        add_rows(out, of_head(&t->value_tail, h), dim);
}

#endif
