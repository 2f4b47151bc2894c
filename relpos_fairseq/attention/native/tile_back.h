/* Of one tile, from the gradient of the output to those of logits, and on to what the logits came from. */
#ifndef RELPOS_TILE_BACK_H
#define RELPOS_TILE_BACK_H

#include "logits.h"

/* Row r of s: logits -> probabilities, after dropout; of ds: the gradient of these -> that of logits.
 *
 * With p the probabilities before dropout and dp their gradients, the logits' gradient is p_j (dp_j - mean),
 * mean = sum_j p_j dp_j.  The mean is also the product of the row's output and the output's gradient, which
 * is how `delta` has it from the start.  Where this chunk holds all of the row's keys (`whole`), the mean
 * is summed here from the same p and dp instead.  Then its rounding matches theirs: for a key that has
 * nearly all the probability, dp_j and the mean are nearly equal, and the difference of two numbers that
 * were rounded in different ways would be mostly error.
 */
static void softmax_row_back(Head *x, const Chunk *at, const Row *row, int whole)
{
    const Call *c = x->call;
    int64_t r = row->r, length = round_up(at->length, MR);
    real *restrict s = x->s + r * x->tile, *restrict ds = x->ds + r * x->tile;
    real *restrict undropped = x->scratch_a;
    real top = x->top[r], inverse = 1 / x->mass[r], delta = x->delta[r];
    if (x->value_vectors.table)
        gather_by_query(&x->value_vectors, at, row, ds, 1);
    for (int64_t j = row->begin; j < row->end; j += NR) { /* a row has room for two more vectors */
        vec *pair = (vec *)(s + j);
        exponential(pair, top);
        pair[0] *= inverse;
        pair[1] *= inverse;
    }
    const real *p = s;
    if (c->drop) {
        real factor = (real)(65536.0 / (65536 - c->drop));
        draw(x, at, row);
        for (int64_t j = row->begin; j < row->end; j++) {
            real kept = x->bits[j] >= c->drop ? factor : 0;
            undropped[j] = s[j];
            s[j] *= kept;
            ds[j] *= kept;
        }
        p = undropped;
    }
    if (whole)
        delta = dot(p + row->begin, ds + row->begin, row->end - row->begin);
    for (int64_t j = row->begin; j < row->end; j++)
        ds[j] = p[j] * (ds[j] - delta);
    zero(s, row->begin);
    zero(s + row->end, length - row->end);
    zero(ds, row->begin);
    zero(ds + row->end, length - row->end);
    if (x->value_vectors.table)
        scatter_by_query(&x->value_vectors, at, row, s);
}

/* Row r, from the gradient ds of content * gate * by_query * by_key to those of its four factors.
 * `content` is overwritten by its own gradient. */
static void multiply_row_back(Head *x, const Chunk *at, const Row *row)
{
    int64_t length = round_up(at->length, MR);
    int64_t place = row->place + at->low + x->call->start + x->call->tgt - 1;
    real *restrict content = x->content + row->r * x->tile;
    const real *restrict ds = x->ds + row->r * x->tile;
    real *restrict by_query = x->scratch_b, *restrict by_key = x->scratch_c;
    real *restrict own = x->scratch_a; /* ds * content, and then * gate */
    if (x->product_query.table) {
        gather_by_query(&x->product_query, at, row, by_query, 0);
        gather_by_key(&x->product_key, at, row, by_key, 0);
    } else {
        fill(by_query + row->begin, row->end - row->begin, 1);
        fill(by_key + row->begin, row->end - row->begin, 1);
    }
#pragma GCC ivdep
    for (int64_t j = row->begin; j < row->end; j++) {
        own[j] = ds[j] * content[j];
        content[j] = ds[j] * by_query[j] * by_key[j];
    }
    if (x->dgate) {
        real *restrict dgate = x->dgate + place;
#pragma GCC ivdep
        for (int64_t j = row->begin; j < row->end; j++)
            dgate[j] += own[j] * by_query[j] * by_key[j];
    }
    if (x->gate) {
        const real *restrict gate = x->gate + place;
#pragma GCC ivdep
        for (int64_t j = row->begin; j < row->end; j++) {
            own[j] *= gate[j];
            content[j] *= gate[j];
        }
    }
    zero(content, row->begin);
    zero(content + row->end, length - row->end);
    if (!x->product_query.table)
        return;
#pragma GCC ivdep
    for (int64_t j = row->begin; j < row->end; j++) {
        real to_query = own[j] * by_key[j];
        by_key[j] = own[j] * by_query[j];
        by_query[j] = to_query;
    }
    scatter_by_query(&x->product_query, at, row, by_query);
    scatter_by_key(&x->product_key, at, row, by_key);
}

