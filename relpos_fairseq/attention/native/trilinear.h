/* Content as sum_c q_c k_c w_d,c (Huang's M3), with w the trilinear table.
 *
 * In a tail w is one row, which is multiplied into the queries (left_q, right_q): there the content is an
 * ordinary product.  In the band w changes with every cell.  There the sum goes channel by channel: for
 * one query and one channel, keys j and distances d = j - i both run along memory, so that k and w are
 * kept transposed, (dim, src) and (dim, width).
 */
#ifndef RELPOS_TRILINEAR_H
#define RELPOS_TRILINEAR_H

#include "begin.h"

/* The keys 0..left_end of the chunk hold all of the block's cells in the left tail, those from right_begin
 * on all in the right one. */
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

/* out[j] = sum_c q_c k_c,j w_c,d for row r's keys in the band. */
static void trilinear_row(const Head *x, const Row *row, const Chunk *at, real *out)
{
    const real *q = x->q + row->r * x->dim;
    int64_t dim = x->call->dim;
    for (int64_t j = row->left; j < row->right; j += STRIP) {
        const real *k = x->k_channels + at->keys + j, *w = x->trilinear_channels + row->place + j;
        vec sums[2] = {{0}, {0}};
        for (int64_t c = 0; c < dim; c++) {
            const real *kc = k + c * x->k_length, *wc = w + c * x->trilinear_length;
            sums[0] += q[c] * *(const vec *)wc * *(const vec *)kc;
            sums[1] += q[c] * *(const vec *)(wc + VL) * *(const vec *)(kc + VL);
        }
        memcpy(out + j, sums, least(STRIP, row->right - j) * sizeof(real));
    }
}

/* s (rows, tile) = the content of a tile. */
static void trilinear_content(Head *x, const Chunk *at)
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

/* From `change`, the gradient of row r's content, to those of its query, keys and w in the band. */
static void trilinear_row_back(Head *x, const Row *row, const Chunk *at, const real *change)
{
    const real *q = x->q + row->r * x->dim;
    real *dq = x->dq + row->r * x->dim, *d = x->scratch_c; /* (count,) padded with zeros to VL */
    int64_t dim = x->call->dim, count = row->right - row->left;
    if (!count)
        return;
    memcpy(d, change + row->left, count * sizeof(real));
    zero(d + count, round_up(count, VL) - count);
    int64_t key = at->keys + row->left, distance = row->place + row->left;
    for (int64_t c = 0; c < dim; c++) {
        const real *k = x->k_channels + c * x->k_length + key;
        const real *w = x->trilinear_channels + c * x->trilinear_length + distance;
        real *dk = x->dk_channels + c * x->k_length + key;
        real *dw = x->dtrilinear_channels + c * x->trilinear_length + distance;
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

/* From the gradient of a tile's content (rows, tile), which is overwritten: `change` keeps the left tail's
 * cells, `other` takes the right tail's, and those of the band go row by row. */
static void trilinear_back(Head *x, const Chunk *at, real *change)
{
    int64_t left_end, right_begin, dim = x->dim;
    tails_of(at, &left_end, &right_begin);
    right_begin = right_begin / MR * MR; /* so that blocks of rows of dk end where a chunk's do */
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *d = change + r * x->tile, *other = x->other + r * x->tile;
        trilinear_row_back(x, &row, at, d);
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

/* left_q = q * w_first and right_q = q * w_last: their gradients are those of q and of w's two ends. */
static void trilinear_end_block(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    const real *left = x->trilinear, *right = x->trilinear + (c->width - 1) * c->dim;
    for (int64_t r = 0; r < at->count; r++) {
        int64_t o = r * x->dim;
        for (int64_t i = 0; i < c->dim; i++) {
            x->dq[o + i] += x->dleft_q[o + i] * left[i] + x->dright_q[o + i] * right[i];
            x->dtrilinear_ends[i] += x->dleft_q[o + i] * x->q[o + i];
            x->dtrilinear_ends[x->dim + i] += x->dright_q[o + i] * x->q[o + i];
        }
    }
}

#endif
