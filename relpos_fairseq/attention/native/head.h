/* One head's operands, packed, and a thread's buffers for a block of its queries. */
#ifndef RELPOS_HEAD_H
#define RELPOS_HEAD_H

#include <stdlib.h>

#include "tables.h"

#define MOST_KEYS 576   /* of a chunk: tiles of a block's queries stay in a second-level cache */
#define BLOCK 96        /* queries of a block */
#define GROUP 4         /* rows of the batch that share products of static factors */

typedef struct {
    const Call *call;
    int backward;
    int member;                    /* of a group: the first has what all share */
    int64_t n, b, h;               /* n is -1 until there is a head */
    int64_t rows;                  /* queries of a block */
    int64_t dim, value_dim, rank;  /* channels of a packed row: padded to VL */
    int64_t tile;                  /* elements of a tile's row */
    int folded;                    /* content products meet other queries than vectors do */
    int multiplied;                /* gate or product */
    int64_t first;                 /* slot of the reset's first token */

    /* Of the whole head. */
    real *k_panels, *k_rows, *vector_k, *v_rows, *v_panels, *g_panels, *g_rows;
    real *dk, *dvector_k, *dv, *dg;
    Side aq, ak, pq, pk, av;
    real *k_channels, *dk_channels, *tri_channels, *dtri_channels; /* (dim, keys | distances) */
    int64_t k_length, tri_length;
    const real *tri, *fixed, *gate, *u, *theta;
    real *dtri_ends, *dfixed, *dgate, *du, *dtheta;

    /* Of a block of queries. */
    real *q, *vector_q, *left_q, *right_q, *f, *dout;
    real *out, *dq, *dvector_q, *dleft_q, *dright_q, *df;
    real *top, *mass, *delta;

    /* Of a block beside a chunk of keys: (rows, tile). */
    real *s, *ds, *content, *other;
    real *factors, *dfactors; /* of a group: products of factors, and the sum of what logits give */
    real *one, *two, *three; /* rows */
    uint16_t *bits;
} Head;

/* Buffers follow one another; counted first, where `base` is NULL. */
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

/* Rows in whole blocks of registers, as what stands left and as what stands right. */
INLINE int64_t padded(int64_t length) { return most(round_up(length, MR), round_up(length, NR)); }

/* A row of columns: strips may be read past its end; no multiple of a page, whose lines would share
 * places in a cache. */
INLINE int64_t columns_for(int64_t rows) { return round_up(rows, 4 * NR) + NR; }

INLINE int64_t query_row(const Head *x)
{
    const Call *c = x->call;
    return c->wide ? round_up(MOST_KEYS + x->rows + 2 * NR, UNIT) : round_up(c->width, NR);
}

INLINE int64_t key_row(const Head *x)
{
    return x->call->wide ? columns_of_keys(x->rows) : round_up(x->call->width, NR);
}

static void room_of_side(Arena *arena, Head *x, Side *side, const Table *table, int64_t channels,
                         int of_keys)
{
    *side = (Side){0};
    if (!table->data)
        return;
    const Call *c = x->call;
    int64_t width = padded(c->width) + MR, row = round_up(channels, VL), rows = x->rows;
    int64_t columns = query_row(x);
    if (of_keys) {
        columns = key_row(x);
        rows = c->wide ? MOST_KEYS : padded(c->src);
    }
    side->table = table->data + x->h * table->h;
    side->factor = 1;
    side->length = columns_for(c->width);
    side->columns = reals(arena, side->length * channels);
    side->rows = reals(arena, width * row);
    side->values = reals(arena, rows * columns + UNIT);
    side->changes = reals(arena, rows * columns + UNIT);
    side->grad = x->backward ? reals(arena, width * row) : NULL;
    if (of_keys && !c->wide) {
        side->left = reals(arena, padded(c->src));
        side->right = reals(arena, padded(c->src));
        side->to_left = reals(arena, padded(c->src));
        side->to_right = reals(arena, padded(c->src));
    }
}

/* What a block beside a chunk needs: in use by one head of a group at a time. */
static void room_of_tiles(Arena *arena, Head *x)
{
    const Call *c = x->call;
    int64_t tile = x->rows * x->tile;
    x->s = reals(arena, tile);
    x->ds = x->backward ? reals(arena, tile) : NULL;
    x->content = x->multiplied || c->tri.data ? reals(arena, tile) : NULL;
    x->other = c->tri.data ? reals(arena, tile) : NULL;
    x->factors = c->rank ? reals(arena, tile) : NULL;
    x->dfactors = c->rank && x->backward ? reals(arena, tile) : NULL;
    x->one = reals(arena, x->tile);
    x->two = reals(arena, x->tile);
    x->three = reals(arena, x->tile);
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
    x->one = first->one;
    x->two = first->two;
    x->three = first->three;
    x->bits = first->bits;
}

