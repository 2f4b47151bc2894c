/* The state of one thread that evaluates one head: packed operands and buffers, and functions that prepare both.
 *
 * A pass prepares a head (begin_head), then each block of its queries (begin_block), then each chunk of keys for that
 * block (begin_chunk).  Matrix products read rows of their left operand, and panels or transposed rows
 * of their right operand (products.h).  Keys, values and tables are packed (copied into that order) once for each head,
 * queries once for each block.  Channels of a packed row are padded with zeros to a multiple of VL.
 */
#ifndef RELPOS_HEAD_H
#define RELPOS_HEAD_H

#include <stdlib.h>

#include "tables.h"

#define MAX_CHUNK_KEYS 576 /* keys of a chunk: a tile of 96 x 576 fits in the level-2 cache */
#define BLOCK_QUERIES 96   /* queries of a block */
#define GROUP_ROWS 4       /* batch rows that share factors, and for which these are multiplied once */

typedef struct {
    const Call *call;
    int backward;
    int member;            /* place in a group of batch rows; member 0 has the buffers that all share */
    int64_t n, b, h;       /* number of the head, its batch row, its place in that row; n is -1 before the first */
    int64_t block_queries; /* queries of a block */
    int64_t dim, value_dim, rank; /* channels of a packed row */
    int64_t tile_stride;          /* elements from one row of a tile to the next: keys of a chunk, padded */
    int has_multiplier;           /* a gate or product multiplies the content */
    int64_t first_token;          /* slot of the token that is reset, or -1 */

    /* For the whole head.  `k_panels` and `k_rows` hold the key of the content (content_k, if the call has it).
     * `unrotated_k` holds the call's k, with which tables are multiplied.  It is `k_rows` unless the call has
     * content_k. */
    real *k_panels, *k_rows, *unrotated_k;       /* (src_len, dim) */
    real *v_rows, *v_panels;                     /* (src_len, value_dim) */
    real *key_factor_panels, *key_factor_rows;   /* (src_len, rank) */
    real *dk, *dunrotated_k, *dv, *dkey_factors; /* of the shapes of their operands */
    PackedTable query_vectors, key_vectors, product_query, product_key, value_vectors;
    const real *trilinear, *static_, *gate, *content_offset, *reset; /* the call's tables of this head */
    real *dstatic, *dgate, *dcontent_offset, *dreset, *ddecay;
    int64_t k_channel_stride, trilinear_channel_stride;
    real *k_channels, *dk_channels;                 /* (dim, k_channel_stride): a row for each channel */
    real *trilinear_channels, *dtrilinear_channels; /* (dim, trilinear_channel_stride): a row for each channel */
    real *dtrilinear_ends;                          /* (2, dim) gradients of the table's first and last row */

    /* For a block of queries. */
    real *q;              /* (block_queries, dim) scale (content_q + content_offset) */
    real *unrotated_q;    /* (block_queries, dim) the call's q, which tables are multiplied with */
    real *low_q, *high_q; /* (block_queries, dim) q times the trilinear table's first, and last row */
    real *query_factors;  /* (block_queries, rank) */
    real *out, *dout;     /* (block_queries, value_dim) */
    real *dq, *dunrotated_q, *dlow_q, *dhigh_q, *dquery_factors;
    real *row_max, *row_sum; /* (block_queries,) largest logit, sum of exp(logit - row_max) */
    real *delta;             /* (block_queries,) sum over keys of prob * dprob */

    /* For a tile: (block_queries, tile_stride). */
    real *s, *ds;             /* logits, then probabilities; and their gradient */
    real *content;            /* the content before gate and product multiply it; then its gradient */
    real *high_content;       /* trilinear: the content with the table's last row, or its gradient */
    real *factors, *dfactors; /* query_factors.key_factors of a group of batch rows; the sum of their gradients */
    real *scratch_a, *scratch_b, *scratch_c; /* (tile_stride,) for one row at a time */
    uint16_t *drop_bits;                     /* (tile_stride,) random bits of dropout, for one row at a time */
} Head;

/* ---------------------------------------------------------------------------------------------------- Buffers */

/* One block of memory for all buffers of a thread, one after another.  With `base` NULL, `take` only counts the bytes
 * that are needed, and returns NULL. */
typedef struct {
    char *base;
    size_t used;
} Arena;

