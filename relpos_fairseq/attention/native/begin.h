/* Packing: a head's operands once, queries once a block, and the products of both with tables.
 *
 * A pass begins a head, then each block of its queries, then each chunk of keys beside the block.
 */
#ifndef RELPOS_BEGIN_H
#define RELPOS_BEGIN_H

#include "head.h"

/* Row `row` of the head that `at` stands at, to read and to write. */
INLINE const real *rows_at(const Tensor *x, const Head *at, int64_t row)
{
    return x->data + at->b * x->b + at->h * x->h + row * x->t;
}

INLINE real *rows_for(const Tensor *x, const Head *at, int64_t row)
{
    return x->data + at->b * x->b + at->h * x->h + row * x->t;
}

INLINE void zero(real *x, int64_t count) { memset(x, 0, count * sizeof(real)); }

/* Pack a table for the products of this pass; `changed`: the last head had another one. */
static void pack_table(Head *x, Packed *packed, int64_t channels, int changed)
{
    if (!packed->table)
        return;
    int64_t width = x->call->width, row = round_up(channels, VL);
    /* value_vectors multiply sums of probabilities forward, and dout backward; other tables queries or
     * keys in both passes, and gradients backward. */
    int of_values = packed == &x->value_vectors;
    if (changed && (x->backward || !of_values))
        pack_columns(packed->columns, packed->length, packed->table, channels, width, channels,
                     packed->factor);
    if (changed && x->backward != of_values)
        pack_rows(packed->rows, row, packed->table, channels, width, padded(width), channels,
                  packed->factor, NULL);
    if (x->backward)
        zero(packed->grad, (padded(width) + MR) * row);
}

/* A band's products (src, width) = k (src, dim) table^T (dim, width), of all keys at once. */
static void products_of_keys(Head *x, Packed *packed)
{
    const Call *c = x->call;
    if (!packed->table || c->wide)
        return;
    int64_t row = key_row(x), width = c->width;
    product(c->src, width, c->dim, rows_of(x->vector_k, x->dim),
            columns_from(packed->columns, packed->length, 0), packed->products, row, 0);
    for (int64_t j = 0; j < c->src; j++) {
        packed->left[j] = packed->products[j * row];
        packed->right[j] = packed->products[j * row + width - 1];
    }
    if (x->backward) {
        zero(packed->sums, padded(c->src) * row);
        zero(packed->left_sums, c->src);
        zero(packed->right_sums, c->src);
    }
}

