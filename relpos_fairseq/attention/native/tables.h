/* Products of queries, or of keys, with tables of vectors over distances.
 *
 * A pair (i, j) needs x.table_d for its distance d = j - i, where x is its query (query_vectors,
 * product_query), its key (key_vectors, product_key) or the gradient of its query's output
 * (value_vectors).  No pair has a product of its own.  All x of one side are multiplied with the rows
 * of the table at once, which gives a matrix `products`:
 *
 *     of queries (rows of a block, distances),     of keys (src, distances)
 *
 * and row i of a tile gathers its cells from it: along a row for queries, along a diagonal for keys.
 * Backward, cells are scattered into `sums`, which has the same shape.
 *
 * Over a band between two tails `distances` is the table's width, and a tail is one number a row.  Where
 * tables are wide, `products` is formed for the distances of one chunk.  A key's row begins one distance
 * later than that of the key before it, so that keys are taken KEYS at a time.
 */
#ifndef RELPOS_TABLES_H
#define RELPOS_TABLES_H

#include "scalars.h"

#define KEYS 24 /* keys whose products with wide tables are formed at a time */

typedef struct {
    const real *table;            /* (width, channels) of this head, or NULL: the call has no such table */
    real factor;                  /* scale, or 1 */
    real *columns;                /* (channels, length) the table transposed, times factor */
    real *rows;                   /* (width, channels) the table, times factor; channels padded to VL */
    int64_t length;               /* of a row of `columns` */
    real *products;               /* (queries or keys, distances) */
    real *sums;                   /* of the same shape: what cells scatter into it, gradients of
                                   * `products`, or probabilities summed by distance */
    real *grad;                   /* (width, channels) of the table, not yet times factor */
    real *left, *right;           /* (src,) of keys of a band: first and last column of `products` */
    real *left_sums, *right_sums; /* (src,) of keys of a band: what the tails scatter */
} Packed; /* a table of vectors, as one thread holds it */

/* A tile: a block of queries beside a chunk of keys. */
typedef struct {
    int64_t first, count, slot;  /* queries, from row `first` of the call, which stands on `slot` */
    int64_t keys, length;        /* the first key, and how many */
    int64_t low, width, wide;    /* as in Call */
    int64_t query_row, key_row;  /* elements from one row of `products` to the next */
    int64_t from;                /* wide: the table's row of column 0 of queries' `products` */
} Chunk;

/* Row r of a tile: its query sees keys begin..end of the chunk, and the band has left..right. */
typedef struct {
    int64_t r, begin, end, left, right;
    int64_t place; /* the table's row for this query and the chunk's first key; may be negative */
} Row;

/* Wide: the table's row of column 0 of the `products` of KEYS keys, of which `j` is the first. */
INLINE int64_t from_of_keys(const Chunk *at, int64_t j)
{
    int64_t last = at->slot + at->count - 1;
    return most(at->keys + j - last - at->low, 0);
}

/* Wide: columns of the `products` of KEYS keys beside `rows` queries. */
INLINE int64_t columns_of_keys(int64_t rows) { return round_up(KEYS + rows + NR, NR); }

/* out[j] = (add: +=) the product of row r's query for the distance of key j, for the keys it sees. */
INLINE void gather_by_query(const Packed *packed, const Chunk *at, const Row *row, real *out, int add)
{
    const real *products = packed->products + row->r * at->query_row;
    if (at->wide) {
        int64_t place = row->place - at->from;
        for (int64_t j = row->begin; j < row->end; j++)
            out[j] = (add ? out[j] : 0) + products[j + place];
        return;
    }
    real before = products[0], after = products[at->width - 1];
    for (int64_t j = row->begin; j < row->left; j++)
        out[j] = (add ? out[j] : 0) + before;
    for (int64_t j = row->left; j < row->right; j++)
        out[j] = (add ? out[j] : 0) + products[j + row->place];
    for (int64_t j = row->right; j < row->end; j++)
        out[j] = (add ? out[j] : 0) + after;
}

/* The converse: sums of the query's row += in[j], by distance. */
INLINE void scatter_by_query(const Packed *packed, const Chunk *at, const Row *row, const real *in)
{
    real *sums = packed->sums + row->r * at->query_row;
    if (at->wide) {
        int64_t place = row->place - at->from;
        for (int64_t j = row->begin; j < row->end; j++)
            sums[j + place] += in[j];
        return;
    }
    sums[0] += total(in + row->begin, row->left - row->begin);
    for (int64_t j = row->left; j < row->right; j++)
        sums[j + row->place] += in[j];
    sums[at->width - 1] += total(in + row->right, row->end - row->right);
}

/* out[j] = (add: +=) the product of key j for its distance from row r, for the keys that it sees. */
INLINE void gather_by_key(const Packed *packed, const Chunk *at, const Row *row, real *out, int add)
{
    int64_t step = at->key_row + 1;
    if (at->wide) {
        for (int64_t key = 0; key < at->length; key += KEYS) {
            int64_t place = row->place - from_of_keys(at, key);
            for (int64_t j = most(row->begin, key); j < least(row->end, key + KEYS); j++)
                out[j] = (add ? out[j] : 0) + packed->products[j * step + place];
        }
        return;
    }
    const real *left = packed->left + at->keys, *right = packed->right + at->keys;
    int64_t place = at->keys * at->key_row + row->place;
    for (int64_t j = row->begin; j < row->left; j++)
        out[j] = (add ? out[j] : 0) + left[j];
    for (int64_t j = row->left; j < row->right; j++)
        out[j] = (add ? out[j] : 0) + packed->products[j * step + place];
    for (int64_t j = row->right; j < row->end; j++)
        out[j] = (add ? out[j] : 0) + right[j];
}

/* The converse: sums of key j's row += in[j], by distance. */
INLINE void scatter_by_key(const Packed *packed, const Chunk *at, const Row *row, const real *in)
{
    int64_t step = at->key_row + 1;
    if (at->wide) {
        for (int64_t key = 0; key < at->length; key += KEYS) {
            int64_t place = row->place - from_of_keys(at, key);
            for (int64_t j = most(row->begin, key); j < least(row->end, key + KEYS); j++)
                packed->sums[j * step + place] += in[j];
        }
        return;
    }
    real *left = packed->left_sums + at->keys, *right = packed->right_sums + at->keys;
    int64_t place = at->keys * at->key_row + row->place;
    for (int64_t j = row->begin; j < row->left; j++)
        left[j] += in[j];
    for (int64_t j = row->left; j < row->right; j++)
        packed->sums[j * step + place] += in[j];
    for (int64_t j = row->right; j < row->end; j++)
        right[j] += in[j];
}

#endif
