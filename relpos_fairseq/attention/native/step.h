/* One step of decoding: a single query for each head of a row, which stands on the last key.
 *
 *     logits_j = (query.content_k_j + sum_c trilinear_j,c content_q_c content_k_j,c) gate_j factor_j
 *                * (q.product_query_j) (k_j.product_key_j)
 *                + key_offset.k_j + q.near_query_j + k_j.near_key_j
 *                + static_j + added_j + query_factors.key_factors_j
 *     query    = content_q query_factor + query_offset
 *     out      = sum_j probs_j (v_j + near_value_j) + value_tail
 *
 * where near tables have rows for the last keys, and nothing for those before them; the first row of
 * product_query and product_key is that of all keys further off.
 *
 * What queries make of tables is formed first, head by head: rows of the batch share a head's tables, which
 * are read once.  Then row by row, as keys and values lie in memory.
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
    Table near_query, product_query; /* (H|1, rows / PANEL, channels, PANEL): transposed */
    Table near_key, trilinear, near_value, product_key; /* (H|1, rows, channels) */
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

/* Products of all queries with tables of queries, in one piece: (H, B, row of a table). */
typedef struct {
    real *near, *product;
    int64_t near_row, product_row;
} Met;

/* Of a thread, in one piece: logits, the query, products, and what the rows of each head share. */
typedef struct {
    real *logits, *query, *of_k, *shared;
} Scratch;

/* Keys that meet a near table of `rows` rows. */
INLINE int64_t near_of(const Step *c, const Table *x, int64_t rows) { return x->data ? least(rows, c->src) : 0; }

/* The first of near_query's rows that are met: a multiple of NR, so that it may be one that no key reads. */
INLINE int64_t first_met(const Step *c) { return most(c->tables->near_queries - c->src, 0) / NR * NR; }

INLINE int64_t near_row(const Step *c) { return round_up(c->tables->near_queries - first_met(c), NR); }

INLINE int64_t product_row(const Step *c) { return round_up(c->tables->near_products, NR); }

INLINE int64_t met_size(const Step *c) { return c->batch * c->heads * (near_row(c) + product_row(c)); }

INLINE Met met_of(const Step *c, real *memory)
{
    return (Met){memory, memory + c->batch * c->heads * near_row(c), near_row(c), product_row(c)};
}

INLINE int shares_factors(const Step *c)
{
    return c->query_factors.data && !c->query_factors.b && !c->key_factors.b;
}

/* Whether something is added to the logits of a head in all rows of the batch. */
INLINE int shares(const Step *c) { return c->tables->static_.data || shares_factors(c); }

/* Heads of whom it differs, if it does. */
INLINE int64_t heads_apart(const Step *c)
{
    int64_t factors = shares_factors(c) && (c->query_factors.h || c->key_factors.h);
    return c->tables->static_.h || factors ? c->heads : 1;
}

INLINE int64_t room_of_logits(const Step *c) { return round_up(c->src, NR) + NR; }

INLINE int64_t scratch_size(const Step *c)
{
    const StepTables *t = c->tables;
    return room_of_logits(c) * (1 + (shares(c) ? heads_apart(c) : 0)) + t->content_dim + t->near_products;
}

INLINE Scratch scratch_of(const Step *c, real *memory)
{
    real *query = memory + room_of_logits(c), *of_k = query + c->tables->content_dim;
    return (Scratch){memory, query, of_k, of_k + c->tables->near_products};
}

INLINE real *shared_of(const Step *c, const Scratch *r, int64_t h)
{
    return r->shared + h % heads_apart(c) * room_of_logits(c);
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

/* The queries of a head in all rows of the batch meet its tables. */
static void meet(const Step *c, const Met *met, int64_t h)
{
    const StepTables *t = c->tables;
    int64_t first = h * c->batch;
    const real *q = at(&c->q, 0, h);
    if (t->near_query.data)
        rows_by_panels(met->near + first * met->near_row, met->near_row, q, c->q.b, c->batch,
                       of_head(&t->near_query, h), first_met(c), t->near_queries, t->dim);
    if (t->product_query.data)
        rows_by_panels(met->product + first * met->product_row, met->product_row, q, c->q.b, c->batch,
                       of_head(&t->product_query, h), 0, t->near_products, t->dim);
}

/* s_j *= (q.product_query_j) (k_j.product_key_j). */
static void multiply(const Step *c, const Met *met, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    int64_t rows = t->near_products, n = least(rows - 1, c->src), far = c->src - n, dim = t->dim;
    const real *restrict tails = at(&c->tails, b, h);
    const real *restrict of_q = met->product + (h * c->batch + b) * met->product_row;
    real *restrict s = r->logits, *restrict of_k = r->of_k, of_tail = of_q[0];
    dots_of_two(of_k,
                &(Rows){.x = from(&t->product_key, h, rows, dim, c->src, far), .x_row = dim,
                        .y = at(&c->k, b, h) + far * c->k.t, .y_row = c->k.t},
                n, dim, 0);
    for (int64_t j = 0; j < far; j++)
        s[j] *= of_tail * tails[j];
    for (int64_t j = 0; j < n; j++)
        s[far + j] *= of_q[rows - n + j] * of_k[j];
}

/* The content's part of the logits, with all that multiplies it. */
static void content_of_step(const Step *c, const Met *met, int64_t b, int64_t h, const Scratch *r)
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
        multiply(c, met, b, h, r);
}

static void logits_of_step(const Step *c, const Met *met, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    int64_t src = c->src, dim = t->dim, of_q = near_of(c, &t->near_query, t->near_queries);
    int64_t n = near_of(c, &t->near_key, t->near_keys), far = src - n;
    int apart = t->trilinear.data || t->gate.data || c->factor.data || t->product_query.data ||
                c->content_k.data != c->k.data;
    Rows k = {.one = r->query, .y = at(&c->k, b, h), .y_row = c->k.t}, near = k;
    near.y += far * k.y_row;
    if (n)
        near.x = from(&t->near_key, h, t->near_keys, dim, src, far), near.x_row = dim;
    if (apart) {
        content_of_step(c, met, b, h, r);
        dots_of_two(r->logits + far, &near, n, dim, 1);
    } else {
        dots_of_one(r->logits, &k, far, dim, 0);
        dots_of_sum(r->logits + far, &near, n, dim, 0);
    }
    if (of_q)
        add_rows(r->logits + src - of_q,
                 met->near + (h * c->batch + b) * met->near_row + t->near_queries - of_q - first_met(c), of_q);
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
static void step(const Step *c, const Met *met, int64_t b, int64_t h, const Scratch *r)
{
    const StepTables *t = c->tables;
    const real *q = at(&c->content_q, b, h), *factor = of_head(&t->query_factor, h);
    for (int64_t d = 0; d < t->content_dim; d++)
        r->query[d] = q[d] * factor[d];
    if (t->query_offset.data)
        add_rows(r->query, of_head(&t->query_offset, h), t->content_dim);
    logits_of_step(c, met, b, h, r);
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