/* From the gradient of logits (rows, tile) to those of content's queries and keys. */
static void content_back(Head *x, const Chunk *at)
{
    real *change = x->ds;
    if (x->multiplied) {
        change = x->content;
        for (int64_t r = 0; r < at->count; r++) {
            Row row = row_of(x, at, r);
            multiply_row_back(x, at, &row);
        }
    }
    if (x->trilinear) {
        if (!x->multiplied)
            memcpy(x->content, x->ds, at->count * x->tile * sizeof(real));
        trilinear_back(x, at, x->content);
        return;
    }
    int64_t dim = x->dim;
    product(at->count, dim, at->length, rows_of(change, x->tile), matrix(x->k_rows + at->keys * dim, dim),
            x->dq, dim, 1);
    product(at->length, dim, at->count, columns_of(change, x->tile), matrix(x->q, dim),
            x->dk + at->keys * dim, dim, 1);
}

/* From the gradient of logits (rows, tile) to those of the kinds in `kinds`. */
static void kinds_back(Head *x, const Chunk *at, int kinds)
{
    int vectors = (kinds & RESET_VECTORS) && (x->query_vectors.table || x->key_vectors.table);
    int scalars = (kinds & RESET_SCALARS) && x->dstatic;
    for (int64_t r = 0; (vectors || scalars) && r < at->count; r++) {
        Row row = row_of(x, at, r);
        const real *ds = x->ds + r * x->tile;
        if (vectors && x->query_vectors.table)
            scatter_by_query(&x->query_vectors, at, &row, ds);
        if (vectors && x->key_vectors.table)
            scatter_by_key(&x->key_vectors, at, &row, ds);
        if (scalars) {
            int64_t place = row.place + at->low + x->call->start + x->call->tgt - 1;
            for (int64_t j = row.begin; j < row.end; j++)
                x->dstatic[j + place] += ds[j];
        }
    }
    if ((kinds & RESET_FACTORS) && x->factors)
        for (int64_t r = 0; r < at->count; r++) {
            const real *restrict ds = x->ds + r * x->tile;
            real *restrict sum = x->dfactors + r * x->tile;
            int64_t length = round_up(at->length, MR);
            if (x->member)
                for (int64_t j = 0; j < length; j++)
                    sum[j] += ds[j];
            else
                memcpy(sum, ds, length * sizeof(real));
        }
}

/* From `dfactors`, the sum over a group's members of the gradient of logits, to those of the factors. */
static void factors_back(Head *x, const Chunk *at)
{
    int64_t rank = x->rank;
    product(at->count, rank, at->length, rows_of(x->dfactors, x->tile),
            matrix(x->key_factor_rows + at->keys * rank, rank), x->dquery_factors, rank, 1);
    product(at->length, rank, at->count, columns_of(x->dfactors, x->tile), matrix(x->query_factors, rank),
            x->dkey_factors + at->keys * rank, rank, 1);
}

/* The gradient of `reset`; cells that it replaced become 0, so that the replaced kinds get nothing. */
static void reset_back(Head *x, const Chunk *at)
{
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *ds = x->ds + r * x->tile;
        int64_t column = reset_column(x, at, &row);
        if (at->slot + r == x->first) {
            /* A row's softmax does not change with a number that is added to the whole row: dreset[0] is 0. */
            zero(ds, at->length);
        } else if (column >= 0) {
            if (x->dreset)
                x->dreset[1] += ds[column];
            ds[column] = 0;
        }
    }
}

/* products = x table^T.  From the gradient of products (count, columns), the table's rows from `from` on:
 * dx (count, dim) += sums table, and the table's grad (columns, dim) += sums^T x. */
static void table_back(const Packed *packed, const real *sums, int64_t row, int64_t count,
                      int64_t columns, int64_t from, const real *x, real *dx, int64_t dim)
{
    if (dx)
        product(count, dim, columns, rows_of(sums, row), matrix(packed->rows + from * dim, dim), dx, dim,
                1);
    product(columns, dim, count, columns_of(sums, row), matrix(x, dim), packed->grad + from * dim, dim,
            1);
}

/* The same for all wide tables of a chunk. */
static void wide_back(Head *x, const Chunk *at)
{
    int64_t columns = at->keys + at->length - at->slot - at->low - at->from;
    Packed *queries[2] = {&x->query_vectors, &x->product_query}, *keys[2] = {&x->key_vectors, &x->product_key};
    for (int s = 0; s < 2; s++) {
        if (queries[s]->table)
            table_back(queries[s], queries[s]->sums, at->query_row, at->count, columns, at->from,
                      x->vector_q, x->dvector_q, x->dim);
        for (int64_t j = 0; keys[s]->table && j < at->length; j += KEYS) {
            int64_t from = from_of_keys(at, j), here = least(KEYS, at->length - j);
            int64_t first = (at->keys + j) * x->dim;
            table_back(keys[s], keys[s]->sums + j * at->key_row, at->key_row, here,
                      at->keys + j + here - at->slot - at->low - from, from, x->vector_k + first,
                      x->dvector_k + first, x->dim);
        }
    }
    if (x->value_vectors.table)
        table_back(&x->value_vectors, x->value_vectors.sums, at->query_row, at->count, columns, at->from, x->dout, NULL,
                  x->value_dim);
}

#endif
