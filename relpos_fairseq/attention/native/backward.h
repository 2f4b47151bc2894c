/* The backward pass: for one block of queries after another, the logits of every tile are formed again.
 *
 * A thread owns a head (or a group of batch rows that share factors).  It alone adds to that head's gradients, always
 * in the same order, so that the same inputs give the same bits.
 */
#ifndef RELPOS_BACKWARD_H
#define RELPOS_BACKWARD_H

#include "forward.h"

/* ------------------------------------------------------------------------------------- Gradients of one tile */

/* One row of s: logits -> probabilities, after dropout.  The same row of ds: their gradient -> the gradient of logits.
 *
 * With p the probabilities before dropout and dp their gradients, the gradient of a logit is p_j (dp_j - mean), where
 * mean = sum_j p_j dp_j.  The mean is also the dot product of the query's output and the output's gradient, which is
 * how `delta` has it from the start.  Where this chunk holds all keys of the row (`is_whole_row`), the mean is summed
 * here from the same p and dp instead.  Then the rounding errors match: for a key that has nearly all the probability,
 * dp_j and the mean are nearly equal, and the difference of two numbers that were rounded in different ways would be
 * mostly error.
 */
static NOINLINE void softmax_row_back(Head *head, const Tile *tile, const Row *row, int is_whole_row)
{
    const Call *call = head->call;
    int64_t r = row->query, length = round_up(tile->num_keys, MR);
    real *restrict s = head->s + r * head->tile_stride, *restrict ds = head->ds + r * head->tile_stride;
    real *restrict undropped = head->scratch_a;
    real row_max = head->row_max[r], inverse = 1 / head->row_sum[r], mean = head->delta[r];
    if (head->value_vectors.data)
        gather_by_query(&head->value_vectors, tile, row, ds, 1);
    for (int64_t j = row->begin; j < row->end; j += NR) { /* a row has room for two more vectors */
        vec *pair = (vec *)(s + j);
        exponential(pair, row_max);
        pair[0] *= inverse;
        pair[1] *= inverse;
    }
    const real *p = s;
    if (call->drop_threshold) {
        real keep_scale = (real)(65536.0 / (65536 - call->drop_threshold));
        draw_drop_bits(head, tile, row);
        for (int64_t j = row->begin; j < row->end; j++) {
            real kept = head->drop_bits[j] >= call->drop_threshold ? keep_scale : 0;
            undropped[j] = s[j];
            s[j] *= kept;
            ds[j] *= kept;
        }
        p = undropped;
    }
    if (is_whole_row)
        mean = dot(p + row->begin, ds + row->begin, row->end - row->begin);
    for (int64_t j = row->begin; j < row->end; j++)
        ds[j] = p[j] * (ds[j] - mean);
    zero(s, row->begin);
    zero(s + row->end, length - row->end);
    zero(ds, row->begin);
    zero(ds + row->end, length - row->end);
    if (head->value_vectors.data)
        scatter_by_query(&head->value_vectors, tile, row, s);
}

/* One row: from the gradient ds of content * gate * by_query * by_key to the gradients of these four factors.
 * `content` is overwritten by its own gradient. */
static NOINLINE void multiply_row_back(Head *head, const Tile *tile, const Row *row)
{
    int64_t length = round_up(tile->num_keys, MR);
    int64_t place = row->table_row + tile->low + head->call->query_start + head->call->tgt_len - 1;
    real *restrict content = head->content + row->query * head->tile_stride;
    const real *restrict ds = head->ds + row->query * head->tile_stride;
    real *restrict by_query = head->scratch_b, *restrict by_key = head->scratch_c;
    real *restrict own = head->scratch_a; /* ds * content, and then * gate */
    if (head->product_query.data) {
        gather_by_query(&head->product_query, tile, row, by_query, 0);
        gather_by_key(&head->product_key, tile, row, by_key, 0);
    } else {
        fill(by_query + row->begin, row->end - row->begin, 1);
        fill(by_key + row->begin, row->end - row->begin, 1);
    }
#pragma GCC ivdep
    for (int64_t j = row->begin; j < row->end; j++) {
        own[j] = ds[j] * content[j];
        content[j] = ds[j] * by_query[j] * by_key[j];
    }
    if (head->dgate) {
        real *restrict dgate = head->dgate + place;
#pragma GCC ivdep
        for (int64_t j = row->begin; j < row->end; j++)
            dgate[j] += own[j] * by_query[j] * by_key[j];
    }
    if (head->gate) {
        const real *restrict gate = head->gate + place;
#pragma GCC ivdep
        for (int64_t j = row->begin; j < row->end; j++) {
            own[j] *= gate[j];
            content[j] *= gate[j];
        }
    }
    zero(content, row->begin);
    zero(content + row->end, length - row->end);
    if (!head->product_query.data)
        return;
#pragma GCC ivdep
    for (int64_t j = row->begin; j < row->end; j++) {
        real dby_query = own[j] * by_key[j];
        by_key[j] = own[j] * by_query[j];
        by_query[j] = dby_query;
    }
    scatter_by_query(&head->product_query, tile, row, by_query);
    scatter_by_key(&head->product_key, tile, row, by_key);
}

