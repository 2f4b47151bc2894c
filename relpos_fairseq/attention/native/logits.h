/* A tile of logits: a block of queries beside a chunk of keys. */
#ifndef RELPOS_LOGITS_H
#define RELPOS_LOGITS_H

#include "trilinear.h"

/* Multiply a row of content by gates and products; what multiplied is left in `one`. */
static void multiply(Head *x, const Chunk *at, const Row *row, real *s)
{
    real *factor = x->one;
    if (x->gate) {
        const real *gate = x->gate + row->place + at->low + x->call->start + x->call->tgt - 1;
        memcpy(factor + row->begin, gate + row->begin, (row->end - row->begin) * sizeof(real));
    } else {
        fill(factor + row->begin, row->end - row->begin, 1);
    }
    if (x->pq.table) {
        of_query(&x->pq, at, row, x->two, 0);
        of_key(&x->pk, at, row, x->three, 0);
        for (int64_t j = row->begin; j < row->end; j++)
            factor[j] *= x->two[j] * x->three[j];
    }
    for (int64_t j = row->begin; j < row->end; j++)
        s[j] *= factor[j];
}

/* Add what the kinds in `kinds` (RESET_*) are for the keys that a row sees. */
static void add_kinds(Head *x, const Chunk *at, const Row *row, real *s, int kinds)
{
    if (kinds & RESET_VECTORS) {
        if (x->aq.table)
            of_query(&x->aq, at, row, s, 1);
        if (x->ak.table)
            of_key(&x->ak, at, row, s, 1);
    }
    if ((kinds & RESET_SCALARS) && x->fixed) {
        const real *fixed = x->fixed + row->place + at->low + x->call->start + x->call->tgt - 1;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += fixed[j];
    }
    if ((kinds & RESET_FACTORS) && x->factors) {
        const real *factors = x->factors + row->r * x->tile;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += factors[j];
    }
}

/* Where in a chunk the reset's column stands, for a row that sees it; or -1. */
INLINE int64_t reset_column(const Head *x, const Chunk *at, const Row *row)
{
    int64_t j = x->first - at->keys;
    return row->begin <= j && j < row->end ? j : -1;
}

static void add_positions(Head *x, const Chunk *at, const Row *row, real *s)
{
    int held = (int)x->call->reset, all = RESET_VECTORS | RESET_SCALARS | RESET_FACTORS;
    add_kinds(x, at, row, s, all & ~held);
    if (!held)
        return;
    int is_first = at->slot + row->r == x->first;
    int64_t column = reset_column(x, at, row);
    real before = column >= 0 ? s[column] : 0;
    if (is_first) {
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += x->theta[0];
        return;
    }
    add_kinds(x, at, row, s, held);
    if (column >= 0)
        s[column] = before + x->theta[1];
}

static void hide(const Head *x, const Chunk *at, const Row *row, real *s)
{
    const Call *c = x->call;
    if (c->padding) {
        const uint8_t *padding = c->padding + x->b * c->src + at->keys;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] = padding[j] ? -(real)INFINITY : s[j];
    }
    if (c->documents) {
        const int64_t *documents = c->documents + x->b * c->src;
        int64_t own = documents[at->slot + row->r];
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] = documents[at->keys + j] != own ? -(real)INFINITY : s[j];
    }
}

/* The logits of a tile in `s`, -inf where hidden; cells that rows do not see are left as they are.
 * Content before it is multiplied is kept in `content`. */
static void logits(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    if (x->tri)
        trilinear(x, at);
    else
        product(at->count, at->length, c->dim, rows_of(x->q, x->dim),
                panels_from(x->k_panels, c->dim, at->keys), x->s, x->tile, 0);
    if (x->f) /* for all of the group */
        product(at->count, at->length, c->rank, rows_of(x->f, x->rank),
                panels_from(x->g_panels, c->rank, at->keys), x->factors, x->tile, 0);
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *s = x->s + r * x->tile;
        if (x->multiplied) {
            memcpy(x->content + r * x->tile, s, at->length * sizeof(real));
            multiply(x, at, &row, s);
        }
        add_positions(x, at, &row, s);
        hide(x, at, &row, s);
    }
}

/* Bits for the cells of a row, as dropout reads them. */
INLINE void draw(Head *x, const Chunk *at, const Row *row)
{
    const Call *c = x->call;
    int64_t head = x->b * c->all_heads + c->first_head + x->h;
    random_bits(x->bits, c->seed, head, at->first + row->r, at->keys, at->length);
}

#endif