static void *take(Arena *arena, int64_t count, size_t size)
{
    void *here = arena->base ? arena->base + arena->used : NULL;
    arena->used += (count * size + 127) / 64 * 64; /* 64-byte steps and a margin: a product may read past the end */
    return here;
}

INLINE real *take_reals(Arena *arena, int64_t count) { return take(arena, count, sizeof(real)); }

/* Return `rows` rounded up, so that the rows can be the left or the right operand of a product. */
INLINE int64_t padded_rows(int64_t rows) { return max_of(round_up(rows, MR), round_up(rows, NR)); }

/* Return the stride between rows of a transposed matrix (channels, rows).  It leaves room for products that read past
 * the end.  It is no multiple of a page, as rows a page apart would compete for the same cache lines. */
INLINE int64_t transposed_stride(int64_t rows) { return round_up(rows, 4 * NR) + NR; }

/* Return the stride between rows of `products`: of tables of queries here, of tables of keys below. */
INLINE int64_t query_stride(const Head *head)
{
    const Call *call = head->call;
    return call->unclipped ? round_up(MAX_CHUNK_KEYS + head->block_queries + 2 * NR, UNIT) : round_up(call->width, NR);
}

INLINE int64_t key_stride(const Head *head)
{
    return head->call->unclipped ? key_product_columns(head->block_queries) : round_up(head->call->width, NR);
}

/* Allocate the buffers of a table of vectors that is multiplied with queries (or, with `of_keys`, keys). */
static void allocate_table(Arena *arena, Head *head, PackedTable *packed, const Table *table, int64_t channels,
                           int of_keys)
{
    *packed = (PackedTable){0};
    if (!table->data)
        return;
    const Call *call = head->call;
    int64_t width = padded_rows(call->width) + MR, row = round_up(channels, VL), rows = head->block_queries;
    int64_t columns = query_stride(head);
    if (of_keys) {
        columns = key_stride(head);
        rows = call->unclipped ? MAX_CHUNK_KEYS : padded_rows(call->src_len);
    }
    packed->data = table->data + head->h * table->head_stride;
    packed->scale = 1;
    packed->transposed_stride = transposed_stride(call->width);
    packed->transposed = take_reals(arena, packed->transposed_stride * channels);
    packed->rows = take_reals(arena, width * row);
    packed->products = take_reals(arena, rows * columns + UNIT);
    packed->scattered = take_reals(arena, rows * columns + UNIT);
    packed->grad = head->backward ? take_reals(arena, width * row) : NULL;
    if (of_keys && !call->unclipped) {
        packed->low_products = take_reals(arena, padded_rows(call->src_len));
        packed->high_products = take_reals(arena, padded_rows(call->src_len));
        packed->low_scattered = take_reals(arena, padded_rows(call->src_len));
        packed->high_scattered = take_reals(arena, padded_rows(call->src_len));
    }
}

/* Allocate the buffers of a tile.  The batch rows of a group use them in turn. */
static void allocate_tile(Arena *arena, Head *head)
{
    const Call *call = head->call;
    int64_t size = head->block_queries * head->tile_stride;
    head->s = take_reals(arena, size);
    head->ds = head->backward ? take_reals(arena, size) : NULL;
    head->content = head->has_multiplier || call->trilinear.data ? take_reals(arena, size) : NULL;
    head->high_content = call->trilinear.data ? take_reals(arena, size) : NULL;
    head->factors = call->rank ? take_reals(arena, size) : NULL;
    head->dfactors = call->rank && head->backward ? take_reals(arena, size) : NULL;
    head->scratch_a = take_reals(arena, head->tile_stride);
    head->scratch_b = take_reals(arena, head->tile_stride);
    head->scratch_c = take_reals(arena, head->tile_stride);
    head->drop_bits = take(arena, head->tile_stride, sizeof(uint16_t));
}

/* Return how many batch rows form a group, which one thread evaluates together: several only if they share factors. */
INLINE int64_t rows_per_group(const Call *call)
{
    int shared = call->rank && !call->query_factors.batch_stride && !call->key_factors.batch_stride;
    return shared ? clamp(call->batch, 1, GROUP_ROWS) : 1;
}

/* Return the index of the head's matrix among the (groups * heads) matrices of factors. */
INLINE int64_t factor_matrix(const Head *head)
{
    return head->b / rows_per_group(head->call) * head->call->heads + head->h;
}