/* From the gradient of logits ds (num_queries, num_keys) to the gradients of the content's queries and keys. */
static void content_back(Head *head, const Tile *tile)
{
    real *dcontent = head->ds;
    if (head->has_multiplier) {
        dcontent = head->content;
        for (int64_t r = 0; r < tile->num_queries; r++) {
            Row row = row_of_tile(head, tile, r);
            multiply_row_back(head, tile, &row);
        }
    }
    if (head->trilinear) {
        if (!head->has_multiplier)
            memcpy(head->content, head->ds, tile->num_queries * head->tile_stride * sizeof(real));
        trilinear_back(head, tile, head->content);
        return;
    }
    int64_t dim = head->dim;
    /* dq (num_queries, dim) += dcontent k;  dk (num_keys, dim) += dcontent^T q */
    matmul(tile->num_queries, dim, tile->num_keys, left_rows(dcontent, head->tile_stride),
           right_rows(head->k_rows + tile->first_key * dim, dim), head->dq, dim, 1);
    matmul(tile->num_keys, dim, tile->num_queries, left_transposed(dcontent, head->tile_stride),
           right_rows(head->q, dim), head->dk + tile->first_key * dim, dim, 1);
}

/* From the gradient of logits ds to the gradients of some summands (RESET_* bits). */
static void terms_back(Head *head, const Tile *tile, int summands)
{
    int vectors = (summands & RESET_VECTORS) && (head->query_vectors.data || head->key_vectors.data);
    int scalars = (summands & RESET_SCALARS) && head->dstatic;
    for (int64_t r = 0; (vectors || scalars) && r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        const real *ds = head->ds + r * head->tile_stride;
        if (vectors && head->query_vectors.data)
            scatter_by_query(&head->query_vectors, tile, &row, ds);
        if (vectors && head->key_vectors.data)
            scatter_by_key(&head->key_vectors, tile, &row, ds);
        if (scalars) {
            int64_t place = row.table_row + tile->low + head->call->query_start + head->call->tgt_len - 1;
            for (int64_t j = row.begin; j < row.end; j++)
                head->dstatic[j + place] += ds[j];
        }
    }
    if ((summands & RESET_FACTORS) && head->factors)
        for (int64_t r = 0; r < tile->num_queries; r++) {
            const real *restrict ds = head->ds + r * head->tile_stride;
            real *restrict sum = head->dfactors + r * head->tile_stride;
            int64_t length = round_up(tile->num_keys, MR);
            if (head->member)
                for (int64_t j = 0; j < length; j++)
                    sum[j] += ds[j];
            else
                memcpy(sum, ds, length * sizeof(real));
        }
}

/* From the gradient of logits ds to the gradients of past, future and weight. */
static void decay_back(Head *head, const Tile *tile)
{
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        const real *restrict ds = head->ds + r * head->tile_stride;
        real *restrict differences = head->scratch_a;
        int64_t src_len = head->call->src_len, slot = tile->first_slot + r;
        for (int after = 0; after < 2; after++) {
            Side side = side_of(head, tile, &row, after);
            int64_t count = side.end - side.begin;
            real *restrict dsums = head->ddecay + after * src_len;
            for (int64_t j = side.begin; j < side.end; j++) {
                differences[j] = side.sums[j] - side.own;
                dsums[tile->first_key + j] += side.weight * ds[j];
            }
            dsums[slot] -= side.weight * total(ds + side.begin, count);
            real dweight = dot(ds + side.begin, differences + side.begin, count);
            head->ddecay[2 * src_len + slot] += after ? dweight : -dweight;
        }
    }
}

