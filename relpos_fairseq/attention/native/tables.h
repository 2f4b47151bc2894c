/* Tables of vectors over distances, met by what stands on one side of a pair.
 *
 * A side's values are a matrix of products: of a block's queries (or of the gradient of their
 * output) with a table's rows, one row a query; or of all keys, one row a key.  Over a band between
 * two tails the matrix has a column a distance of the window.  Where tables are wide, it is formed
 * for a chunk's distances; for keys, whose row j + 1 begins a distance later, KEYS keys at a time.
 */
#ifndef RELPOS_TABLES_H
#define RELPOS_TABLES_H

#include "scalars.h"

#define KEYS 24 /* that meet wide tables at a time: beside them, few distances too many */

typedef struct {
    const real *table;         /* (width, channels) of this head, or NULL: there is no such side */
    real factor;               /* of the table's rows */
    real *columns, *rows;      /* the table packed, times factor */
    int64_t length;            /* of a row of `columns` */
    real *values;              /* products */
    real *changes;             /* the gradient of `values`, or sums of probabilities */
    real *grad;                /* of the table, without factor */
    real *left, *right;        /* keys of a band: the first and last column of `values`, */
    real *to_left, *to_right;  /* and of `changes` */
} Side;

/* A chunk of keys beside a block of queries. */
typedef struct {
    int64_t first, count, slot;  /* queries, from row `first` of the call, which stands on `slot` */
    int64_t keys, length;        /* the first key, and how many */
    int64_t low, width, wide;    /* as in Call */
    int64_t query_row, key_row;  /* elements from one row of `values` to the next */
    int64_t from;                /* wide: the table's row that column 0 of queries' values has */
} Chunk;

/* One query's part of a chunk: keys begin..end are seen, the band's are left..right. */
typedef struct {
    int64_t r, begin, end, left, right;
    int64_t place; /* the table's row of the chunk's first key */
} Row;

/* The table's row that column 0 of the values of KEYS keys, from the chunk's key `j` on, has. */
INLINE int64_t from_of_keys(const Chunk *at, int64_t j)
{
    int64_t last = at->slot + at->count - 1;
    return most(at->keys + j - last - at->low, 0);
}

/* Columns of the values of KEYS keys beside `rows` queries. */
INLINE int64_t columns_of_keys(int64_t rows) { return round_up(KEYS + rows + NR, NR); }

/* What vectors that queries meet are for the keys that a row sees; `add`: added to out. */
INLINE void of_query(const Side *side, const Chunk *at, const Row *row, real *out, int add)
{
    const real *values = side->values + row->r * at->query_row;
    if (at->wide) {
        int64_t place = row->place - at->from;
        for (int64_t j = row->begin; j < row->end; j++)
            out[j] = (add ? out[j] : 0) + values[j + place];
        return;
    }
    real before = values[0], after = values[at->width - 1];
    for (int64_t j = row->begin; j < row->left; j++)
        out[j] = (add ? out[j] : 0) + before;
    for (int64_t j = row->left; j < row->right; j++)
        out[j] = (add ? out[j] : 0) + values[j + row->place];
    for (int64_t j = row->right; j < row->end; j++)
        out[j] = (add ? out[j] : 0) + after;
}

/* The reverse: changes += what came for each key. */
INLINE void to_query(const Side *side, const Chunk *at, const Row *row, const real *in)
{
    real *changes = side->changes + row->r * at->query_row;
    if (at->wide) {
        int64_t place = row->place - at->from;
        for (int64_t j = row->begin; j < row->end; j++)
            changes[j + place] += in[j];
        return;
    }
    changes[0] += total(in + row->begin, row->left - row->begin);
    for (int64_t j = row->left; j < row->right; j++)
        changes[j + row->place] += in[j];
    changes[at->width - 1] += total(in + row->right, row->end - row->right);
}

/* What vectors that keys meet are for the keys that a row sees. */
INLINE void of_key(const Side *side, const Chunk *at, const Row *row, real *out, int add)
{
    int64_t step = at->key_row + 1;
    if (at->wide) {
        for (int64_t key = 0; key < at->length; key += KEYS) {
            int64_t place = row->place - from_of_keys(at, key);
            for (int64_t j = most(row->begin, key); j < least(row->end, key + KEYS); j++)
                out[j] = (add ? out[j] : 0) + side->values[j * step + place];
        }
        return;
    }
    const real *left = side->left + at->keys, *right = side->right + at->keys;
    int64_t place = at->keys * at->key_row + row->place;
    for (int64_t j = row->begin; j < row->left; j++)
        out[j] = (add ? out[j] : 0) + left[j];
    for (int64_t j = row->left; j < row->right; j++)
        out[j] = (add ? out[j] : 0) + side->values[j * step + place];
    for (int64_t j = row->right; j < row->end; j++)
        out[j] = (add ? out[j] : 0) + right[j];
}

/* The reverse. */
INLINE void to_key(const Side *side, const Chunk *at, const Row *row, const real *in)
{
    int64_t step = at->key_row + 1;
    if (at->wide) {
        for (int64_t key = 0; key < at->length; key += KEYS) {
            int64_t place = row->place - from_of_keys(at, key);
            for (int64_t j = most(row->begin, key); j < least(row->end, key + KEYS); j++)
                side->changes[j * step + place] += in[j];
        }
        return;
    }
    real *left = side->to_left + at->keys, *right = side->to_right + at->keys;
    int64_t place = at->keys * at->key_row + row->place;
    for (int64_t j = row->begin; j < row->left; j++)
        left[j] += in[j];
    for (int64_t j = row->left; j < row->right; j++)
        side->changes[j * step + place] += in[j];
    for (int64_t j = row->right; j < row->end; j++)
        right[j] += in[j];
}

#endif
