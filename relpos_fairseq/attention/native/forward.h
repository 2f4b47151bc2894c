/* The forward pass: the logits of one tile after another, and a softmax over chunks of keys.
 *
 * For each query the pass keeps the largest logit so far (`row_max`), the sum of exp(logit - row_max) (`row_sum`), and
 * the sum of exp(logit - row_max) v (`out`).  Where a chunk has a larger logit, the sums so far are scaled down to it.
 */
#ifndef RELPOS_FORWARD_H
#define RELPOS_FORWARD_H

#include "trilinear.h"

/* ------------------------------------------------------------------------------------------ Logits of a tile */

/* A table of scalars (span,) has the row's distance to the chunk's first key at the place
 *
 *     row->table_row + tile->low + query_start + tgt_len - 1
 *
 * The sum is written out where it is needed: as a function, gcc spends registers on it in the loops. */

/* s[j] *= gate_d (q.product_query_d) (k_j.product_key_d), for the keys that the row sees. */
static void multiply_row(Head *head, const Tile *tile, const Row *row, real *s)
{
    real *factor = head->scratch_a, *by_query = head->scratch_b, *by_key = head->scratch_c; /* (num_keys,) each */
    if (head->gate) {
        const real *gate = head->gate + row->table_row + tile->low + head->call->query_start + head->call->tgt_len - 1;
        memcpy(factor + row->begin, gate + row->begin, (row->end - row->begin) * sizeof(real));
    } else {
        fill(factor + row->begin, row->end - row->begin, 1);
    }
    if (head->product_query.data) {
        gather_by_query(&head->product_query, tile, row, by_query, 0);
        gather_by_key(&head->product_key, tile, row, by_key, 0);
        for (int64_t j = row->begin; j < row->end; j++)
            factor[j] *= by_query[j] * by_key[j];
    }
    for (int64_t j = row->begin; j < row->end; j++)
        s[j] *= factor[j];
}

/* s[j] += some summands (RESET_* bits) of the logits, for the keys that the row sees. */
static void add_terms(Head *head, const Tile *tile, const Row *row, real *s, int summands)
{
    if (summands & RESET_VECTORS) {
        if (head->query_vectors.data)
            gather_by_query(&head->query_vectors, tile, row, s, 1);
        if (head->key_vectors.data)
            gather_by_key(&head->key_vectors, tile, row, s, 1);
    }
    if ((summands & RESET_SCALARS) && head->static_) {
        const real *table =
            head->static_ + row->table_row + tile->low + head->call->query_start + head->call->tgt_len - 1;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += table[j];
    }
    if ((summands & RESET_FACTORS) && head->factors) {
        const real *factors = head->factors + row->query * head->tile_stride;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += factors[j];
    }
}

/* One side of a row's decay: weight (sums[j] - own) for the keys begin .. end. */
typedef struct {
    const real *sums;
    real own, weight;
    int64_t begin, end;
} Side;

/* Return side 0 of a row, its keys up to the query's slot, or side 1, those after it. */
INLINE Side side_of(const Head *head, const Tile *tile, const Row *row, int after)
{
    const Tensor *decay = &head->call->decay;
    int64_t slot = tile->first_slot + row->query, split = clamp(slot + 1 - tile->first_key, row->begin, row->end);
    const real *sums = row_at(decay, head, after);
    real weight = row_at(decay, head, 2)[slot];
    return (Side){sums + tile->first_key, sums[slot], after ? weight : -weight, after ? split : row->begin,
                  after ? row->end : split};
}

/* s[j] += the decay between the row's query and each key that it sees. */
static void add_decay(const Head *head, const Tile *tile, const Row *row, real *s)
{
    for (int after = 0; after < 2; after++) {
        Side side = side_of(head, tile, row, after);
        for (int64_t j = side.begin; j < side.end; j++)
            s[j] += side.weight * (side.sums[j] - side.own);
    }
}

/* The place in the chunk of the reset token's column, or -1 if the row does not see it. */
INLINE int64_t reset_column(const Head *head, const Tile *tile, const Row *row)
{
    int64_t j = head->first_token - tile->first_key;
    return row->begin <= j && j < row->end ? j : -1;
}

