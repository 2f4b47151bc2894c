/* The trilinear content sum_c q_c k_c w_d,c (the M3 of Huang2020), where w is the call's trilinear table.
 *
 * At a clipped end, w is one row.  It is multiplied into the queries (low_q, high_q), and the content is an ordinary
 * matrix product.  At near distances, w changes from cell to cell, and the sum runs channel by channel.  For one query
 * and one channel, the keys j and the distances d = j - i both run along memory, so that k and w are kept transposed:
 * (dim, src_len) and (dim, width).
 */
#ifndef RELPOS_TRILINEAR_H
#define RELPOS_TRILINEAR_H

#include "head.h"

/* The keys 0 .. low_stop of the chunk include all of the block's cells at the low end, the keys from high_start on all
 * cells at the high end. */
INLINE void clipped_keys(const Tile *tile, int64_t *low_stop, int64_t *high_start)
{
    *low_stop = *high_start = 0;
    if (tile->unclipped) {
        *high_start = tile->num_keys;
        return;
    }
    int64_t last = tile->first_slot + tile->num_queries - 1;
    *low_stop = clamp(last + tile->low + 1 - tile->first_key, 0, tile->num_keys);
    *high_start = clamp(tile->first_slot + tile->low + tile->width - 1 - tile->first_key, 0, tile->num_keys) / NR * NR;
}

#define STRIP (2 * VL)

/* out[j] = sum_c q_c k_c,j w_c,d for the row's keys at near distances. */
static void trilinear_row(const Head *head, const Row *row, const Tile *tile, real *out)
{
    const real *q = head->q + row->query * head->dim; /* (dim,) */
    int64_t dim = head->call->dim;
    for (int64_t j = row->near_begin; j < row->near_end; j += STRIP) {
        const real *k = head->k_channels + tile->first_key + j, *w = head->trilinear_channels + row->table_row + j;
        vec sums[2] = {{0}, {0}};
        for (int64_t c = 0; c < dim; c++) {
            const real *kc = k + c * head->k_channel_stride, *wc = w + c * head->trilinear_channel_stride;
            sums[0] += q[c] * *(const vec *)wc * *(const vec *)kc;
            sums[1] += q[c] * *(const vec *)(wc + VL) * *(const vec *)(kc + VL);
        }
        memcpy(out + j, sums, min_of(STRIP, row->near_end - j) * sizeof(real));
    }
}

/* s (num_queries, num_keys) = the content of a tile. */
static void trilinear_content(Head *head, const Tile *tile)
{
    int64_t low_stop, high_start, dim = head->call->dim;
    clipped_keys(tile, &low_stop, &high_start);
    /* (num_queries, dim) (dim, keys), at the low end and at the high end */
    matmul(tile->num_queries, low_stop, dim, left_rows(head->low_q, head->dim),
           right_panels(head->k_panels, dim, tile->first_key), head->s, head->tile_stride, 0);
    matmul(tile->num_queries, tile->num_keys - high_start, dim, left_rows(head->high_q, head->dim),
           right_panels(head->k_panels, dim, tile->first_key + high_start), head->high_content + high_start,
           head->tile_stride, 0);
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        real *s = head->s + r * head->tile_stride, *high_content = head->high_content + r * head->tile_stride;
        trilinear_row(head, &row, tile, s);
        memcpy(s + row.near_end, high_content + row.near_end, (row.end - row.near_end) * sizeof(real));
    }
}