/* Allocate all buffers of member `member` of a group of batch rows. */
static void allocate_head(Arena *arena, Head *group, int member, const Call *call, int backward)
{
    Head *head = group + member;
    *head = member ? *group : (Head){.call = call, .backward = backward, .n = -1}; /* members share the first's tile */
    head->member = member;
    head->block_queries = min_of(BLOCK_QUERIES, round_up(call->tgt_len, MR));
    head->dim = round_up(call->dim, VL);
    head->value_dim = round_up(call->value_dim, VL);
    head->rank = round_up(call->rank, VL);
    head->tile_stride = round_up(min_of(call->src_len, MAX_CHUNK_KEYS), UNIT) + 2 * VL; /* no power of two */
    head->has_multiplier = call->gate.data || call->product_query.data;
    int64_t keys = padded_rows(call->src_len), queries = head->block_queries;
    int64_t rank = member ? 0 : call->rank; /* only member 0 holds the factors */
    if (!member)
        allocate_tile(arena, head);

    head->k_panels = take_reals(arena, keys * call->dim);
    head->k_rows = take_reals(arena, keys * head->dim);
    head->unrotated_k = call->content_k.data ? take_reals(arena, keys * head->dim) : head->k_rows;
    head->v_rows = backward ? NULL : take_reals(arena, keys * head->value_dim);
    head->v_panels = backward ? take_reals(arena, keys * call->value_dim) : NULL;
    head->key_factor_panels = rank ? take_reals(arena, keys * rank) : NULL;
    head->key_factor_rows = rank && backward ? take_reals(arena, keys * head->rank) : NULL;
    allocate_table(arena, head, &head->query_vectors, &call->query_vectors, call->dim, 0);
    allocate_table(arena, head, &head->key_vectors, &call->key_vectors, call->dim, 1);
    allocate_table(arena, head, &head->product_query, &call->product_query, call->dim, 0);
    allocate_table(arena, head, &head->product_key, &call->product_key, call->dim, 1);
    allocate_table(arena, head, &head->value_vectors, &call->value_vectors, call->value_dim, 0);
    head->query_vectors.scale = head->key_vectors.scale = (real)call->scale;
    if (call->trilinear.data) {
        head->k_channel_stride = transposed_stride(call->src_len);
        head->trilinear_channel_stride = transposed_stride(call->width);
        head->k_channels = take_reals(arena, call->dim * head->k_channel_stride);
        head->trilinear_channels = take_reals(arena, call->dim * head->trilinear_channel_stride);
        head->low_q = take_reals(arena, queries * head->dim);
        head->high_q = take_reals(arena, queries * head->dim);
    }

    head->q = take_reals(arena, queries * head->dim);
    head->unrotated_q = take_reals(arena, queries * head->dim);
    head->query_factors = rank ? take_reals(arena, queries * head->rank) : NULL;
    head->row_max = take_reals(arena, queries);
    head->row_sum = take_reals(arena, queries);
    head->out = backward ? NULL : take_reals(arena, queries * head->value_dim);
    if (!backward)
        return;
    head->dk = take_reals(arena, keys * head->dim);
    head->dunrotated_k = call->content_k.data ? take_reals(arena, keys * head->dim) : head->dk;
    head->dv = take_reals(arena, keys * head->value_dim);
    head->dkey_factors = rank ? take_reals(arena, keys * head->rank) : NULL;
    head->dout = take_reals(arena, queries * head->value_dim);
    head->dq = take_reals(arena, queries * head->dim);
    head->dunrotated_q = take_reals(arena, queries * head->dim);
    head->dquery_factors = rank ? take_reals(arena, queries * head->rank) : NULL;
    head->delta = take_reals(arena, queries);
    /* If one tensor is both the table of queries and the table of keys, both add to one gradient. */
    if (call->dquery_vectors && call->dkey_vectors == call->dquery_vectors)
        head->key_vectors.grad = head->query_vectors.grad;
    if (call->dproduct_query && call->dproduct_key == call->dproduct_query)
        head->product_key.grad = head->product_query.grad;
    if (call->trilinear.data) {
        head->dk_channels = take_reals(arena, call->dim * head->k_channel_stride);
        head->dtrilinear_channels = take_reals(arena, call->dim * head->trilinear_channel_stride);
        head->dlow_q = take_reals(arena, queries * head->dim);
        head->dhigh_q = take_reals(arena, queries * head->dim);
        head->dtrilinear_ends = take_reals(arena, 2 * head->dim);
    }
}

