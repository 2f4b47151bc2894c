/* The logits of a tile (rows, tile): a block of queries beside a chunk of keys. */
#ifndef RELPOS_LOGITS_H
#define RELPOS_LOGITS_H

#include "trilinear.h"

/* s[j] *= gate_d (q.product_query_d) (k_j.product_key_d), for the keys that row r sees. */
static void multiply_row(Head *x, const Chunk *at, const Row *row, real *s)
{
    real *factor = x->scratch_a, *by_query = x->scratch_b, *by_key = x->scratch_c;
    if (x->gate) {
        const real *gate = x->gate + row->place + at->low + x->call->start + x->call->tgt - 1;
        memcpy(factor + row->begin, gate + row->begin, (row->end - row->begin) * sizeof(real));
    } else {
        fill(factor + row->begin, row->end - row->begin, 1);
    }
    if (x->product_query.table) {
        gather_by_query(&x->product_query, at, row, by_query, 0);
        gather_by_key(&x->product_key, at, row, by_key, 0);
        for (int64_t j = row->begin; j < row->end; j++)
            factor[j] *= by_query[j] * by_key[j];
    }
    for (int64_t j = row->begin; j < row->end; j++)
        s[j] *= factor[j];
}

/* s[j] += what the kinds in `kinds` (RESET_*) add, for the keys that row r sees. */
static void add_kinds(Head *x, const Chunk *at, const Row *row, real *s, int kinds)
{
    if (kinds & RESET_VECTORS) {
        if (x->query_vectors.table)
            gather_by_query(&x->query_vectors, at, row, s, 1);
        if (x->key_vectors.table)
            gather_by_key(&x->key_vectors, at, row, s, 1);
    }
    if ((kinds & RESET_SCALARS) && x->static_) {
        const real *table = x->static_ + row->place + at->low + x->call->start + x->call->tgt - 1;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += table[j];
    }
    if ((kinds & RESET_FACTORS) && x->factors) {
        const real *factors = x->factors + row->r * x->tile;
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += factors[j];
    }
}

/* The place in the chunk of the first token's column, or -1 where row r does not see it. */
INLINE int64_t reset_column(const Head *x, const Chunk *at, const Row *row)
{
    int64_t j = x->first - at->keys;
    return row->begin <= j && j < row->end ? j : -1;
}

/* s[j] += what positions add.  In the first token's row and column, `reset` stands for the kinds that it
 * replaces (`replaced`). */
static void add_positions(Head *x, const Chunk *at, const Row *row, real *s)
{
    int replaced = (int)x->call->reset_kinds, all = RESET_VECTORS | RESET_SCALARS | RESET_FACTORS;
    add_kinds(x, at, row, s, all & ~replaced);
    if (!replaced)
        return;
    int is_first = at->slot + row->r == x->first;
    int64_t column = reset_column(x, at, row);
    real before = column >= 0 ? s[column] : 0;
    if (is_first) {
        for (int64_t j = row->begin; j < row->end; j++)
            s[j] += x->reset[0];
        return;
    }
    add_kinds(x, at, row, s, replaced);
    if (column >= 0)
        s[column] = before + x->reset[1];
}

/* s[j] = -inf where padding or another document hides key j from row r. */
static void mask_row(const Head *x, const Chunk *at, const Row *row, real *s)
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

/* s (rows, tile) = the logits, -inf where a key is hidden.  Cells beyond a row's begin..end (causal, window)
 * hold no logit, and nothing reads them.  `content` keeps the content before it is multiplied. */
static void logits(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    if (x->trilinear)
        trilinear_content(x, at);
    else /* (rows, dim) (dim, tile) */
        product(at->count, at->length, c->dim, rows_of(x->q, x->dim),
                panels_from(x->k_panels, c->dim, at->keys), x->s, x->tile, 0);
    /* (rows, rank) (rank, tile), once for all members of a group */
    if (x->query_factors)
        product(at->count, at->length, c->rank, rows_of(x->query_factors, x->rank),
                panels_from(x->key_factor_panels, c->rank, at->keys), x->factors, x->tile, 0);
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *s = x->s + r * x->tile;
        if (x->multiplied) {
            memcpy(x->content + r * x->tile, s, at->length * sizeof(real));
            multiply_row(x, at, &row, s);
        }
        add_positions(x, at, &row, s);
        mask_row(x, at, &row, s);
    }
}

/* bits[j] = 16 random bits for each cell of row r, of which dropout keeps those from `drop` on. */
INLINE void draw(Head *x, const Chunk *at, const Row *row)
{
    const Call *c = x->call;
    int64_t head = x->b * c->all_heads + c->first_head + x->h;
    random_bits(x->bits, c->seed, head, at->first + row->r, at->keys, at->length);
}

#endif