/* From `dfactors` (num_queries, num_keys), summed over the members of a group, to the gradients of both factors. */
static void factors_back(Head *head, const Tile *tile)
{
    int64_t rank = head->rank;
    /* dquery_factors (num_queries, rank) += dfactors key_factors;  dkey_factors (num_keys, rank) += dfactors^T
     * query_factors */
    matmul(tile->num_queries, rank, tile->num_keys, left_rows(head->dfactors, head->tile_stride),
           right_rows(head->key_factor_rows + tile->first_key * rank, rank), head->dquery_factors, rank, 1);
    matmul(tile->num_keys, rank, tile->num_queries, left_transposed(head->dfactors, head->tile_stride),
           right_rows(head->query_factors, rank), head->dkey_factors + tile->first_key * rank, rank, 1);
}

/* Sum the gradient of `reset`, and set ds to 0 in the cells that the reset replaced, so that the replaced summands
 * get none of it. */
static void reset_back(Head *head, const Tile *tile)
{
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        real *ds = head->ds + r * head->tile_stride;
        int64_t column = reset_column(head, tile, &row);
        if (tile->first_slot + r == head->first_token) {
            /* One number added to a whole row leaves its softmax unchanged: dreset[0] is 0. */
            zero(ds, tile->num_keys);
        } else if (column >= 0) {
            if (head->dreset)
                head->dreset[1] += ds[column];
            ds[column] = 0;
        }
    }
}

/* From the gradient `dproducts` (count, columns) of x table^T, for the rows of the table from `first_row` on:
 * dx (count, dim) += dproducts table, and the gradient of the table (columns, dim) += dproducts^T x. */
static void table_back(const PackedTable *packed, const real *dproducts, int64_t stride, int64_t count, int64_t columns,
                       int64_t first_row, const real *x, real *dx, int64_t dim)
{
    if (dx)
        matmul(count, dim, columns, left_rows(dproducts, stride), right_rows(packed->rows + first_row * dim, dim), dx,
               dim, 1);
    matmul(columns, dim, count, left_transposed(dproducts, stride), right_rows(x, dim), packed->grad + first_row * dim,
           dim, 1);
}

/* The same for a tile's rows of the tables of queries and of values. */
static void query_tables_back(Head *head, const Tile *tile)
{
    PackedTable *tables[3] = {&head->query_vectors, &head->product_query, &head->value_vectors};
    for (int s = 0; s < 3; s++) {
        int of_values = tables[s] == &head->value_vectors;
        if (tables[s]->data)
            table_back(tables[s], tables[s]->scattered, tile->query_stride, tile->num_queries, tile->columns,
                       tile->first_row, of_values ? head->dout : head->unrotated_q,
                       of_values ? NULL : head->dunrotated_q, of_values ? head->value_dim : head->dim);
    }
}

/* The same for unclipped tables of keys, of whose `products` a tile holds only its own distances. */
static void key_tables_back(Head *head, const Tile *tile)
{
    PackedTable *by_key[2] = {&head->key_vectors, &head->product_key};
    for (int s = 0; s < 2; s++)
        for (int64_t j = 0; by_key[s]->data && j < tile->num_keys; j += KEYS_AT_ONCE) {
            int64_t first_row = first_row_of_keys(tile, j), here = min_of(KEYS_AT_ONCE, tile->num_keys - j);
            int64_t first = (tile->first_key + j) * head->dim;
            table_back(by_key[s], by_key[s]->scattered + j * tile->key_stride, tile->key_stride, here,
                       tile->first_key + j + here - tile->first_slot - tile->low - first_row, first_row,
                       head->unrotated_k + first, head->dunrotated_k + first, head->dim);
        }
}

/* One tile: its logits again, its probabilities, and what their gradient adds to the gradients of all operands. */
static void backward_chunk(Head *head, Tile *tile, int64_t first_key, int64_t num_keys, int is_whole_row)
{
    const Call *call = head->call;
    int all = RESET_VECTORS | RESET_SCALARS | RESET_FACTORS, replaced = (int)call->reset_replaces;
    begin_chunk(head, tile, first_key, num_keys);
    logits(head, tile);
    /* ds (num_queries, num_keys) = dout (num_queries, value_dim) v^T (value_dim, num_keys), the gradient of
     * probabilities */
    matmul(tile->num_queries, num_keys, call->value_dim, left_rows(head->dout, head->value_dim),
           right_panels(head->v_panels, call->value_dim, first_key), head->ds, head->tile_stride, 0);
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        softmax_row_back(head, tile, &row, is_whole_row);
    }
    /* dv (num_keys, value_dim) += s^T (num_keys, num_queries) dout (num_queries, value_dim) */
    matmul(num_keys, head->value_dim, tile->num_queries, left_transposed(head->s, head->tile_stride),
           right_rows(head->dout, head->value_dim), head->dv + first_key * head->value_dim, head->value_dim, 1);
    content_back(head, tile);
    if (head->ddecay)
        decay_back(head, tile);
    terms_back(head, tile, all & ~replaced);
    if (replaced) {
        reset_back(head, tile);
        terms_back(head, tile, replaced);
    }
    if (call->unclipped) {
        query_tables_back(head, tile);
        key_tables_back(head, tile);
    }
}

