/* One head's operands as a thread packs them, and its buffers for a block of queries and a chunk of keys.
 *
 * Matrix products read rows of the left operand and panels or columns of the right one (products.h):
 * keys, values and tables are copied into that order once a head, queries once a block.  The channels of
 * a packed row are padded with zeros to VL.
 */
#ifndef RELPOS_HEAD_H
#define RELPOS_HEAD_H

#include <stdlib.h>

#include "tables.h"

#define MOST_KEYS 576 /* keys of a chunk: a tile of 96 x 576 stays in a second-level cache */
#define BLOCK 96      /* queries of a block */
#define GROUP 4       /* rows of the batch whose shared factors are multiplied once */

typedef struct {
    const Call *call;
    int backward;
    int member;                   /* place in a group of rows of the batch; member 0 has what all share */
    int64_t n, b, h;              /* head, row of the batch, head of that row; n is -1 before the first */
    int64_t rows;                 /* queries of a block */
    int64_t dim, value_dim, rank; /* channels of a packed row */
    int64_t tile;                 /* elements of a tile's row: keys of a chunk, padded */
    int multiplied;               /* a gate or product multiplies the content */
    int64_t first;                /* slot of the reset's first token, or -1 */

    /* Of the whole head.  `vector_k` is k where content_k is given, else the same as `k_rows`. */
    real *k_panels, *k_rows, *vector_k;        /* (src, dim) */
    real *v_rows, *v_panels;                   /* (src, value_dim) */
    real *key_factor_panels, *key_factor_rows; /* (src, rank) */
    real *dk, *dvector_k, *dv, *dkey_factors;  /* as those */
    Packed query_vectors, key_vectors, product_query, product_key, value_vectors;
    const real *trilinear, *static_, *gate, *content_offset, *reset; /* this head's, as in Call */
    real *dstatic, *dgate, *dcontent_offset, *dreset;
    int64_t k_length, trilinear_length;
    real *k_channels, *dk_channels;                 /* (dim, k_length): a row for each channel */
    real *trilinear_channels, *dtrilinear_channels; /* (dim, trilinear_length): the same */
    real *dtrilinear_ends;                          /* (2, dim) gradients of the two tails' rows */

    /* Of a block of queries: (rows, dim), unless said. */
    real *q, *vector_q;       /* scale (content_q + content_offset); and q, for tables of vectors */
    real *left_q, *right_q;   /* q times the trilinear table's first and last row */
    real *query_factors;      /* (rows, rank) */
    real *out, *dout;         /* (rows, value_dim) */
    real *dq, *dvector_q, *dleft_q, *dright_q, *dquery_factors;
    real *top, *mass, *delta; /* (rows,) largest logit, sum of exponentials, mean of gradients */

    /* Of a tile: (rows, tile). */
    real *s, *ds;                            /* logits, then probabilities; their gradient */
    real *content;                           /* content before it is multiplied, then its gradient */
    real *other;                             /* trilinear: the right tail's content, or its gradient */
    real *factors, *dfactors;                /* of a group: products of factors; the sum of gradients */
    real *scratch_a, *scratch_b, *scratch_c; /* (tile,) for one row at a time */
    uint16_t *bits;                          /* (tile,) dropout's random bits, for one row at a time */
} Head;

/* Buffers, one behind the other.  With `base` NULL, `take` only counts. */
typedef struct {
    char *base;
    size_t used;
} Arena;

static void *take(Arena *arena, int64_t count, size_t size)
{
    void *here = arena->base ? arena->base + arena->used : NULL;
    arena->used += (count * size + 127) / 64 * 64; /* a margin, as blocks may read past an end */
    return here;
}

INLINE real *reals(Arena *arena, int64_t count) { return take(arena, count, sizeof(real)); }

/* A number of rows, rounded up so that they may be the left or the right operand of a product. */
INLINE int64_t padded(int64_t length) { return most(round_up(length, MR), round_up(length, NR)); }

