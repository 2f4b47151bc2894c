/* Tables of vectors read by distance: gather a pair's dot product, and scatter a pair's gradient.
 *
 * A pair (i, j) needs the dot product x.table_d for its distance d = j - i.  Here x is the query (for query_vectors and
 * product_query), the key (key_vectors, product_key), or the gradient of the query's output (value_vectors).  No pair
 * forms its own dot product.  One matrix product of all x of a side with all rows of the table gives `products`:
 *
 *     (queries of a block, distances)   or   (keys, distances)
 *
 * Row i of a tile gathers its cells from it: along a row of `products` for queries, along a diagonal for keys.  In the
 * backward pass, cells are scattered into a matrix of the same shape.
 *
 * Of a clipped table, `distances` is the table's width, and all pairs of a row at a clipped end read one number.  Of an
 * unclipped table, `products` covers the distances of one tile only.  Along keys, a row of it then begins one distance
 * later than the row before, so that keys are multiplied KEYS_AT_ONCE at a time.
 */
#ifndef RELPOS_TABLES_H
#define RELPOS_TABLES_H

#include "rowwise.h"

#define KEYS_AT_ONCE 24 /* keys whose products with unclipped tables are formed at a time */

/* A table of vectors, as one thread holds it. */
typedef struct {
    const real *data; /* (width, channels) the table of this head, or NULL: the call has no such table */
    real scale;       /* the call's scale, or 1 */
    real *transposed; /* (channels, transposed_stride): scale * data^T */
    real *rows;       /* (width, channels): scale * data, its channels padded with zeros to VL */
    int64_t transposed_stride;
    real *products;  /* (queries or keys, distances) dot products */
    real *scattered; /* of the shape of `products`: their gradients; of value_vectors, in the forward pass, the
                               * probabilities summed by distance */
    real *grad;      /* (width, channels) gradient of scale * data */
    real *low_products, *high_products;   /* (src_len,) clipped, of keys: first and last column of `products` */
    real *low_scattered, *high_scattered; /* (src_len,) clipped, of keys: gradients of these two columns */
} PackedTable;

/* A tile: a block of queries beside a chunk of keys. */
typedef struct {
    int64_t first_query, num_queries; /* of the call */
    int64_t first_slot;               /* of the first query */
    int64_t first_key, num_keys;
    int64_t low, width, unclipped;    /* as in Call */
    int64_t query_stride, key_stride; /* elements from one row of `products` to the next: of queries, of keys */
    int64_t first_row, columns;       /* the rows of tables that queries' `products` are of; clipped: 0 and width */
} Tile;

/* A row of a tile: one query.  It sees the keys begin .. end of the chunk; those near_begin .. near_end are at near
 * distances, those before at the low end, those behind at the high end. */
typedef struct {
    int64_t query, begin, end, near_begin, near_end;
    int64_t table_row; /* the row of the table for this query and the chunk's first key; may be negative */
} Row;

/* Unclipped: the row of the table that column 0 of the `products` of KEYS_AT_ONCE keys, from key j on, is of. */
INLINE int64_t first_row_of_keys(const Tile *tile, int64_t j)
{
    int64_t last = tile->first_slot + tile->num_queries - 1;
    return max_of(tile->first_key + j - last - tile->low, 0);
}

/* Unclipped: how many columns the `products` of KEYS_AT_ONCE keys have beside `queries` queries. */
INLINE int64_t key_product_columns(int64_t queries) { return round_up(KEYS_AT_ONCE + queries + NR, NR); }