/* --------------------------------------------------------------------------- Gradients of a block of queries */

/* Begin a block: its gradients are 0, and delta (num_queries,) = the dot product of out and dout. */
static void begin_backward(Head *head, Tile *tile, int64_t first)
{
    const Call *call = head->call;
    begin_block(head, tile, first);
    zero(head->dq, head->block_queries * head->dim);
    zero(head->dunrotated_q, head->block_queries * head->dim);
    if (head->dquery_factors)
        zero(head->dquery_factors, head->block_queries * head->rank);
    if (head->trilinear) {
        zero(head->dlow_q, head->block_queries * head->dim);
        zero(head->dhigh_q, head->block_queries * head->dim);
    }
    for (int64_t r = 0; r < tile->num_queries; r++) {
        prefetch(row_at(&call->out, head, first + r + ROWS_AHEAD), call->value_dim);
        head->delta[r] = dot(head->dout + r * head->value_dim, row_at(&call->out, head, first + r), call->value_dim);
        head->row_max[r] = call->row_max[head->n * call->tgt_len + first + r];
        head->row_sum[r] = call->row_sum[head->n * call->tgt_len + first + r];
    }
}

/* End a block: multiply the gradients of clipped `products` with tables and queries, and store what is complete. */
static NOINLINE void end_block(Head *head, const Tile *tile)
{
    const Call *call = head->call;
    if (head->trilinear)
        trilinear_end_block(head, tile);
    if (!call->unclipped)
        query_tables_back(head, tile);
    real scale = (real)call->scale;
    const Tensor *content = call->content_q.data ? &call->dcontent_q : &call->dq;
    int is_apart = content != &call->dq; /* the gradient of content's query and that of tables' query are two tensors */
    for (int64_t r = 0; r < tile->num_queries; r++) {
        int64_t query = tile->first_query + r;
        const real *dcontent_q = head->dq + r * head->dim, *dtable_q = head->dunrotated_q + r * head->dim; /* (dim,) */
        if (head->dcontent_offset)
            for (int64_t i = 0; i < call->dim; i++)
                head->dcontent_offset[i] += scale * dcontent_q[i];
        if (content->data) {
            real *to = row_at(content, head, query);
            for (int64_t i = 0; i < call->dim; i++)
                to[i] = scale * dcontent_q[i] + (is_apart ? 0 : dtable_q[i]);
        }
        if (is_apart && call->dq.data)
            memcpy(row_at(&call->dq, head, query), dtable_q, call->dim * sizeof(real));
        if (call->dquery_factors && head->dquery_factors)
            memcpy(call->dquery_factors + (factor_matrix(head) * call->tgt_len + query) * call->rank,
                   head->dquery_factors + r * head->rank, call->rank * sizeof(real));
    }
}

/* The block of queries from query `first` on, of each head of a group. */
static void backward_block(Head *group, int members, int64_t first)
{
    Tile tile;
    for (int m = 0; m < members; m++)
        begin_backward(group + m, &tile, first);
    int64_t begin, end;
    visible_keys(group, members, &tile, &begin, &end);
    for (int64_t first_key = begin, num_keys; first_key < end; first_key += num_keys) {
        num_keys = chunk_length(first_key, begin, end);
        for (int m = 0; m < members; m++)
            backward_chunk(group + m, &tile, first_key, num_keys, num_keys == end - begin);
        if (group->dquery_factors)
            factors_back(group, &tile);
    }
    for (int m = 0; m < members; m++)
        end_block(group + m, &tile);
}

/* ----------------------------------------------------------------------------------------- Gradients of a head */

/* Begin a head: the gradients that its blocks of queries add to are 0. */
static void begin_sums(Head *head)
{
    const Call *call = head->call;
    int64_t n = head->n, span = call->tgt_len + call->src_len - 1, keys = padded_rows(call->src_len);
    zero(head->dk, keys * head->dim);
    if (call->content_k.data)
        zero(head->dunrotated_k, keys * head->dim);
    zero(head->dv, keys * head->value_dim);
    if (head->dkey_factors)
        zero(head->dkey_factors, keys * head->rank);
    if (head->trilinear) {
        zero(head->dk_channels, call->dim * head->k_channel_stride);
        zero(head->dtrilinear_channels, call->dim * head->trilinear_channel_stride);
        zero(head->dtrilinear_ends, 2 * head->dim);
    }
#define BEGIN(name, count)                                     \
    head->name = call->name ? call->name + n * (count) : NULL; \
    if (head->name)                                            \
        zero(head->name, count);
    BEGIN(dstatic, span)
    BEGIN(dgate, span)
    BEGIN(dcontent_offset, call->dim)
    BEGIN(dreset, 2)
    BEGIN(ddecay, 3 * call->src_len)
#undef BEGIN
}