/* --------------------------------------------------------------------------------------------- Begin a head */

/* Return the address of row `row` of a tensor, in the batch row and head of `head`. */
INLINE real *row_at(const Tensor *x, const Head *head, int64_t row)
{
    return x->data + head->b * x->batch_stride + head->h * x->head_stride + row * x->row_stride;
}

INLINE void zero(real *x, int64_t count) { memset(x, 0, count * sizeof(real)); }

/* Pack a table for the products of this pass, if `changed`: the previous head had another table.  Zero its gradient. */
static void pack_table(Head *head, PackedTable *packed, int64_t channels, int changed)
{
    if (!packed->data)
        return;
    int64_t width = head->call->width, row = round_up(channels, VL);
    /* Products with q, k or dout read columns; sums over distances read rows.  With value_vectors, the forward pass
     * sums, and the backward pass multiplies dout.  With other tables, both multiply, and the backward pass sums. */
    int of_values = packed == &head->value_vectors;
    int reads_columns = head->backward || !of_values, reads_rows = of_values ? !head->backward : head->backward;
    if (changed && reads_columns) /* (channels, width) */
        pack_columns(packed->transposed, packed->transposed_stride, packed->data, channels, width, channels,
                     packed->scale);
    if (changed && reads_rows) /* (width, channels) */
        pack_rows(packed->rows, row, packed->data, channels, width, padded_rows(width), channels, packed->scale, NULL);
    if (head->backward)
        zero(packed->grad, (padded_rows(width) + MR) * row);
}

/* Multiply all keys with a clipped table: products (src_len, width) = unrotated_k (src_len, dim) table^T (dim, width).
 * Do nothing with an unclipped table, which begin_chunk multiplies. */
static void multiply_keys(Head *head, PackedTable *packed)
{
    const Call *call = head->call;
    if (!packed->data || call->unclipped)
        return;
    int64_t row = key_stride(head), width = call->width;
    matmul(call->src_len, width, call->dim, left_rows(head->unrotated_k, head->dim),
           right_transposed(packed->transposed, packed->transposed_stride, 0), packed->products, row, 0);
    for (int64_t j = 0; j < call->src_len; j++) {
        packed->low_products[j] = packed->products[j * row];
        packed->high_products[j] = packed->products[j * row + width - 1];
    }
    if (head->backward) {
        zero(packed->scattered, padded_rows(call->src_len) * row);
        zero(packed->low_scattered, call->src_len);
        zero(packed->high_scattered, call->src_len);
    }
}

/* Pack the operands of head number n, unless they are packed already, and multiply its keys with clipped tables. */
static void begin_head(Head *head, int64_t n)
{
    const Call *call = head->call;
    int64_t keys = padded_rows(call->src_len), packed = head->n;
    if (packed == n)
        return;
    head->n = n;
    head->b = n / call->heads;
    head->h = n % call->heads;
    int other = packed < 0 || packed % call->heads != head->h;
#define PACK(name, channels)                                                                      \
    if (head->name.data) {                                                                        \
        head->name.data = call->name.data + head->h * call->name.head_stride;                     \
        pack_table(head, &head->name, channels, packed < 0 || (other && call->name.head_stride)); \
    }
    PACK(query_vectors, call->dim)
    PACK(key_vectors, call->dim)
    PACK(product_query, call->dim)
    PACK(product_key, call->dim)
    PACK(value_vectors, call->value_dim)
#undef PACK
    const Tensor *content = call->content_k.data ? &call->content_k : &call->k;
    const real *k = row_at(content, head, 0); /* (src_len, dim) */
    pack_panels(head->k_panels, k, content->row_stride, call->src_len, call->dim);
    if (head->backward || (!call->content_k.data && (call->key_vectors.data || call->product_key.data)))
        pack_rows(head->k_rows, head->dim, k, content->row_stride, call->src_len, keys, call->dim, 1, NULL);
    if (call->content_k.data && (call->key_vectors.data || call->product_key.data))
        pack_rows(head->unrotated_k, head->dim, row_at(&call->k, head, 0), call->k.row_stride, call->src_len, keys,
                  call->dim, 1, NULL);
    if (head->backward)
        pack_panels(head->v_panels, row_at(&call->v, head, 0), call->v.row_stride, call->src_len, call->value_dim);
    else
        pack_rows(head->v_rows, head->value_dim, row_at(&call->v, head, 0), call->v.row_stride, call->src_len, keys,
                  call->value_dim, 1, NULL);
    if (head->key_factor_panels) { /* (src_len, rank) */
        const Tensor *factors = &call->key_factors;
        pack_panels(head->key_factor_panels, row_at(factors, head, 0), factors->row_stride, call->src_len,
                    call->rank);
        if (head->backward)
            pack_rows(head->key_factor_rows, head->rank, row_at(factors, head, 0), factors->row_stride, call->src_len,
                      keys, call->rank, 1, NULL);
    }
    multiply_keys(head, &head->key_vectors);
    multiply_keys(head, &head->product_key);
    head->trilinear = table_of_head(&call->trilinear, head->h);
    if (head->trilinear) { /* (dim, src_len) and (dim, width) */
        pack_columns(head->k_channels, head->k_channel_stride, k, content->row_stride, call->src_len, call->dim, 1);
        pack_columns(head->trilinear_channels, head->trilinear_channel_stride, head->trilinear, call->dim, call->width,
                     call->dim, 1);
    }
    head->static_ = table_of_head(&call->static_, head->h);
    head->gate = table_of_head(&call->gate, head->h);
    head->content_offset = table_of_head(&call->content_offset, head->h);
    head->reset = table_of_head(&call->reset, head->h);
    head->first_token = call->reset_replaces ? call->first_token[call->first_token_per_row ? head->b : 0] : -1;
}