/* out[j] = (or, with `add`, +=) the dot product of the row's query for the distance of key j, for the keys it sees. */
INLINE void gather_by_query(const PackedTable *packed, const Tile *tile, const Row *row, real *out, int add)
{
    const real *products = packed->products + row->query * tile->query_stride; /* (distances,) */
    if (tile->unclipped) {
        int64_t column = row->table_row - tile->first_row;
        for (int64_t j = row->begin; j < row->end; j++)
            out[j] = (add ? out[j] : 0) + products[j + column];
        return;
    }
    real low_end = products[0], high_end = products[tile->width - 1];
    for (int64_t j = row->begin; j < row->near_begin; j++)
        out[j] = (add ? out[j] : 0) + low_end;
    for (int64_t j = row->near_begin; j < row->near_end; j++)
        out[j] = (add ? out[j] : 0) + products[j + row->table_row];
    for (int64_t j = row->near_end; j < row->end; j++)
        out[j] = (add ? out[j] : 0) + high_end;
}

/* The transpose of gather_by_query: scattered[distance of key j] += in[j], in the query's row. */
INLINE void scatter_by_query(const PackedTable *packed, const Tile *tile, const Row *row, const real *in)
{
    real *scattered = packed->scattered + row->query * tile->query_stride; /* (distances,) */
    if (tile->unclipped) {
        int64_t column = row->table_row - tile->first_row;
        for (int64_t j = row->begin; j < row->end; j++)
            scattered[j + column] += in[j];
        return;
    }
    scattered[0] += total(in + row->begin, row->near_begin - row->begin);
    for (int64_t j = row->near_begin; j < row->near_end; j++)
        scattered[j + row->table_row] += in[j];
    scattered[tile->width - 1] += total(in + row->near_end, row->end - row->near_end);
}

/* out[j] = (or, with `add`, +=) the dot product of key j for its distance from the row's query, for the keys
 * it sees. */
INLINE void gather_by_key(const PackedTable *packed, const Tile *tile, const Row *row, real *out, int add)
{
    int64_t diagonal = tile->key_stride + 1; /* elements from one key to the next, at a distance one larger */
    if (tile->unclipped) {
        for (int64_t key = 0; key < tile->num_keys; key += KEYS_AT_ONCE) {
            int64_t column = row->table_row - first_row_of_keys(tile, key);
            for (int64_t j = max_of(row->begin, key); j < min_of(row->end, key + KEYS_AT_ONCE); j++)
                out[j] = (add ? out[j] : 0) + packed->products[j * diagonal + column];
        }
        return;
    }
    const real *low_end = packed->low_products + tile->first_key, *high_end = packed->high_products + tile->first_key;
    int64_t near = tile->first_key * tile->key_stride + row->table_row;
    for (int64_t j = row->begin; j < row->near_begin; j++)
        out[j] = (add ? out[j] : 0) + low_end[j];
    for (int64_t j = row->near_begin; j < row->near_end; j++)
        out[j] = (add ? out[j] : 0) + packed->products[j * diagonal + near];
    for (int64_t j = row->near_end; j < row->end; j++)
        out[j] = (add ? out[j] : 0) + high_end[j];
}

/* The transpose of gather_by_key: scattered[key j, its distance] += in[j]. */
INLINE void scatter_by_key(const PackedTable *packed, const Tile *tile, const Row *row, const real *in)
{
    int64_t diagonal = tile->key_stride + 1;
    if (tile->unclipped) {
        for (int64_t key = 0; key < tile->num_keys; key += KEYS_AT_ONCE) {
            int64_t column = row->table_row - first_row_of_keys(tile, key);
            for (int64_t j = max_of(row->begin, key); j < min_of(row->end, key + KEYS_AT_ONCE); j++)
                packed->scattered[j * diagonal + column] += in[j];
        }
        return;
    }
    real *low_end = packed->low_scattered + tile->first_key, *high_end = packed->high_scattered + tile->first_key;
    int64_t near = tile->first_key * tile->key_stride + row->table_row;
    for (int64_t j = row->begin; j < row->near_begin; j++)
        low_end[j] += in[j];
    for (int64_t j = row->near_begin; j < row->near_end; j++)
        packed->scattered[j * diagonal + near] += in[j];
    for (int64_t j = row->near_end; j < row->end; j++)
        high_end[j] += in[j];
}

#endif