/* Pack the operands of head n, unless they are packed already. */
static void begin_head(Head *x, int64_t n)
{
    const Call *c = x->call;
    int64_t keys = padded(c->src), packed = x->n;
    if (packed == n)
        return;
    x->n = n;
    x->b = n / c->heads;
    x->h = n % c->heads;
    int other = packed < 0 || packed % c->heads != x->h;
#define PACK(name, channels)                                                                       \
    if (x->name.table) {                                                                           \
        x->name.table = c->name.data + x->h * c->name.h;                                           \
        pack_table(x, &x->name, channels, packed < 0 || (other && c->name.h));                     \
    }
    PACK(query_vectors, c->dim)
    PACK(key_vectors, c->dim)
    PACK(product_query, c->dim)
    PACK(product_key, c->dim)
    PACK(value_vectors, c->value_dim)
#undef PACK
    const Tensor *content = c->content_k.data ? &c->content_k : &c->k;
    const real *k = rows_at(content, x, 0);
    pack_panels(x->k_panels, k, content->t, c->src, c->dim);
    if (x->backward || (!c->content_k.data && (c->key_vectors.data || c->product_key.data)))
        pack_rows(x->k_rows, x->dim, k, content->t, c->src, keys, c->dim, 1, NULL);
    if (c->content_k.data && (c->key_vectors.data || c->product_key.data))
        pack_rows(x->vector_k, x->dim, rows_at(&c->k, x, 0), c->k.t, c->src, keys, c->dim, 1, NULL);
    if (x->backward)
        pack_panels(x->v_panels, rows_at(&c->v, x, 0), c->v.t, c->src, c->value_dim);
    else
        pack_rows(x->v_rows, x->value_dim, rows_at(&c->v, x, 0), c->v.t, c->src, keys, c->value_dim,
                  1, NULL);
    if (x->key_factor_panels) {
        pack_panels(x->key_factor_panels, rows_at(&c->key_factors, x, 0), c->key_factors.t, c->src, c->rank);
        if (x->backward)
            pack_rows(x->key_factor_rows, x->rank, rows_at(&c->key_factors, x, 0), c->key_factors.t, c->src, keys, c->rank, 1,
                      NULL);
    }
    products_of_keys(x, &x->key_vectors);
    products_of_keys(x, &x->product_key);
    x->trilinear = c->trilinear.data ? c->trilinear.data + x->h * c->trilinear.h : NULL;
    if (x->trilinear) {
        pack_columns(x->k_channels, x->k_length, k, content->t, c->src, c->dim, 1);
        pack_columns(x->trilinear_channels, x->trilinear_length, x->trilinear, c->dim, c->width, c->dim, 1);
    }
    x->static_ = c->static_.data ? c->static_.data + x->h * c->static_.h : NULL;
    x->gate = c->gate.data ? c->gate.data + x->h * c->gate.h : NULL;
    x->content_offset = c->content_offset.data ? c->content_offset.data + x->h * c->content_offset.h : NULL;
    x->reset = c->reset_kinds ? c->reset.data + x->h * c->reset.h : NULL;
    x->first = c->reset_kinds ? c->first[c->first_per_row ? x->b : 0] : -1;
}

/* Pack a block of queries from row `first` on, multiply it with bands, and begin `at`. */
static void begin_block(Head *x, Chunk *at, int64_t first)
{
    const Call *c = x->call;
    int64_t rows = x->rows, count = least(rows, c->tgt - first);
    *at = (Chunk){.first = first, .count = count, .slot = c->start + first, .low = c->low,
                  .width = c->width, .wide = c->wide, .query_row = query_row(x),
                  .key_row = key_row(x)};
    const Tensor *content = c->content_q.data ? &c->content_q : &c->q;
    pack_rows(x->q, x->dim, rows_at(content, x, first), content->t, count, rows, c->dim,
              (real)c->scale, x->content_offset);
    if (c->query_vectors.data || c->product_query.data)
        pack_rows(x->vector_q, x->dim, rows_at(&c->q, x, first), c->q.t, count, rows, c->dim, 1, NULL);
    if (x->query_factors)
        pack_rows(x->query_factors, x->rank, rows_at(&c->query_factors, x, first), c->query_factors.t, count, rows, c->rank, 1, NULL);
    if (x->backward)
        pack_rows(x->dout, x->value_dim, rows_at(&c->dout, x, first), c->dout.t, count, rows,
                  c->value_dim, 1, NULL);
    if (x->trilinear)
        for (int64_t i = 0; i < rows * x->dim; i++) {
            int64_t channel = i % x->dim, ends = (c->width - 1) * c->dim;
            int there = channel < c->dim;
            x->left_q[i] = there ? x->q[i] * x->trilinear[channel] : 0;
            x->right_q[i] = there ? x->q[i] * x->trilinear[ends + channel] : 0;
        }
    if (c->wide)
        return;
#define PRODUCTS(name, query, channels)                                                                \
    if (x->name.table)                                                                             \
        product(count, c->width, channels, rows_of(query, round_up(channels, VL)),                 \
                columns_from(x->name.columns, x->name.length, 0), x->name.products,              \
                at->query_row, 0);
    /* products (rows, width) = q (rows, dim) table^T (dim, width) */
    PRODUCTS(query_vectors, x->vector_q, c->dim)
    PRODUCTS(product_query, x->vector_q, c->dim)
    if (x->backward)
        PRODUCTS(value_vectors, x->dout, c->value_dim)
#undef PRODUCTS
#define CLEAR(name)                                                                                \
    if (x->name.table && (x->backward || &x->name == &x->value_vectors))                                      \
        zero(x->name.sums, rows * at->query_row);
    CLEAR(query_vectors)
    CLEAR(product_query)
    CLEAR(value_vectors)
#undef CLEAR
}