/* From the gradient of a row's content, at near distances, to the gradients of its query, of keys and of w. */
static void trilinear_row_back(Head *head, const Row *row, const Tile *tile, const real *dcontent)
{
    const real *q = head->q + row->query * head->dim;
    real *dq = head->dq + row->query * head->dim, *d = head->scratch_c; /* (count,) padded with zeros to VL */
    int64_t dim = head->call->dim, count = row->near_end - row->near_begin;
    if (!count)
        return;
    memcpy(d, dcontent + row->near_begin, count * sizeof(real));
    zero(d + count, round_up(count, VL) - count);
    int64_t key = tile->first_key + row->near_begin, distance = row->table_row + row->near_begin;
    for (int64_t c = 0; c < dim; c++) {
        const real *k = head->k_channels + c * head->k_channel_stride + key;
        const real *w = head->trilinear_channels + c * head->trilinear_channel_stride + distance;
        real *dk = head->dk_channels + c * head->k_channel_stride + key;
        real *dw = head->dtrilinear_channels + c * head->trilinear_channel_stride + distance;
        vec sum = {0};
        for (int64_t j = 0; j < count; j += VL) {
            vec own = *(const vec *)(d + j), kv = *(const vec *)(k + j), wv = *(const vec *)(w + j);
            vec weighted = own * wv;
            sum += weighted * kv;
            *(vec *)(dk + j) += q[c] * weighted;
            *(vec *)(dw + j) += q[c] * (own * kv);
        }
        real all_keys = 0;
        for (int v = 0; v < VL; v++)
            all_keys += sum[v];
        dq[c] += all_keys;
    }
}

/* From the gradient of a tile's content (num_queries, tile_stride) to all that it came from.  `dcontent` is
 * overwritten: it keeps the cells at the low end, `high_content` takes those at the high end, and near ones go row by
 * row. */
static void trilinear_back(Head *head, const Tile *tile, real *dcontent)
{
    int64_t low_stop, high_start, dim = head->dim;
    clipped_keys(tile, &low_stop, &high_start);
    high_start = high_start / MR * MR; /* so that blocks of rows of dk end where a chunk's do */
    for (int64_t r = 0; r < tile->num_queries; r++) {
        Row row = row_of_tile(head, tile, r);
        real *d = dcontent + r * head->tile_stride, *dhigh = head->high_content + r * head->tile_stride;
        trilinear_row_back(head, &row, tile, d);
        zero(dhigh, row.near_end);
        memcpy(dhigh + row.near_end, d + row.near_end, (row.end - row.near_end) * sizeof(real));
        zero(dhigh + row.end, head->tile_stride - row.end); /* blocks may end beyond a chunk */
        zero(d + row.near_begin, head->tile_stride - row.near_begin);
    }
    const real *k = head->k_rows + tile->first_key * dim; /* (num_keys, dim) */
    real *dk = head->dk + tile->first_key * dim;
    if (low_stop) {
        /* dlow_q (num_queries, dim) += dcontent k;  dk (keys, dim) += dcontent^T low_q */
        matmul(tile->num_queries, dim, low_stop, left_rows(dcontent, head->tile_stride), right_rows(k, dim),
               head->dlow_q, dim, 1);
        matmul(low_stop, dim, tile->num_queries, left_transposed(dcontent, head->tile_stride),
               right_rows(head->low_q, dim), dk, dim, 1);
    }
    int64_t high_keys = tile->num_keys - high_start;
    if (high_keys) {
        const real *dhigh = head->high_content + high_start;
        k += high_start * dim;
        dk += high_start * dim;
        matmul(tile->num_queries, dim, high_keys, left_rows(dhigh, head->tile_stride), right_rows(k, dim),
               head->dhigh_q, dim, 1);
        matmul(high_keys, dim, tile->num_queries, left_transposed(dhigh, head->tile_stride),
               right_rows(head->high_q, dim), dk, dim, 1);
    }
}

/* From the gradients of low_q = q * w_first and high_q = q * w_last to those of q and of w's two end rows. */
static void trilinear_end_block(Head *head, const Tile *tile)
{
    const Call *call = head->call;
    const real *first = head->trilinear, *last = head->trilinear + (call->width - 1) * call->dim; /* (dim,) */
    for (int64_t r = 0; r < tile->num_queries; r++) {
        int64_t o = r * head->dim;
        for (int64_t i = 0; i < call->dim; i++) {
            head->dq[o + i] += head->dlow_q[o + i] * first[i] + head->dhigh_q[o + i] * last[i];
            head->dtrilinear_ends[i] += head->dlow_q[o + i] * head->q[o + i];
            head->dtrilinear_ends[head->dim + i] += head->dhigh_q[o + i] * head->q[o + i];
        }
    }
}

#endif