/* Multiply the gradients of a clipped table's `products` of keys with table and keys, after all blocks of queries. */
static void keys_back(Head *head, PackedTable *packed)
{
    const Call *call = head->call;
    if (!packed->data || call->unclipped)
        return;
    int64_t row = key_stride(head);
    for (int64_t j = 0; j < call->src_len; j++) {
        packed->scattered[j * row] += packed->low_scattered[j];
        packed->scattered[j * row + call->width - 1] += packed->high_scattered[j];
    }
    /* Some keys at a time: short sums err less than one over all keys. */
    for (int64_t j = 0; j < call->src_len; j += 4 * UNIT)
        table_back(packed, packed->scattered + j * row, row, min_of(4 * UNIT, call->src_len - j), call->width, 0,
                   head->unrotated_k + j * head->dim, head->dunrotated_k + j * head->dim, head->dim);
}

/* Copy gradients (rows, channels) into a tensor of the call, unless that is absent. */
static void store_tensor(const Tensor *to, const Head *head, int64_t rows, const real *from, int64_t from_row,
                         int64_t channels)
{
    for (int64_t i = 0; to->data && i < rows; i++)
        memcpy(row_at(to, head, i), from + i * from_row, channels * sizeof(real));
}

/* Copy gradients (rows, channels), times a factor, into contiguous memory, unless that is absent. */
static void store_table(real *to, int64_t rows, const real *from, int64_t from_row, int64_t channels, real factor)
{
    for (int64_t i = 0; to && i < rows; i++)
        for (int64_t c = 0; c < channels; c++)
            to[i * channels + c] = factor * from[i * from_row + c];
}

/* Store a head's gradients of keys, values and tables. */
static void end_head(Head *head)
{
    const Call *call = head->call;
    int64_t n = head->n;
    keys_back(head, &head->key_vectors);
    keys_back(head, &head->product_key);
    if (head->trilinear) {
        for (int64_t channel = 0; channel < call->dim; channel++)
            for (int64_t j = 0; j < call->src_len; j++)
                head->dk[j * head->dim + channel] += head->dk_channels[channel * head->k_channel_stride + j];
        real *to = call->dtrilinear ? call->dtrilinear + n * call->width * call->dim : NULL; /* (width, dim) */
        for (int64_t w = 0; to && w < call->width; w++)
            for (int64_t channel = 0; channel < call->dim; channel++)
                to[w * call->dim + channel] = head->dtrilinear_channels[channel * head->trilinear_channel_stride + w] +
                                              (w == 0 ? head->dtrilinear_ends[channel] : 0) +
                                              (w == call->width - 1 ? head->dtrilinear_ends[head->dim + channel] : 0);
    }
    store_tensor(call->content_k.data ? &call->dcontent_k : &call->dk, head, call->src_len, head->dk, head->dim,
                 call->dim);
    if (call->content_k.data)
        store_tensor(&call->dk, head, call->src_len, head->dunrotated_k, head->dim, call->dim);
    store_tensor(&call->dv, head, call->src_len, head->dv, head->value_dim, call->value_dim);
#define STORE(name, channels)                                                                   \
    if (call->d##name)                                                                          \
        store_table(call->d##name + n * call->width * (channels), call->width, head->name.grad, \
                    round_up(channels, VL), channels, head->name.scale);
    STORE(query_vectors, call->dim)
    STORE(key_vectors, call->dim)
    STORE(product_query, call->dim)
    STORE(product_key, call->dim)
    STORE(value_vectors, call->value_dim)
#undef STORE
    if (call->dkey_factors && head->dkey_factors)
        store_table(call->dkey_factors + factor_matrix(head) * call->src_len * call->rank, call->src_len,
                    head->dkey_factors, head->rank, call->rank, 1);
}

/* The whole backward pass of each head of a group. */
static void backward_heads(Head *group, int members)
{
    for (int m = 0; m < members; m++)
        begin_sums(group + m);
    for (int64_t first = 0; first < group->call->tgt_len; first += group->block_queries)
        backward_block(group, members, first);
    for (int m = 0; m < members; m++)
        end_head(group + m);
}

#endif
