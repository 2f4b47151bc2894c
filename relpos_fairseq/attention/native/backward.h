/* The backward pass: for one block of queries after another, every tile of logits is formed again.
 *
 * A thread owns a head (or a group of rows of the batch that share factors), so that it adds to all of that
 * head's gradients alone, in one order.
 */
#ifndef RELPOS_BACKWARD_H
#define RELPOS_BACKWARD_H

#include "tile_back.h"

/* The last sums of a block of queries, whose gradients are complete then. */
static void end_block(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    if (x->trilinear)
        trilinear_end_block(x, at);
    Packed *queries[2] = {&x->query_vectors, &x->product_query};
    if (!c->wide) {
        for (int s = 0; s < 2; s++)
            if (queries[s]->table)
                table_back(queries[s], queries[s]->sums, at->query_row, at->count, c->width, 0,
                          x->vector_q, x->dvector_q, x->dim);
        if (x->value_vectors.table)
            table_back(&x->value_vectors, x->value_vectors.sums, at->query_row, at->count, c->width, 0, x->dout, NULL,
                      x->value_dim);
    }
    real scale = (real)c->scale;
    const Tensor *content = c->content_q.data ? &c->dcontent_q : &c->dq;
    int apart = content != &c->dq; /* vectors give to another tensor than content */
    for (int64_t r = 0; r < at->count; r++) {
        const real *of_content = x->dq + r * x->dim, *of_vectors = x->dvector_q + r * x->dim;
        if (x->dcontent_offset)
            for (int64_t i = 0; i < c->dim; i++)
                x->dcontent_offset[i] += scale * of_content[i];
        if (content->data) {
            real *to = rows_for(content, x, at->first + r);
            for (int64_t i = 0; i < c->dim; i++)
                to[i] = scale * of_content[i] + (apart ? 0 : of_vectors[i]);
        }
        if (apart && c->dq.data)
            memcpy(rows_for(&c->dq, x, at->first + r), of_vectors, c->dim * sizeof(real));
        if (c->dquery_factors && x->dquery_factors)
            memcpy(c->dquery_factors + (factors_of(x) * c->tgt + at->first + r) * c->rank, x->dquery_factors + r * x->rank,
                   c->rank * sizeof(real));
    }
}

/* Begin a block: its gradients are 0, and delta (rows,) = sum over channels of out * dout. */
static void begin_backward(Head *x, Chunk *at, int64_t first)
{
    const Call *c = x->call;
    begin_block(x, at, first);
    zero(x->dq, x->rows * x->dim);
    zero(x->dvector_q, x->rows * x->dim);
    if (x->dquery_factors)
        zero(x->dquery_factors, x->rows * x->rank);
    if (x->trilinear) {
        zero(x->dleft_q, x->rows * x->dim);
        zero(x->dright_q, x->rows * x->dim);
    }
    for (int64_t r = 0; r < at->count; r++) {
        prefetch(rows_at(&c->out, x, first + r + AHEAD), c->value_dim);
        x->delta[r] = dot(x->dout + r * x->value_dim, rows_at(&c->out, x, first + r), c->value_dim);
        x->top[r] = c->top[x->n * c->tgt + first + r];
        x->mass[r] = c->mass[x->n * c->tgt + first + r];
    }
}

/* One tile: its logits again, its probabilities, and what their gradient gives to all operands. */
static void backward_chunk(Head *x, Chunk *at, int64_t keys, int64_t length, int whole)
{
    const Call *c = x->call;
    int all = RESET_VECTORS | RESET_SCALARS | RESET_FACTORS, replaced = (int)c->reset_kinds;
    begin_chunk(x, at, keys, length);
    logits(x, at);
    product(at->count, length, c->value_dim, rows_of(x->dout, x->value_dim),
            panels_from(x->v_panels, c->value_dim, keys), x->ds, x->tile, 0);
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        softmax_row_back(x, at, &row, whole);
    }
    product(length, x->value_dim, at->count, columns_of(x->s, x->tile), matrix(x->dout, x->value_dim),
            x->dv + keys * x->value_dim, x->value_dim, 1);
    content_back(x, at);
    kinds_back(x, at, all & ~replaced);
    if (replaced) {
        reset_back(x, at);
        kinds_back(x, at, replaced);
    }
    if (c->wide)
        wide_back(x, at);
}

/* A block of queries of each head of a group. */
static void backward_block(Head *group, int members, int64_t first)
{
    Chunk at;
    for (int m = 0; m < members; m++)
        begin_backward(group + m, &at, first);
    int64_t begin, end;
    keys_of(group, &at, &begin, &end);
    for (int64_t keys = begin, length; keys < end; keys += length) {
        length = length_of(keys, begin, end);
        for (int m = 0; m < members; m++)
            backward_chunk(group + m, &at, keys, length, length == end - begin);
        if (group->dquery_factors)
            factors_back(group, &at);
    }
    for (int m = 0; m < members; m++)
        end_block(group + m, &at);
}