/* s[j] += what positions add.  In the row and the column of the reset token, two numbers replace the
 * summands in `reset_replaces`. */
static void add_positions(Head *head, const Tile *tile, const Row *row, real *s)
{
    int replaced = (int)head->call->reset_replaces, all = RESET_VECTORS | RESET_SCALARS | RESET_FACTORS;
    add_terms(head, tile, row, s, all & ~replaced);
    if (!replaced)
        return;
    int is_reset_row = tile->first_slot + row->query == head->first_token;
    int64_t column = reset_column(head, tile, row);
    real before = column >= 0 ? s[column] : 0;
    if (is_reset_row) {
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += head->reset[0];
        return;
    }
    add_terms(head, tile, row, s, replaced);
    if (column >= 0)
        s[column] = before + head->reset[1];
}

/* s[j] = -inf where key j is padding, or of another document than the row's query. */
static void mask_row(const Head *head, const Tile *tile, const Row *row, real *s)
{
    const Call *call = head->call;
    if (call->key_padding) {
        const uint8_t *padding = call->key_padding + head->b * call->src_len + tile->first_key;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] = padding[j] ? -(real)INFINITY : s[j];
    }
    if (call->documents) {
        const int64_t *documents = call->documents + head->b * call->src_len;
        int64_t own = documents[tile->first_slot + row->query];
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] = documents[tile->first_key + j] != own ? -(real)INFINITY : s[j];
    }
}

/* s (num_queries, num_keys) = the logits, -inf at masked keys.  Cells outside begin .. end of their row (causal mask,
 * window) hold no logit, and nothing reads them.  `content` keeps the content before gate and product multiply it. */
static void logits(Head *head, const Tile *tile)
{
    const Call *call = head->call;
    if (head->trilinear)
        trilinear_content(head, tile);
    else /* s (num_queries, num_keys) = q (num_queries, dim) k^T (dim, num_keys) */
        matmul(tile->num_queries, tile->num_keys, call->dim, left_rows(head->q, head->dim),
               right_panels(head->k_panels, call->dim, tile->first_key), head->s, head->tile_stride, 0);
    if (head->query_factors) /* factors = query_factors (num_queries, rank) key_factors^T (rank, num_keys) */
        matmul(tile->num_queries, tile->num_keys, call->rank, left_rows(head->query_factors, head->rank),
               right_panels(head->key_factor_panels, call->rank, tile->first_key), head->factors, head->tile_stride, 0);
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        real *s = head->s + r * head->tile_stride; /* (num_keys,) */
        if (head->has_multiplier) {
            memcpy(head->content + r * head->tile_stride, s, tile->num_keys * sizeof(real));
            multiply_row(head, tile, &row, s);
        }
        if (call->decay.data)
            add_decay(head, tile, &row, s);
        add_positions(head, tile, &row, s);
        mask_row(head, tile, &row, s);
    }
}

/* drop_bits[j] = 16 random bits for each cell of a row.  Dropout keeps the cells whose bits are >= drop_threshold. */
INLINE void draw_drop_bits(Head *head, const Tile *tile, const Row *row)
{
    const Call *call = head->call;
    int64_t number = head->b * call->all_heads + call->first_head + head->h; /* of the head in the whole call */
    random_bits(head->drop_bits, call->seed, number, tile->first_query + row->query, tile->first_key, tile->num_keys);
}

/* ---------------------------------------------------------------------------------------------- Forward pass */