/* The length of a row of a transposed table.  It has room for reading past the end, and is no multiple
 * of a page: rows a page apart would compete for the same cache lines. */
INLINE int64_t columns_for(int64_t rows) { return round_up(rows, 4 * NR) + NR; }

/* Elements from one row of `products` to the next: of queries, and of keys. */
INLINE int64_t query_row(const Head *x)
{
    const Call *c = x->call;
    return c->wide ? round_up(MOST_KEYS + x->rows + 2 * NR, UNIT) : round_up(c->width, NR);
}

INLINE int64_t key_row(const Head *x)
{
    return x->call->wide ? columns_of_keys(x->rows) : round_up(x->call->width, NR);
}

/* Take the buffers of a table that queries (or, `of_keys`, keys) are multiplied with. */
static void room_of_table(Arena *arena, Head *x, Packed *packed, const Table *table, int64_t channels,
                         int of_keys)
{
    *packed = (Packed){0};
    if (!table->data)
        return;
    const Call *c = x->call;
    int64_t width = padded(c->width) + MR, row = round_up(channels, VL), rows = x->rows;
    int64_t columns = query_row(x);
    if (of_keys) {
        columns = key_row(x);
        rows = c->wide ? MOST_KEYS : padded(c->src);
    }
    packed->table = table->data + x->h * table->h;
    packed->factor = 1;
    packed->length = columns_for(c->width);
    packed->columns = reals(arena, packed->length * channels);
    packed->rows = reals(arena, width * row);
    packed->products = reals(arena, rows * columns + UNIT);
    packed->sums = reals(arena, rows * columns + UNIT);
    packed->grad = x->backward ? reals(arena, width * row) : NULL;
    if (of_keys && !c->wide) {
        packed->left = reals(arena, padded(c->src));
        packed->right = reals(arena, padded(c->src));
        packed->left_sums = reals(arena, padded(c->src));
        packed->right_sums = reals(arena, padded(c->src));
    }
}

/* Take the buffers of a tile, which the members of a group use one after the other. */
static void room_of_tiles(Arena *arena, Head *x)
{
    const Call *c = x->call;
    int64_t tile = x->rows * x->tile;
    x->s = reals(arena, tile);
    x->ds = x->backward ? reals(arena, tile) : NULL;
    x->content = x->multiplied || c->trilinear.data ? reals(arena, tile) : NULL;
    x->other = c->trilinear.data ? reals(arena, tile) : NULL;
    x->factors = c->rank ? reals(arena, tile) : NULL;
    x->dfactors = c->rank && x->backward ? reals(arena, tile) : NULL;
    x->scratch_a = reals(arena, x->tile);
    x->scratch_b = reals(arena, x->tile);
    x->scratch_c = reals(arena, x->tile);
    x->bits = take(arena, x->tile, sizeof(uint16_t));
}

static void lend_tiles(Head *x, const Head *first)
{
    x->s = first->s;
    x->ds = first->ds;
    x->content = first->content;
    x->other = first->other;
    x->factors = first->factors;
    x->dfactors = first->dfactors;
    x->scratch_a = first->scratch_a;
    x->scratch_b = first->scratch_b;
    x->scratch_c = first->scratch_c;
    x->bits = first->bits;
}

/* How many rows of the batch a thread takes together: several where they share factors. */
INLINE int64_t group_of(const Call *call)
{
    int shared = call->rank && !call->query_factors.b && !call->key_factors.b;
    return shared ? clamp(call->batch, 1, GROUP) : 1;
}

/* Which of the (groups * heads) matrices of factors a head belongs to. */
INLINE int64_t factors_of(const Head *x)
{
    return x->b / group_of(x->call) * x->call->heads + x->h;
}