/* -------------------------------------------------------------------------------- Begin a block, and a chunk */

/* Multiply a block's queries (in the backward pass, its dout with value_vectors) with the tile's rows of tables.  Zero
 * what is scattered into matrices of the same shape. */
static void multiply_block(Head *head, const Tile *tile)
{
    const Call *call = head->call;
    PackedTable *tables[3] = {&head->query_vectors, &head->product_query, &head->value_vectors};
    for (int s = 0; s < 3; s++) {
        PackedTable *packed = tables[s];
        if (!packed->data)
            continue;
        int of_values = packed == &head->value_vectors;
        int64_t channels = of_values ? call->value_dim : call->dim;
        if (head->backward || !of_values) /* products (queries, columns) = query (queries, channels) table^T */
            matmul(tile->num_queries, tile->columns, channels,
                   left_rows(of_values ? head->dout : head->unrotated_q, round_up(channels, VL)),
                   right_transposed(packed->transposed, packed->transposed_stride, tile->first_row),
                   packed->products, tile->query_stride, 0);
        if (head->backward || of_values)
            zero(packed->scattered, head->block_queries * tile->query_stride);
    }
}

/* Pack the block of queries that starts at query `first`, multiply it with clipped tables, and set up its tile. */
static void begin_block(Head *head, Tile *tile, int64_t first)
{
    const Call *call = head->call;
    int64_t queries = head->block_queries, count = min_of(queries, call->tgt_len - first);
    *tile = (Tile){.first_query = first,
                   .num_queries = count,
                   .first_slot = call->query_start + first,
                   .low = call->low,
                   .width = call->width,
                   .columns = call->width,
                   .unclipped = call->unclipped,
                   .query_stride = query_stride(head),
                   .key_stride = key_stride(head)};
    const Tensor *content = call->content_q.data ? &call->content_q : &call->q;
    /* q (queries, dim) = scale (content_q + content_offset) */
    pack_rows(head->q, head->dim, row_at(content, head, first), content->row_stride, count, queries, call->dim,
              (real)call->scale, head->content_offset);
    if (call->query_vectors.data || call->product_query.data)
        pack_rows(head->unrotated_q, head->dim, row_at(&call->q, head, first), call->q.row_stride, count, queries,
                  call->dim, 1, NULL);
    if (head->query_factors)
        pack_rows(head->query_factors, head->rank, row_at(&call->query_factors, head, first),
                  call->query_factors.row_stride, count, queries, call->rank, 1, NULL);
    if (head->backward)
        pack_rows(head->dout, head->value_dim, row_at(&call->dout, head, first), call->dout.row_stride, count,
                  queries, call->value_dim, 1, NULL);
    if (head->trilinear) /* low_q, high_q (queries, dim) = q times a row of the table */
        for (int64_t i = 0; i < queries * head->dim; i++) {
            int64_t channel = i % head->dim, last_row = (call->width - 1) * call->dim;
            int exists = channel < call->dim;
            head->low_q[i] = exists ? head->q[i] * head->trilinear[channel] : 0;
            head->high_q[i] = exists ? head->q[i] * head->trilinear[last_row + channel] : 0;
        }
    if (!call->unclipped)
        multiply_block(head, tile);
}