/* Set `at` to the chunk of `length` keys from `keys` on, and form its products with wide tables. */
static void begin_chunk(Head *x, Chunk *at, int64_t keys, int64_t length)
{
    const Call *c = x->call;
    at->keys = keys;
    at->length = length;
    if (!c->wide)
        return;
    int64_t last = at->slot + at->count - 1;
    at->from = most(keys - last - at->low, 0);
    int64_t columns = keys + length - at->slot - at->low - at->from;
#define PRODUCTS(name, query, channels, of_values)                                                     \
    if (x->name.table) {                                                                           \
        if (x->backward || !(of_values))                                                            \
            product(at->count, columns, channels, rows_of(query, round_up(channels, VL)),          \
                    columns_from(x->name.columns, x->name.length, at->from), x->name.products,   \
                    at->query_row, 0);                                                             \
        if (x->backward || (of_values))                                                            \
            zero(x->name.sums, x->rows *at->query_row);                                         \
    }
    PRODUCTS(query_vectors, x->vector_q, c->dim, 0)
    PRODUCTS(product_query, x->vector_q, c->dim, 0)
    PRODUCTS(value_vectors, x->dout, c->value_dim, 1)
#undef PRODUCTS
    Packed *by_key[2] = {&x->key_vectors, &x->product_key};
    for (int s = 0; s < 2; s++) {
        if (!by_key[s]->table)
            continue;
        for (int64_t j = 0; j < length; j += KEYS) {
            int64_t from = from_of_keys(at, j), here = least(KEYS, length - j);
            product(here, keys + j + here - at->slot - at->low - from, c->dim,
                    rows_of(x->vector_k + (keys + j) * x->dim, x->dim),
                    columns_from(by_key[s]->columns, by_key[s]->length, from),
                    by_key[s]->products + j * at->key_row, at->key_row, 0);
        }
        if (x->backward)
            zero(by_key[s]->sums, round_up(length, UNIT) * at->key_row);
    }
}

/* Row r of a tile: the keys of the chunk that its query sees, and those of them in the band. */
INLINE Row row_of(const Head *x, const Chunk *at, int64_t r)
{
    const Call *c = x->call;
    int64_t slot = at->slot + r, begin = 0, end = at->length;
    if (c->causal)
        end = clamp(slot + 1 - at->keys, 0, end);
    if (c->window)
        begin = clamp(slot - c->window + 1 - at->keys, 0, end);
    int64_t place = at->keys - slot - at->low; /* of the chunk's first key */
    if (at->wide)
        return (Row){r, begin, end, begin, end, place};
    int64_t left = clamp(1 - place, begin, end), right = clamp(at->width - 1 - place, left, end);
    return (Row){r, begin, end, left, right, place};
}

/* The keys begin..end that a block of queries sees. */
INLINE void keys_of(const Head *x, const Chunk *at, int64_t *begin, int64_t *end)
{
    const Call *c = x->call;
    *begin = c->window ? most(0, at->slot - c->window + 1) / UNIT * UNIT : 0;
    *end = c->causal ? least(c->src, at->slot + at->count) : c->src;
}

/* How many keys the next chunk of begin..end takes: chunks are of about the same length. */
INLINE int64_t length_of(int64_t keys, int64_t begin, int64_t end)
{
    int64_t chunks = (end - begin + MOST_KEYS - 1) / MOST_KEYS;
    int64_t length = round_up((end - begin + chunks - 1) / chunks, UNIT);
    return least(length, end - keys);
}

#endif