/* Copy gradients (rows, channels) to where the call wants them. */
static void store_rows(const Tensor *to, const Head *x, int64_t rows, const real *from, int64_t from_row,
                       int64_t channels)
{
    for (int64_t i = 0; to->data && i < rows; i++)
        memcpy(rows_for(to, x, i), from + i * from_row, channels * sizeof(real));
}

/* The same, times a factor, without gaps. */
static void store(real *to, int64_t rows, const real *from, int64_t from_row, int64_t channels,
                  real factor)
{
    for (int64_t i = 0; to && i < rows; i++)
        for (int64_t c = 0; c < channels; c++)
            to[i * channels + c] = factor * from[i * from_row + c];
}

/* The gradients of a band that keys were multiplied with, when all blocks of queries are done. */
static void end_keys(Head *x, Packed *packed)
{
    const Call *c = x->call;
    if (!packed->table || c->wide)
        return;
    int64_t row = key_row(x);
    for (int64_t j = 0; j < c->src; j++) {
        packed->sums[j * row] += packed->left_sums[j];
        packed->sums[j * row + c->width - 1] += packed->right_sums[j];
    }
    /* Some keys at a time: short sums err less than one over all of them. */
    for (int64_t j = 0; j < c->src; j += 4 * UNIT)
        table_back(packed, packed->sums + j * row, row, least(4 * UNIT, c->src - j), c->width, 0,
                   x->vector_k + j * x->dim, x->dvector_k + j * x->dim, x->dim);
}

/* Store a head's gradients of keys, values and tables. */
static void end_head(Head *x)
{
    const Call *c = x->call;
    int64_t n = x->n;
    end_keys(x, &x->key_vectors);
    end_keys(x, &x->product_key);
    if (x->trilinear) {
        for (int64_t channel = 0; channel < c->dim; channel++)
            for (int64_t j = 0; j < c->src; j++)
                x->dk[j * x->dim + channel] += x->dk_channels[channel * x->k_length + j];
        real *to = c->dtrilinear ? c->dtrilinear + n * c->width * c->dim : NULL;
        for (int64_t w = 0; to && w < c->width; w++)
            for (int64_t channel = 0; channel < c->dim; channel++)
                to[w * c->dim + channel] = x->dtrilinear_channels[channel * x->trilinear_length + w] +
                                           (w == 0 ? x->dtrilinear_ends[channel] : 0) +
                                           (w == c->width - 1 ? x->dtrilinear_ends[x->dim + channel] : 0);
    }
    store_rows(c->content_k.data ? &c->dcontent_k : &c->dk, x, c->src, x->dk, x->dim, c->dim);
    if (c->content_k.data)
        store_rows(&c->dk, x, c->src, x->dvector_k, x->dim, c->dim);
    store_rows(&c->dv, x, c->src, x->dv, x->value_dim, c->value_dim);
#define STORE(name, channels)                                                                      \
    if (c->d##name)                                                                                \
        store(c->d##name + n * c->width * (channels), c->width, x->name.grad,                      \
              round_up(channels, VL), channels, x->name.factor);
    STORE(query_vectors, c->dim)
    STORE(key_vectors, c->dim)
    STORE(product_query, c->dim)
    STORE(product_key, c->dim)
    STORE(value_vectors, c->value_dim)
#undef STORE
    if (c->dkey_factors && x->dkey_factors)
        store(c->dkey_factors + factors_of(x) * c->src * c->rank, c->src, x->dkey_factors, x->rank, c->rank, 1);
}

/* Begin a head: what its blocks of queries will add to is 0. */
static void begin_sums(Head *x)
{
    const Call *c = x->call;
    int64_t n = x->n, span = c->tgt + c->src - 1, keys = padded(c->src);
    zero(x->dk, keys * x->dim);
    if (c->content_k.data)
        zero(x->dvector_k, keys * x->dim);
    zero(x->dv, keys * x->value_dim);
    if (x->dkey_factors)
        zero(x->dkey_factors, keys * x->rank);
    if (x->trilinear) {
        zero(x->dk_channels, c->dim * x->k_length);
        zero(x->dtrilinear_channels, c->dim * x->trilinear_length);
        zero(x->dtrilinear_ends, 2 * x->dim);
    }
#define BEGIN(name, count)                                                                         \
    x->name = c->name ? c->name + n * (count) : NULL;                                              \
    if (x->name)                                                                                   \
        zero(x->name, count);
    BEGIN(dstatic, span)
    BEGIN(dgate, span)
    BEGIN(dcontent_offset, c->dim)
    BEGIN(dreset, 2)
#undef BEGIN
}

static void backward_heads(Head *group, int members)
{
    for (int m = 0; m < members; m++)
        begin_sums(group + m);
    for (int64_t first = 0; first < group->call->tgt; first += group->rows)
        backward_block(group, members, first);
    for (int m = 0; m < members; m++)
        end_head(group + m);
}

#endif
