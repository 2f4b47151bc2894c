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

#endif