/* One row of s: logits -> exp(logit - row_max), with dropout; row_max and row_sum take in the chunk. */
static void softmax_row(Head *head, const Tile *tile, const Row *row)
{
    const Call *call = head->call;
    int64_t r = row->query;
    real *s = head->s + r * head->tile_stride;
    real row_max = largest(s + row->begin, row->end - row->begin, head->row_max[r]);
    real finite_max = row_max == -(real)INFINITY ? 0 : row_max; /* no key so far: -inf - -inf would be NaN */
    real shrink = exponential_of(head->row_max[r] - finite_max);
    head->row_sum[r] = head->row_sum[r] * shrink + exponentials(s, row->begin, row->end, tile->num_keys, finite_max);
    if (shrink != 1 && head->row_max[r] != -(real)INFINITY) {
        real *out = head->out + r * head->value_dim;
        for (int64_t i = 0; i < head->value_dim; i++)
            out[i] *= shrink;
        if (head->value_vectors.data && !tile->unclipped)
            for (int64_t w = 0; w < tile->width; w++)
                head->value_vectors.scattered[r * tile->query_stride + w] *= shrink;
    }
    head->row_max[r] = row_max;
    if (call->drop_threshold) {
        draw_drop_bits(head, tile, row);
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] = head->drop_bits[j] >= call->drop_threshold ? s[j] : 0;
    }
    if (head->value_vectors.data)
        scatter_by_query(&head->value_vectors, tile, row, s);
}

/* out (num_queries, value_dim) += scattered (num_queries, columns) times a tile's rows of value_vectors. */
static void add_value_vectors(Head *head, const Tile *tile)
{
    const PackedTable *packed = &head->value_vectors;
    if (packed->data)
        matmul(tile->num_queries, head->call->value_dim, tile->columns, left_rows(packed->scattered, tile->query_stride),
               right_rows(packed->rows + tile->first_row * head->value_dim, head->value_dim), head->out,
               head->value_dim, 1);
}

/* One tile: add exp(logits) times values, and times value_vectors, to `out`. */
static void forward_chunk(Head *head, Tile *tile, int64_t first_key, int64_t num_keys)
{
    const Call *call = head->call;
    begin_chunk(head, tile, first_key, num_keys);
    logits(head, tile);
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        softmax_row(head, tile, &row);
    }
    /* out (num_queries, value_dim) += s (num_queries, num_keys) v (num_keys, value_dim) */
    matmul(tile->num_queries, call->value_dim, num_keys, left_rows(head->s, head->tile_stride),
           right_rows(head->v_rows + first_key * head->value_dim, head->value_dim), head->out, head->value_dim, 1);
    if (call->unclipped)
        add_value_vectors(head, tile);
}

/* Divide the sums of a block by row_sum, and store them with row_max and row_sum. */
static void end_forward(Head *head, const Tile *tile)
{
    const Call *call = head->call;
    if (!call->unclipped)
        add_value_vectors(head, tile);
    real keep_scale = (real)(65536.0 / (65536 - call->drop_threshold)); /* 1 / (1 - dropout) */
    for (int64_t r = 0; r < tile->num_queries; r++) {
        int64_t i = tile->first_query + r;
        int empty = head->row_sum[r] == 0; /* the query sees no key: its output is 0, and has no gradient */
        const real *from = head->out + r * head->value_dim;
        real *to = row_at(&call->out, head, i), inverse = empty ? 0 : keep_scale / head->row_sum[r];
        for (int64_t v = 0; v < call->value_dim; v++)
            to[v] = from[v] * inverse;
        call->row_max[head->n * call->tgt_len + i] = empty ? 0 : head->row_max[r];
        call->row_sum[head->n * call->tgt_len + i] = empty ? (real)INFINITY : head->row_sum[r];
    }
}

/* The block of queries from query `first` on, of each head of a group. */
static void forward_block(Head *group, int members, int64_t first)
{
    Tile tile;
    for (int m = 0; m < members; m++) {
        Head *head = group + m;
        begin_block(head, &tile, first);
        fill(head->row_max, tile.num_queries, -(real)INFINITY);
        zero(head->row_sum, tile.num_queries);
        zero(head->out, head->block_queries * head->value_dim);
    }
    int64_t begin, end;
    visible_keys(group, members, &tile, &begin, &end);
    for (int64_t first_key = begin, num_keys; first_key < end; first_key += num_keys) {
        num_keys = chunk_length(first_key, begin, end);
        for (int m = 0; m < members; m++)
            forward_chunk(group + m, &tile, first_key, num_keys);
    }
    for (int m = 0; m < members; m++)
        end_forward(group + m, &tile);
}

#endif
