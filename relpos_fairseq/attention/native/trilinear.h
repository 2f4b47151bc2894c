/* sum_c q_c k_c w_d,c in place of q.k (Huang's M3): tails are products with other queries, which have
 * the tail's w in them; the band goes channel by channel, along rows of keys and of distances. */
#ifndef RELPOS_TRILINEAR_H
#define RELPOS_TRILINEAR_H

#include "head.h"

/* Columns begin..end of the chunk, multiples of NR or its ends, that may lie in a tail. */
INLINE void tails_of(const Chunk *at, int64_t *left_end, int64_t *right_begin)
{
    *left_end = *right_begin = 0;
    if (at->wide) {
        *right_begin = at->length;
        return;
    }
    int64_t last = at->slot + at->count - 1;
    *left_end = clamp(last + at->low + 1 - at->keys, 0, at->length);
    *right_begin = clamp(at->slot + at->low + at->width - 1 - at->keys, 0, at->length) / NR * NR;
}

#define STRIP (2 * VL)

static void trilinear_row(const Head *x, const Row *row, const Chunk *at, real *out)
{
    const real *q = x->q + row->r * x->dim;
    int64_t dim = x->call->dim;
    for (int64_t j = row->left; j < row->right; j += STRIP) {
        const real *k = x->k_channels + at->keys + j, *w = x->tri_channels + row->place + j;
        vec sums[2] = {{0}, {0}};
        for (int64_t c = 0; c < dim; c++) {
            const real *kc = k + c * x->k_length, *wc = w + c * x->tri_length;
            sums[0] += q[c] * *(const vec *)wc * *(const vec *)kc;
            sums[1] += q[c] * *(const vec *)(wc + VL) * *(const vec *)(kc + VL);
        }
        memcpy(out + j, sums, least(STRIP, row->right - j) * sizeof(real));
    }
}

/* The content of a tile. */
static void trilinear(Head *x, const Chunk *at)
{
    int64_t left_end, right_begin, dim = x->call->dim;
    tails_of(at, &left_end, &right_begin);
    product(at->count, left_end, dim, rows_of(x->left_q, x->dim),
            panels_from(x->k_panels, dim, at->keys), x->s, x->tile, 0);
    product(at->count, at->length - right_begin, dim, rows_of(x->right_q, x->dim),
            panels_from(x->k_panels, dim, at->keys + right_begin), x->other + right_begin, x->tile, 0);
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *s = x->s + r * x->tile, *other = x->other + r * x->tile;
        trilinear_row(x, &row, at, s);
        memcpy(s + row.right, other + row.right, (row.end - row.right) * sizeof(real));
    }
}

static void trilinear_back_row(Head *x, const Row *row, const Chunk *at, const real *change)
{
    const real *q = x->q + row->r * x->dim;
    real *dq = x->dq + row->r * x->dim, *d = x->three;
    int64_t dim = x->call->dim, count = row->right - row->left;
    if (!count)
        return;
    memcpy(d, change + row->left, count * sizeof(real));
    zero(d + count, round_up(count, VL) - count);
    int64_t key = at->keys + row->left, distance = row->place + row->left;
    for (int64_t c = 0; c < dim; c++) {
        const real *k = x->k_channels + c * x->k_length + key;
        const real *w = x->tri_channels + c * x->tri_length + distance;
        real *dk = x->dk_channels + c * x->k_length + key;
        real *dw = x->dtri_channels + c * x->tri_length + distance;
        vec sum = {0};
        for (int64_t j = 0; j < count; j += VL) {
            vec own = *(const vec *)(d + j), kv = *(const vec *)(k + j), wv = *(const vec *)(w + j);
            vec turned = own * wv;
            sum += turned * kv;
            *(vec *)(dk + j) += q[c] * turned;
            *(vec *)(dw + j) += q[c] * (own * kv);
        }
        real whole = 0;
        for (int v = 0; v < VL; v++)
            whole += sum[v];
        dq[c] += whole;
    }
}

/* The gradient of a tile's content, which is cut up: (rows, tile). */
static void trilinear_back(Head *x, const Chunk *at, real *change)
{
    int64_t left_end, right_begin, dim = x->dim;
    tails_of(at, &left_end, &right_begin);
    right_begin = right_begin / MR * MR; /* so that blocks of rows of dk end where a chunk's do */
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *d = change + r * x->tile, *other = x->other + r * x->tile;
        trilinear_back_row(x, &row, at, d);
        zero(other, row.right);
        memcpy(other + row.right, d + row.right, (row.end - row.right) * sizeof(real));
        zero(other + row.end, x->tile - row.end); /* blocks may end beyond a chunk */
        zero(d + row.left, x->tile - row.left);
    }
    const real *k = x->k_rows + at->keys * dim;
    real *dk = x->dk + at->keys * dim;
    if (left_end) {
        product(at->count, dim, left_end, rows_of(change, x->tile), matrix(k, dim), x->dleft_q, dim, 1);
        product(left_end, dim, at->count, columns_of(change, x->tile), matrix(x->left_q, dim), dk, dim,
                1);
    }
    int64_t length = at->length - right_begin;
    if (length) {
        const real *other = x->other + right_begin;
        k += right_begin * dim;
        dk += right_begin * dim;
        product(at->count, dim, length, rows_of(other, x->tile), matrix(k, dim), x->dright_q, dim, 1);
        product(length, dim, at->count, columns_of(other, x->tile), matrix(x->right_q, dim), dk, dim, 1);
    }
}

/* Gradients of tails' queries are ones of queries and of the table's ends. */
static void trilinear_end_block(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    const real *left = x->tri, *right = x->tri + (c->width - 1) * c->dim;
    for (int64_t r = 0; r < at->count; r++) {
        int64_t o = r * x->dim;
        for (int64_t i = 0; i < c->dim; i++) {
            x->dq[o + i] += x->dleft_q[o + i] * left[i] + x->dright_q[o + i] * right[i];
            x->dtri_ends[i] += x->dleft_q[o + i] * x->q[o + i];
            x->dtri_ends[x->dim + i] += x->dright_q[o + i] * x->q[o + i];
        }
    }
}

#endif
