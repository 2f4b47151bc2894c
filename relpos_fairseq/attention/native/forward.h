/* The forward pass: for one block of queries after another, a softmax over chunks of keys.
 *
 * A row keeps the largest logit so far (`top`), the sum of exp(logit - top) (`mass`) and the sum of
 * exp(logit - top) v (`out`).  Where a chunk has a larger logit, what was summed before shrinks.
 */
#ifndef RELPOS_FORWARD_H
#define RELPOS_FORWARD_H

#include "logits.h"

/* Row r of s: logits -> exp(logit - top), dropped; top and mass take in the chunk. */
static void softmax_row(Head *x, const Chunk *at, const Row *row)
{
    const Call *c = x->call;
    int64_t r = row->r;
    real *s = x->s + r * x->tile;
    real top = largest(s + row->begin, row->end - row->begin, x->top[r]);
    real against = top == -(real)INFINITY ? 0 : top; /* no key yet: -inf - -inf is NaN */
    real shrink = exponential_of(x->top[r] - against);
    x->mass[r] = x->mass[r] * shrink +
                 exponentials(s, row->begin, row->end, at->length, against);
    if (shrink != 1 && x->top[r] != -(real)INFINITY) {
        real *out = x->out + r * x->value_dim;
        for (int64_t i = 0; i < x->value_dim; i++)
            out[i] *= shrink;
        if (x->value_vectors.table && !at->wide)
            for (int64_t w = 0; w < at->width; w++)
                x->value_vectors.sums[r * at->query_row + w] *= shrink;
    }
    x->top[r] = top;
    if (c->drop) {
        draw(x, at, row);
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] = x->bits[j] >= c->drop ? s[j] : 0;
    }
    if (x->value_vectors.table)
        scatter_by_query(&x->value_vectors, at, row, s);
}

/* out (rows, value_dim) += exp(logits) (rows, tile) v (tile, value_dim). */
static void forward_chunk(Head *x, Chunk *at, int64_t keys, int64_t length)
{
    const Call *c = x->call;
    begin_chunk(x, at, keys, length);
    logits(x, at);
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        softmax_row(x, at, &row);
    }
    product(at->count, c->value_dim, length, rows_of(x->s, x->tile),
            matrix(x->v_rows + keys * x->value_dim, x->value_dim), x->out, x->value_dim, 1);
    if (x->value_vectors.table && c->wide)
        product(at->count, c->value_dim, keys + length - at->slot - at->low - at->from,
                rows_of(x->value_vectors.sums, at->query_row),
                matrix(x->value_vectors.rows + at->from * x->value_dim, x->value_dim), x->out, x->value_dim, 1);
}

/* Divide a block's sums by mass, and store them with top and mass. */
static void end_forward(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    if (x->value_vectors.table && !c->wide)
        product(at->count, c->value_dim, c->width, rows_of(x->value_vectors.sums, at->query_row),
                matrix(x->value_vectors.rows, x->value_dim), x->out, x->value_dim, 1);
    real kept = (real)(65536.0 / (65536 - c->drop));
    for (int64_t r = 0; r < at->count; r++) {
        int64_t i = at->first + r;
        int empty = x->mass[r] == 0; /* no key at all: 0 here, and no gradient */
        const real *from = x->out + r * x->value_dim;
        real *to = rows_for(&c->out, x, i), inverse = empty ? 0 : kept / x->mass[r];
        for (int64_t v = 0; v < c->value_dim; v++)
            to[v] = from[v] * inverse;
        c->top[x->n * c->tgt + i] = empty ? 0 : x->top[r];
        c->mass[x->n * c->tgt + i] = empty ? (real)INFINITY : x->mass[r];
    }
}

/* A block of queries of each head of a group. */
static void forward_block(Head *group, int members, int64_t first)
{
    Chunk at;
    for (int m = 0; m < members; m++) {
        Head *x = group + m;
        begin_block(x, &at, first);
        fill(x->top, at.count, -(real)INFINITY);
        zero(x->mass, at.count);
        zero(x->out, x->rows * x->value_dim);
    }
    int64_t begin, end;
    keys_of(group, &at, &begin, &end);
    for (int64_t keys = begin, length; keys < end; keys += length) {
        length = length_of(keys, begin, end);
        for (int m = 0; m < members; m++)
            forward_chunk(group + m, &at, keys, length);
    }
    for (int m = 0; m < members; m++)
        end_forward(group + m, &at);
}

#endif