/* Take the buffers of member `member` of a group. */
static void room(Arena *arena, Head *group, int member, const Call *c, int backward)
{
    Head *x = group + member;
    *x = (Head){.call = c, .backward = backward, .member = member, .n = -1};
    x->rows = least(BLOCK, round_up(c->tgt, MR));
    x->dim = round_up(c->dim, VL);
    x->value_dim = round_up(c->value_dim, VL);
    x->rank = round_up(c->rank, VL);
    x->tile = round_up(least(c->src, MOST_KEYS), UNIT) + 2 * VL; /* no power of two */
    x->multiplied = c->gate.data || c->product_query.data;
    int64_t keys = padded(c->src), rows = x->rows;
    int64_t rank = member ? 0 : c->rank; /* factors are the group's */
    if (member)
        lend_tiles(x, group);
    else
        room_of_tiles(arena, x);

    x->k_panels = reals(arena, keys * c->dim);
    x->k_rows = reals(arena, keys * x->dim);
    x->vector_k = c->content_k.data ? reals(arena, keys * x->dim) : x->k_rows;
    x->v_rows = backward ? NULL : reals(arena, keys * x->value_dim);
    x->v_panels = backward ? reals(arena, keys * c->value_dim) : NULL;
    x->key_factor_panels = rank ? reals(arena, keys * rank) : NULL;
    x->key_factor_rows = rank && backward ? reals(arena, keys * x->rank) : NULL;
    room_of_table(arena, x, &x->query_vectors, &c->query_vectors, c->dim, 0);
    room_of_table(arena, x, &x->key_vectors, &c->key_vectors, c->dim, 1);
    room_of_table(arena, x, &x->product_query, &c->product_query, c->dim, 0);
    room_of_table(arena, x, &x->product_key, &c->product_key, c->dim, 1);
    room_of_table(arena, x, &x->value_vectors, &c->value_vectors, c->value_dim, 0);
    x->query_vectors.factor = x->key_vectors.factor = (real)c->scale;
    if (c->trilinear.data) {
        x->k_length = columns_for(c->src);
        x->trilinear_length = columns_for(c->width);
        x->k_channels = reals(arena, c->dim * x->k_length);
        x->trilinear_channels = reals(arena, c->dim * x->trilinear_length);
        x->left_q = reals(arena, rows * x->dim);
        x->right_q = reals(arena, rows * x->dim);
    }

    x->q = reals(arena, rows * x->dim);
    x->vector_q = reals(arena, rows * x->dim);
    x->query_factors = rank ? reals(arena, rows * x->rank) : NULL;
    x->top = reals(arena, rows);
    x->mass = reals(arena, rows);
    x->out = backward ? NULL : reals(arena, rows * x->value_dim);
    if (!backward)
        return;
    x->dk = reals(arena, keys * x->dim);
    x->dvector_k = c->content_k.data ? reals(arena, keys * x->dim) : x->dk;
    x->dv = reals(arena, keys * x->value_dim);
    x->dkey_factors = rank ? reals(arena, keys * x->rank) : NULL;
    x->dout = reals(arena, rows * x->value_dim);
    x->dq = reals(arena, rows * x->dim);
    x->dvector_q = reals(arena, rows * x->dim);
    x->dquery_factors = rank ? reals(arena, rows * x->rank) : NULL;
    x->delta = reals(arena, rows);
    /* One table of queries and keys has one gradient. */
    if (c->dquery_vectors && c->dkey_vectors == c->dquery_vectors)
        x->key_vectors.grad = x->query_vectors.grad;
    if (c->dproduct_query && c->dproduct_key == c->dproduct_query)
        x->product_key.grad = x->product_query.grad;
    if (c->trilinear.data) {
        x->dk_channels = reals(arena, c->dim * x->k_length);
        x->dtrilinear_channels = reals(arena, c->dim * x->trilinear_length);
        x->dleft_q = reals(arena, rows * x->dim);
        x->dright_q = reals(arena, rows * x->dim);
        x->dtrilinear_ends = reals(arena, 2 * x->dim);
    }
}

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