/* How many rows of the batch a thread takes together: those that share factors. */
INLINE int64_t group_of(const Call *call)
{
    int shared = call->rank && !call->f.b && !call->g.b;
    return shared ? clamp(call->batch, 1, GROUP) : 1;
}

/* The group and head that a head's factors belong to. */
INLINE int64_t factors_of(const Head *x)
{
    return x->b / group_of(x->call) * x->call->heads + x->h;
}

/* Buffers of member `member` of a group. */
static void room(Arena *arena, Head *group, int member, const Call *c, int backward)
{
    Head *x = group + member;
    *x = (Head){.call = c, .backward = backward, .member = member, .n = -1};
    x->rows = least(BLOCK, round_up(c->tgt, MR));
    x->dim = round_up(c->dim, VL);
    x->value_dim = round_up(c->value_dim, VL);
    x->rank = round_up(c->rank, VL);
    x->tile = round_up(least(c->src, MOST_KEYS), UNIT) + 2 * VL; /* no power of two */
    x->multiplied = c->gate.data || c->pq.data;
    x->folded = c->u.data || c->cq.data;
    int64_t keys = padded(c->src), rows = x->rows;
    int64_t rank = member ? 0 : c->rank; /* factors are the group's */
    if (member)
        lend_tiles(x, group);
    else
        room_of_tiles(arena, x);

    x->k_panels = reals(arena, keys * c->dim);
    x->k_rows = reals(arena, keys * x->dim);
    x->vector_k = c->ck.data ? reals(arena, keys * x->dim) : x->k_rows;
    x->v_rows = backward ? NULL : reals(arena, keys * x->value_dim);
    x->v_panels = backward ? reals(arena, keys * c->value_dim) : NULL;
    x->g_panels = rank ? reals(arena, keys * rank) : NULL;
    x->g_rows = rank && backward ? reals(arena, keys * x->rank) : NULL;
    room_of_side(arena, x, &x->aq, &c->aq, c->dim, 0);
    room_of_side(arena, x, &x->ak, &c->ak, c->dim, 1);
    room_of_side(arena, x, &x->pq, &c->pq, c->dim, 0);
    room_of_side(arena, x, &x->pk, &c->pk, c->dim, 1);
    room_of_side(arena, x, &x->av, &c->av, c->value_dim, 0);
    x->aq.factor = x->ak.factor = (real)c->scale;
    if (c->tri.data) {
        x->k_length = columns_for(c->src);
        x->tri_length = columns_for(c->width);
        x->k_channels = reals(arena, c->dim * x->k_length);
        x->tri_channels = reals(arena, c->dim * x->tri_length);
        x->left_q = reals(arena, rows * x->dim);
        x->right_q = reals(arena, rows * x->dim);
    }

    x->q = reals(arena, rows * x->dim);
    x->vector_q = reals(arena, rows * x->dim);
    x->f = rank ? reals(arena, rows * x->rank) : NULL;
    x->top = reals(arena, rows);
    x->mass = reals(arena, rows);
    x->out = backward ? NULL : reals(arena, rows * x->value_dim);
    if (!backward)
        return;
    x->dk = reals(arena, keys * x->dim);
    x->dvector_k = c->ck.data ? reals(arena, keys * x->dim) : x->dk;
    x->dv = reals(arena, keys * x->value_dim);
    x->dg = rank ? reals(arena, keys * x->rank) : NULL;
    x->dout = reals(arena, rows * x->value_dim);
    x->dq = reals(arena, rows * x->dim);
    x->dvector_q = reals(arena, rows * x->dim);
    x->df = rank ? reals(arena, rows * x->rank) : NULL;
    x->delta = reals(arena, rows);
    if (c->tri.data) {
        x->dk_channels = reals(arena, c->dim * x->k_length);
        x->dtri_channels = reals(arena, c->dim * x->tri_length);
        x->dleft_q = reals(arena, rows * x->dim);
        x->dright_q = reals(arena, rows * x->dim);
        x->dtri_ends = reals(arena, 2 * x->dim);
    }
}