/* Move the tile to the `num_keys` keys from `first_key` on, and multiply queries and keys with unclipped tables. */
static void begin_chunk(Head *head, Tile *tile, int64_t first_key, int64_t num_keys)
{
    const Call *call = head->call;
    tile->first_key = first_key;
    tile->num_keys = num_keys;
    if (!call->unclipped)
        return;
    int64_t last = tile->first_slot + tile->num_queries - 1;
    tile->first_row = max_of(first_key - last - tile->low, 0);
    tile->columns = first_key + num_keys - tile->first_slot - tile->low - tile->first_row;
    multiply_block(head, tile);
    PackedTable *by_key[2] = {&head->key_vectors, &head->product_key};
    for (int s = 0; s < 2; s++) {
        if (!by_key[s]->data)
            continue;
        for (int64_t j = 0; j < num_keys; j += KEYS_AT_ONCE) {
            int64_t first_row = first_row_of_keys(tile, j), here = min_of(KEYS_AT_ONCE, num_keys - j);
            /* products (here, distances) = unrotated_k (here, dim) table^T (dim, distances) */
            matmul(here, first_key + j + here - tile->first_slot - tile->low - first_row, call->dim,
                   left_rows(head->unrotated_k + (first_key + j) * head->dim, head->dim),
                   right_transposed(by_key[s]->transposed, by_key[s]->transposed_stride, first_row),
                   by_key[s]->products + j * tile->key_stride, tile->key_stride, 0);
        }
        if (head->backward)
            zero(by_key[s]->scattered, round_up(num_keys, UNIT) * tile->key_stride);
    }
}

/* Return row `query` of a tile: the keys of the chunk that it sees, and those of them at near distances. */
INLINE Row row_of_tile(const Head *head, const Tile *tile, int64_t query)
{
    const Call *call = head->call;
    int64_t slot = tile->first_slot + query, begin = 0, end = tile->num_keys;
    if (call->causal)
        end = clamp(slot + 1 - tile->first_key, 0, end);
    if (call->window)
        begin = clamp(slot - call->window + 1 - tile->first_key, 0, end);
    int64_t table_row = tile->first_key - slot - tile->low; /* for the chunk's first key */
    if (tile->unclipped)
        return (Row){query, begin, end, begin, end, table_row};
    int64_t near_begin = clamp(1 - table_row, begin, end);
    int64_t near_end = clamp(tile->width - 1 - table_row, near_begin, end);
    return (Row){query, begin, end, near_begin, near_end, table_row};
}

/* Set `begin` and `end` to the range of keys that a block's queries of some member of a group may see: padding before
 * and after it is left out.  `begin` is rounded down to UNIT. */
INLINE void visible_keys(const Head *group, int members, const Tile *tile, int64_t *begin, int64_t *end)
{
    const Call *call = group->call;
    *begin = call->window ? max_of(0, tile->first_slot - call->window + 1) / UNIT * UNIT : 0;
    *end = call->causal ? min_of(call->src_len, tile->first_slot + tile->num_queries) : call->src_len;
    int64_t first = *end, last = *begin;
    for (int m = 0; call->key_padding && m < members; m++) {
        const uint8_t *padding = call->key_padding + group[m].b * call->src_len;
        for (int64_t j = *begin; j < first; j++)
            first = padding[j] ? first : j;
        for (int64_t j = *end; j > last; j--)
            last = padding[j - 1] ? last : j;
    }
    if (call->key_padding) {
        *begin = first / UNIT * UNIT;
        *end = last;
    }
}

/* Return the length of the chunk that starts at `first_key`.  The keys begin .. end are divided into chunks of about
 * equal length. */
INLINE int64_t chunk_length(int64_t first_key, int64_t begin, int64_t end)
{
    int64_t chunks = (end - begin + MAX_CHUNK_KEYS - 1) / MAX_CHUNK_KEYS;
    int64_t length = round_up((end - begin + chunks - 1) / chunks, UNIT);
    return min_of(length, end - first_key);
}

#endif