INLINE const real *rows_at(const Tensor *x, const Head *at, int64_t row)
{
    return x->data + at->b * x->b + at->h * x->h + row * x->t;
}

INLINE real *rows_for(const Tensor *x, const Head *at, int64_t row)
{
    return x->data + at->b * x->b + at->h * x->h + row * x->t;
}

INLINE void zero(real *x, int64_t count) { memset(x, 0, count * sizeof(real)); }

static void pack_side(Head *x, Side *side, int64_t channels, int changed)
{
    if (!side->table)
        return;
    int64_t width = x->call->width, row = round_up(channels, VL);
    int of_values = side == &x->av; /* which multiply on the way out, and queries on the way back */
    if (changed && (x->backward || !of_values)) /* tables shared by heads are packed once */
        pack_columns(side->columns, side->length, side->table, channels, width, channels,
                     side->factor);
    if (changed && x->backward != of_values)
        pack_rows(side->rows, row, side->table, channels, width, padded(width), channels,
                  side->factor, NULL);
    if (x->backward)
        zero(side->grad, (padded(width) + MR) * row);
}

/* Values of all keys in a band. */
static void meet_keys(Head *x, Side *side)
{
    const Call *c = x->call;
    if (!side->table || c->wide)
        return;
    int64_t row = key_row(x), width = c->width;
    product(c->src, width, c->dim, rows_of(x->vector_k, x->dim),
            columns_from(side->columns, side->length, 0), side->values, row, 0);
    for (int64_t j = 0; j < c->src; j++) {
        side->left[j] = side->values[j * row];
        side->right[j] = side->values[j * row + width - 1];
    }
    if (x->backward) {
        zero(side->changes, padded(c->src) * row);
        zero(side->to_left, c->src);
        zero(side->to_right, c->src);
    }
}

/* Pack head n, unless it is packed. */
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
#define SIDE(name, channels)                                                                       \
    if (x->name.table) {                                                                           \
        x->name.table = c->name.data + x->h * c->name.h;                                           \
        pack_side(x, &x->name, channels, packed < 0 || (other && c->name.h));                      \
    }
    SIDE(aq, c->dim) SIDE(ak, c->dim) SIDE(pq, c->dim) SIDE(pk, c->dim) SIDE(av, c->value_dim)
#undef SIDE
    const Tensor *content = c->ck.data ? &c->ck : &c->k;
    const real *k = rows_at(content, x, 0);
    pack_panels(x->k_panels, k, content->t, c->src, c->dim);
    if (x->backward || (!c->ck.data && (c->ak.data || c->pk.data)))
        pack_rows(x->k_rows, x->dim, k, content->t, c->src, keys, c->dim, 1, NULL);
    if (c->ck.data && (c->ak.data || c->pk.data))
        pack_rows(x->vector_k, x->dim, rows_at(&c->k, x, 0), c->k.t, c->src, keys, c->dim, 1, NULL);
    if (x->backward)
        pack_panels(x->v_panels, rows_at(&c->v, x, 0), c->v.t, c->src, c->value_dim);
    else
        pack_rows(x->v_rows, x->value_dim, rows_at(&c->v, x, 0), c->v.t, c->src, keys, c->value_dim,
                  1, NULL);
    if (x->g_panels) {
        pack_panels(x->g_panels, rows_at(&c->g, x, 0), c->g.t, c->src, c->rank);
        if (x->backward)
            pack_rows(x->g_rows, x->rank, rows_at(&c->g, x, 0), c->g.t, c->src, keys, c->rank, 1,
                      NULL);
    }
    meet_keys(x, &x->ak);
    meet_keys(x, &x->pk);
    x->tri = c->tri.data ? c->tri.data + x->h * c->tri.h : NULL;
    if (x->tri) {
        pack_columns(x->k_channels, x->k_length, k, content->t, c->src, c->dim, 1);
        pack_columns(x->tri_channels, x->tri_length, x->tri, c->dim, c->width, c->dim, 1);
    }
    x->fixed = c->fixed.data ? c->fixed.data + x->h * c->fixed.h : NULL;
    x->gate = c->gate.data ? c->gate.data + x->h * c->gate.h : NULL;
    x->u = c->u.data ? c->u.data + x->h * c->u.h : NULL;
    x->theta = c->reset ? c->theta.data + x->h * c->theta.h : NULL;
    x->first = c->reset ? c->first[c->first_per_row ? x->b : 0] : -1;
}

/* Pack a block of queries from row `first`; `at` says where it stands. */
static void begin_block(Head *x, Chunk *at, int64_t first)
{
    const Call *c = x->call;
    int64_t rows = x->rows, count = least(rows, c->tgt - first);
    *at = (Chunk){.first = first, .count = count, .slot = c->start + first, .low = c->low,
                  .width = c->width, .wide = c->wide, .query_row = query_row(x),
                  .key_row = key_row(x)};
    const Tensor *content = c->cq.data ? &c->cq : &c->q;
    pack_rows(x->q, x->dim, rows_at(content, x, first), content->t, count, rows, c->dim,
              (real)c->scale, x->u);
    if (c->aq.data || c->pq.data)
        pack_rows(x->vector_q, x->dim, rows_at(&c->q, x, first), c->q.t, count, rows, c->dim, 1, NULL);
    if (x->f)
        pack_rows(x->f, x->rank, rows_at(&c->f, x, first), c->f.t, count, rows, c->rank, 1, NULL);
    if (x->backward)
        pack_rows(x->dout, x->value_dim, rows_at(&c->dout, x, first), c->dout.t, count, rows,
                  c->value_dim, 1, NULL);
    if (x->tri)
        for (int64_t i = 0; i < rows * x->dim; i++) {
            int64_t channel = i % x->dim, ends = (c->width - 1) * c->dim;
            int there = channel < c->dim;
            x->left_q[i] = there ? x->q[i] * x->tri[channel] : 0;
            x->right_q[i] = there ? x->q[i] * x->tri[ends + channel] : 0;
        }
    if (c->wide)
        return;
#define MEET(name, query, channels)                                                                \
    if (x->name.table)                                                                             \
        product(count, c->width, channels, rows_of(query, round_up(channels, VL)),                 \
                columns_from(x->name.columns, x->name.length, 0), x->name.values,              \
                at->query_row, 0);
    MEET(aq, x->vector_q, c->dim) MEET(pq, x->vector_q, c->dim)
    if (x->backward)
        MEET(av, x->dout, c->value_dim)
#undef MEET
#define CLEAR(name)                                                                                \
    if (x->name.table && (x->backward || &x->name == &x->av))                                      \
        zero(x->name.changes, rows * at->query_row);
    CLEAR(aq) CLEAR(pq) CLEAR(av)
#undef CLEAR
}

/* The chunk of `length` keys from `keys`; wide tables meet it. */
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
#define MEET(name, query, channels, changed)                                                       \
    if (x->name.table) {                                                                           \
        if (x->backward || !(changed))                                                             \
            product(at->count, columns, channels, rows_of(query, round_up(channels, VL)),          \
                    columns_from(x->name.columns, x->name.length, at->from), x->name.values,   \
                    at->query_row, 0);                                                             \
        if (x->backward || (changed))                                                              \
            zero(x->name.changes, x->rows *at->query_row);                                         \
    }
    MEET(aq, x->vector_q, c->dim, 0) MEET(pq, x->vector_q, c->dim, 0)
    MEET(av, x->dout, c->value_dim, 1)
#undef MEET
    Side *sides[2] = {&x->ak, &x->pk};
    for (int s = 0; s < 2; s++) {
        if (!sides[s]->table)
            continue;
        for (int64_t j = 0; j < length; j += KEYS) {
            int64_t from = from_of_keys(at, j), here = least(KEYS, length - j);
            product(here, keys + j + here - at->slot - at->low - from, c->dim,
                    rows_of(x->vector_k + (keys + j) * x->dim, x->dim),
                    columns_from(sides[s]->columns, sides[s]->length, from),
                    sides[s]->values + j * at->key_row, at->key_row, 0);
        }
        if (x->backward)
            zero(sides[s]->changes, round_up(length, UNIT) * at->key_row);
    }
}

/* What query r sees of a chunk. */
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

/* Keys that a block of queries sees: begin..end. */
INLINE void keys_of(const Head *x, const Chunk *at, int64_t *begin, int64_t *end)
{
    const Call *c = x->call;
    *begin = c->window ? most(0, at->slot - c->window + 1) / UNIT * UNIT : 0;
    *end = c->causal ? least(c->src, at->slot + at->count) : c->src;
}

/* How many of the keys begin..end a chunk takes. */
INLINE int64_t length_of(int64_t keys, int64_t begin, int64_t end)
{
    int64_t chunks = (end - begin + MOST_KEYS - 1) / MOST_KEYS;
    int64_t length = round_up((end - begin + chunks - 1) / chunks, UNIT);
    return least(length, end - keys);
}

#endif
